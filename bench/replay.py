"""Replays a trace through the block manager: its public API alone, no model, no bytes.

Each request in turn, in the order of the trace:

    open -> lookup -> { step: allocate, commit } prompt -> { step } reply -> finish

Serial service: a request is done before the next one starts, so the figures are those of the
eviction policy alone (nothing is preempted, running requests do not compete for pages). Pages of
the reply are taken and given back like the others, but a trace has no keys for them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.ideal import IdealCache
from kvcache.bench.traces import TraceRequest
from kvcache.core.errors import CapacityError, ConfigError, InvariantError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import LOSS_CAUSES, UNLIMITED
from kvcache.core.retain import RetentionPolicy
from kvcache.core.specs import FullAttention, GroupSpec, RecurrentState
from kvcache.presets import preset
from kvcache.retention import Dense, Sparse

DEFAULT_PRESET = "llama-3-8b"
"""One full-attention group."""

STATE_SHARE = 0.2
"""Part of a bounded pool's bytes that recurrent states get, for want of one arena for all."""

STEP_TOKENS = 8192
"""Token budget of one step."""

_CHECK_PAGES_PER_REQUEST = 1024
_CHECK_PAGES_PER_BLOCK = 1


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """One run. `pool_tokens` None: no bound; `retention_tokens` None: dense, else the interval."""

    block_tokens: int
    pool_tokens: int | None = None
    preset: str = DEFAULT_PRESET
    retention_tokens: int | None = None
    check: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"--block-tokens is {self.block_tokens}: it must be above 0")
        self.geometry()  # names an unknown preset
        if self.pool_tokens is not None and self.pool_tokens < self.block_tokens:
            raise ConfigError(
                f"--pool-tokens {self.pool_tokens} is less than one block of {self.block_tokens}"
                " tokens: raise it, or lower --block-tokens"
            )
        interval = self.retention_tokens
        if interval is not None and (interval < 0 or interval % self.block_tokens):
            raise ConfigError(
                f"--retention {interval} is neither dense, nor 0, nor a multiple of the hit grid"
                f" of {self.block_tokens} tokens (--block-tokens)"
            )

    def geometry(self) -> Geometry:
        """The preset's groups, whole (no sharding)."""
        return preset(self.preset, block_tokens=self.block_tokens)

    def pages(self, geometry: Geometry) -> list[int]:
        """Pages of each group, in the bytes that `pool_tokens` tokens of attention take.

        States share these bytes: a fixed part of them, two pages at least.
        """
        if self.pool_tokens is None:
            return [UNLIMITED] * len(geometry.groups)
        blocks = self.pool_tokens // self.block_tokens
        attention = sum(g.page_bytes for g in geometry.groups if isinstance(g, FullAttention))
        state = sum(g.page_bytes for g in geometry.groups if isinstance(g, RecurrentState))
        states = max(2, int(blocks * attention * STATE_SHARE) // state) if state else 0
        blocks = (blocks * attention - states * state) // attention
        if blocks < 1:
            raise ConfigError(
                f"--pool-tokens {self.pool_tokens} is less than two states of {self.preset} take"
                f" ({2 * state} bytes, {-(-2 * state * self.block_tokens // attention)} tokens):"
                " raise it"
            )
        return [blocks if isinstance(g, FullAttention) else states for g in geometry.groups]

    def enough_tokens(self, tokens: int, geometry: Geometry) -> int:
        """`pool_tokens` with which one request of `tokens` tokens fits, its states included."""
        block = self.block_tokens
        attention = sum(g.page_bytes for g in geometry.groups if isinstance(g, FullAttention))
        state = sum(g.page_bytes for g in geometry.groups if isinstance(g, RecurrentState))
        blocks = -(-tokens // block)
        if state:
            two = -(-2 * state // attention)
            blocks = max(math.ceil(blocks / (1 - STATE_SHARE)), blocks + two)
        return blocks * block

    def policy(self) -> RetentionPolicy:
        """The retention policy."""
        return Dense() if self.retention_tokens is None else Sparse(self.retention_tokens)


def foreign_digests(keys: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Block numbers as opaque keys `[n, 32]`: eight little-endian bytes, then zeros."""
    rows = np.zeros((len(keys), 4), dtype="<i8")
    rows[:, 0] = keys
    return rows.view(np.uint8)


@dataclass
class _Totals:
    """Sums over the counted requests."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0
    states_kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)


class Replay:
    """One run over one trace. `serve` the requests in order, then read `report`."""

    def __init__(self, path: Path, trace_block_tokens: int, settings: ReplaySettings) -> None:
        if settings.block_tokens % trace_block_tokens:
            raise ConfigError(
                f"--block-tokens {settings.block_tokens} is not a multiple of the trace's block of"
                f" {trace_block_tokens} tokens"
            )
        self._path = path
        self._settings = settings
        self._merge = settings.block_tokens // trace_block_tokens
        self._geometry = settings.geometry()
        pages = settings.pages(self._geometry)
        self._pages = pages
        self._states = [
            i for i, g in enumerate(self._geometry.groups) if isinstance(g, RecurrentState)
        ]
        self._manager = Manager(
            self._geometry,
            pages=pages,
            retention=settings.policy(),
            journal=bool(self._states),
            seed=settings.seed,
        )
        self._ideal = IdealCache(settings.block_tokens)
        self._totals = _Totals()
        self._peak_pages = [0] * len(pages)
        self._manager_seconds = 0.0
        self._checks = 0
        self._check_credit_pages = 0

    # ---- one request ---------------------------------------------------------------------------

    def serve(self, request: TraceRequest) -> None:
        """Play one request from open to finish."""
        keys = request.blocks[self._merge - 1 :: self._merge]
        digests = foreign_digests(keys)
        started = time.perf_counter()
        handle = self._open(request, digests)
        hit = self._manager.lookup(handle)
        reused = self._compute(handle, hit.hit_tokens, request.prompt_tokens)
        if request.output_tokens > 1:  # the last token of a reply is never fed back
            self._manager.extend_foreign(handle, request.output_tokens)
            self._compute(
                handle, request.prompt_tokens, request.prompt_tokens + request.output_tokens - 1
            )
        served = time.perf_counter()
        self._watch_peak()
        self._check(len(keys))
        finishing = time.perf_counter()
        self._manager.finish(handle)
        states = self._new_states()
        self._manager_seconds += served - started + time.perf_counter() - finishing
        ideal = self._ideal.hit_tokens(keys, request.prompt_tokens)
        if reused + sum(hit.lost.values()) != request.prompt_tokens:
            raise InvariantError(
                f"{self._path}, line {request.line}: {reused} hit and {hit.lost} lost tokens do not"
                f" add up to a prompt of {request.prompt_tokens}"
            )
        if request.counted:
            totals = self._totals
            totals.requests += 1
            totals.prompt_tokens += request.prompt_tokens
            totals.output_tokens += request.output_tokens
            totals.hit_tokens += reused
            totals.ideal_tokens += ideal
            totals.states_kept += states
            totals.lost.update(hit.lost)

    def _open(self, request: TraceRequest, digests: NDArray[np.uint8]) -> int:
        tokens = request.prompt_tokens + request.output_tokens
        try:
            return self._manager.open_foreign(
                digests, prompt_tokens=request.prompt_tokens, max_tokens=tokens
            )
        except CapacityError as error:
            enough = self._settings.enough_tokens(tokens, self._geometry)
            raise CapacityError(
                f"{self._path}, line {request.line}: the request has {request.prompt_tokens} prompt"
                f" and {request.output_tokens} output tokens, more than the pool of"
                f" {self._settings.pool_tokens} has room for: raise --pool-tokens to {enough} or more"
            ) from error

    def _compute(self, handle: int, start: int, end: int) -> int:
        """Compute tokens [start, end) in steps; returns the tokens adopted by the first one."""
        manager, adopted = self._manager, 0
        while start < end:
            step = manager.begin_step()
            grant = manager.allocate(handle, min(STEP_TOKENS, end - start))
            if grant is None:
                raise InvariantError(
                    f"the pool of {self._settings.pool_tokens} tokens has no room for the only"
                    f" request that runs, at {start} of {end} tokens"
                )
            manager.commit(handle, grant.end)
            manager.end_step(step)
            adopted += grant.hit_tokens
            start = grant.end
        return adopted

    def _new_states(self) -> int:
        """States that got a key since the last call."""
        if not self._states:
            return 0
        return int(np.isin(self._manager.take_keyed()["group"], self._states).sum())

    def _watch_peak(self) -> None:
        for group, peak in enumerate(self._peak_pages):
            stats = self._manager.pool_stats(group)
            self._peak_pages[group] = max(peak, stats.created - stats.free)

    # ---- checks --------------------------------------------------------------------------------

    def _check(self, blocks: int) -> None:
        """`check()` in the middle of a request, as often as a total cost allows.

        A check costs the pages that exist. Each request earns a fixed number of them and one for
        each block it touches: small pools are checked at every request, and all checks together
        look at a few pages for each block of the trace.
        """
        if not self._settings.check:
            return
        self._check_credit_pages += _CHECK_PAGES_PER_REQUEST + _CHECK_PAGES_PER_BLOCK * blocks
        exist = sum(self._manager.pool_stats(g).created for g in range(len(self._peak_pages)))
        if self._check_credit_pages >= exist:
            self._check_credit_pages = 0
            self._manager.check()
            self._checks += 1

    # ---- the end -------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The figures so far, as JSON values. Call when no request is open."""
        leaked = sum(self._manager.pool_stats(g).held for g in range(len(self._peak_pages)))
        if self._settings.check:
            self._manager.check()
            self._checks += 1
        totals, settings = self._totals, self._settings
        prompt = totals.prompt_tokens
        rate = totals.hit_tokens / prompt if prompt else 0.0
        interval = settings.retention_tokens
        return {
            "trace": str(self._path),
            "preset": settings.preset,
            "block_tokens": settings.block_tokens,
            "pool_tokens": "inf" if settings.pool_tokens is None else settings.pool_tokens,
            "retention": "dense" if interval is None else interval,
            "seed": settings.seed,
            "requests": totals.requests,
            "prompt_tokens": prompt,
            "output_tokens": totals.output_tokens,
            "hit_tokens": totals.hit_tokens,
            "hit_rate": rate,
            "ideal_hit_rate": totals.ideal_tokens / prompt if prompt else 0.0,
            "hit_rate_by_source": {"device": rate},
            "lost_tokens_by_cause": {cause: totals.lost[cause] for cause in LOSS_CAUSES},
            "checkpoints_per_request": totals.states_kept / max(1, totals.requests),
            "pool_pages": {
                name: "inf" if count == UNLIMITED else count
                for name, count in zip(self._group_names(), self._pages, strict=True)
            },
            "bytes_per_page": {g.name: g.page_bytes for g in self._geometry.groups},
            "peak_used_pages": dict(zip(self._group_names(), self._peak_pages, strict=True)),
            "peak_used_bytes": self._geometry.pool_bytes(self._peak_pages),
            "preemptions": 0,
            "leaked_blocks": leaked,
            "checks": self._checks,
            "manager_seconds": self._manager_seconds,
        }

    def _group_names(self) -> list[str]:
        groups: tuple[GroupSpec, ...] = self._geometry.groups
        return [group.name for group in groups]
