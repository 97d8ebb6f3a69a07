"""Which retention interval pays: recomputed tokens that more boundaries save, against KV of their bytes.

    s     bytes of a state with its pooling rows      k  KV bytes per token
    b(N)  tokens that boundaries every N tokens save  P  prompt tokens        (both of one trace)
    A     tokens of a step                            M  bytes of the cache
    L     hits lost when the cache shrinks by a share x are L * P * x, for a small x

In the manager states of an interval are superseded by the next one, and the first victims: KV loses
only what is in flight, the A / N states of a step. (A window's blocks are in flight anyway: keeping
one means giving it a key.) So N saves

    net(N) = b(N) - L * P * (A / N * s) / M

recomputed tokens. The largest interval is suggested that saves `ENOUGH` of what the best one does:
every boundary is copied, and a tier below stores it. A cache that keeps boundaries as long as the KV
around them, in LRU order, loses `L * P * w(N) / (k * N)` instead, w(N) the bytes of a boundary with its
windows: `lru_interval_tokens`.

Both costs are linear in s / N, so more bytes in a state never make the suggestion finer.
docs/presets.md shows suggestions beside measured hit rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcache.bench.replay_settings import STEP_TOKENS
from kvcache.bench.reuse import ReuseProfile
from kvcache.bench.sizing import (
    boundary_bytes,
    bytes_per_token,
    spaced_boundary_bytes,
    window_bytes_per_token,
)
from kvcache.core.layout import Geometry

KNEE_TOKENS = 2_000_000
"""M without a given memory, in tokens of KV: where LRU of 16 live coding sessions bends."""
LOSS_PER_SHARE = 0.19
"""L there: hit rate .8191 at 1.4 M tokens, .9501 at 2.8 M; their difference over ln 2. `kvcache replay
claude_code_sessions_500.csv.gz --lanes 16 --block-tokens 128 --pool-tokens 1.4M`; `2.8M`."""
ENOUGH = 0.9


class Candidate(NamedTuple):
    """One interval that was weighed."""

    interval_tokens: int
    boundary_bytes: float
    """Of each, where neighbours share blocks of a window."""
    boundaries: int
    """More than at interval 0, in the trace."""
    saved_tokens: int
    cost_tokens: float
    lru_cost_tokens: float

    @property
    def net_tokens(self) -> float:
        """Recomputed tokens saved, less those that KV loses."""
        return self.saved_tokens - self.cost_tokens

    @property
    def lru_net_tokens(self) -> float:
        """The same in a cache in plain LRU order."""
        return self.saved_tokens - self.lru_cost_tokens


class Suggestion(NamedTuple):
    """Intervals as a retention policy takes them: None is dense, 0 none beside the known ones."""

    interval_tokens: int | None
    lru_interval_tokens: int | None
    reason: str
    memory_bytes: int
    candidates: tuple[Candidate, ...]


def suggest_interval(
    geometry: Geometry, profile: ReuseProfile, memory_bytes: int | None = None
) -> Suggestion:
    """The interval for this geometry and this use, in a cache of `memory_bytes` on each rank."""
    kv_bytes = bytes_per_token(geometry) or window_bytes_per_token(geometry)
    memory = int(KNEE_TOKENS * kv_bytes) if memory_bytes is None else memory_bytes
    one = boundary_bytes(geometry)
    if not one.total:
        reason = (
            "no state and no window: every block is a boundary already, so dense costs nothing and"
            " the interval changes nothing"
        )
        return Suggestion(None, None, reason, memory, ())
    candidates = _candidates(geometry, profile, kv_bytes, memory)
    best = _coarsest(candidates, lambda c: c.net_tokens)
    lru = _coarsest(candidates, lambda c: c.lru_net_tokens)
    kv = "KV" if bytes_per_token(geometry) else "windows"
    size = f"a boundary is as large as {one.total / kv_bytes:,.0f} tokens of {kv}"
    far = (
        f"in {profile.source} {profile.distant_requests:,} of {profile.requests:,} requests reuse"
        f" text beyond the last kept boundary, half of them {profile.distance_tokens[0]:,} tokens"
        f" or more, a tenth {profile.distance_tokens[1]:,}"
    )
    cache = f"a cache of {memory / 2**30:,.1f} GiB ({memory / kv_bytes:,.0f} tokens of {kv})"
    reason = (
        f"{size}; {far}. {_said(best, candidates, cache)}. In plain LRU order (a tier below, other"
        f" engines): {_named(lru, geometry)}"
    )
    return Suggestion(
        _as_policy(best, geometry), _as_policy(lru, geometry), reason, memory, candidates
    )


def _candidates(
    geometry: Geometry, profile: ReuseProfile, kv_bytes: float, memory: int
) -> tuple[Candidate, ...]:
    """By interval, ascending, each rounded up to the grid; of equal ones the coarsest."""
    grid, one = geometry.grid_tokens, boundary_bytes(geometry)
    loss = LOSS_PER_SHARE * profile.prompt_tokens
    found: dict[int, Candidate] = {}
    joined = _joined_tokens(geometry)
    for use in profile.uses:
        interval = -(-use.interval_tokens // grid) * grid
        size = spaced_boundary_bytes(geometry, interval)
        in_flight = STEP_TOKENS / interval * (one.states + one.pooling)
        found[interval] = Candidate(
            interval,
            size,
            use.boundaries,
            profile.uses[0].saved_tokens if interval <= joined else use.saved_tokens,
            loss * in_flight / memory,
            loss * size / (kv_bytes * interval),
        )
    return tuple(found.values())


def _joined_tokens(geometry: Geometry) -> int:
    """Up to which interval the windows of neighbours join, so that a hit can end between them too.

    0 where a boundary has more than windows.
    """
    kept = [rules for rules in geometry.rules if rules.kind in ("span", "state")]
    if any(rules.kind == "state" or rules.transient for rules in kept):
        return 0
    return min(-(-rules.lead_tokens // rules.block_tokens) * rules.block_tokens for rules in kept)


def _coarsest(
    candidates: tuple[Candidate, ...], net: Callable[[Candidate], float]
) -> Candidate | None:
    """The largest interval that saves nearly as much as the best one; None: none saves anything."""
    most = max(map(net, candidates), default=0.0)
    if most <= 0:
        return None
    return max(c for c in candidates if net(c) >= ENOUGH * most)


def _as_policy(chosen: Candidate | None, geometry: Geometry) -> int | None:
    if chosen is None:
        return 0
    return None if chosen.interval_tokens == geometry.grid_tokens else chosen.interval_tokens


def _named(chosen: Candidate | None, geometry: Geometry) -> str:
    interval = _as_policy(chosen, geometry)
    return "dense" if interval is None else f"{interval:,}"


def _said(chosen: Candidate | None, candidates: tuple[Candidate, ...], cache: str) -> str:
    if chosen is None:
        if not any(c.saved_tokens for c in candidates):
            return "Nothing more is to be saved"
        return f"Any interval costs more hits in {cache} than it saves"
    return (
        f"One every {chosen.interval_tokens:,} tokens saves {chosen.saved_tokens:,} recomputed"
        f" tokens, and what is in flight costs {chosen.cost_tokens:,.0f} in {cache}; those of idle"
        " sessions are the first to be evicted: the column `cached` counts them, a full cache does"
        " without"
    )
