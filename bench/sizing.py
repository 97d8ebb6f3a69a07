"""What a geometry costs: per token, per kept boundary, per session; how many sessions fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.specs import GroupRules

MAX_CONTEXT_TOKENS = 10**9
_PART = 2**18
"""Boundaries that are looked at together."""


class BoundaryBytes(NamedTuple):
    """What a hit at one grid point reads beside the KV that grows, in bytes of one rank."""

    states: int
    windows: int
    pooling: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.windows + self.pooling


def bytes_per_token(geometry: Geometry) -> float:
    """KV that one more token adds for good, on one rank: full groups, draft models' too."""
    pages = [
        geometry.grid_tokens // rules.block_tokens if rules.kind == "full" else 0
        for rules in geometry.rules
    ]
    return geometry.pool_bytes(pages) / geometry.grid_tokens


def window_bytes_per_token(geometry: Geometry) -> float:
    """What windows hold of a token while it is inside; pooling states are none."""
    pages = [
        geometry.grid_tokens // rules.block_tokens if _is_window(rules) else 0
        for rules in geometry.rules
    ]
    return geometry.pool_bytes(pages) / geometry.grid_tokens


def boundary_pages(geometry: Geometry) -> tuple[int, ...]:
    """Most pages of each group that a hit at a grid point reads; 0 for full and private groups."""
    return tuple(_boundary_pages(rules, geometry.grid_tokens) for rules in geometry.rules)


def boundary_bytes(geometry: Geometry) -> BoundaryBytes:
    """Bytes of `boundary_pages`, by what they are."""
    pages = boundary_pages(geometry)

    def of(chosen: Sequence[bool]) -> int:
        return geometry.pool_bytes([n if c else 0 for n, c in zip(pages, chosen, strict=True)])

    return BoundaryBytes(
        of([rules.kind == "state" for rules in geometry.rules]),
        of([_is_window(rules) for rules in geometry.rules]),
        of([rules.kind == "span" and rules.transient for rules in geometry.rules]),
    )


def spaced_boundary_bytes(geometry: Geometry, interval_tokens: int) -> float:
    """Bytes that each boundary adds where one is kept every `interval_tokens`.

    Windows of neighbours share blocks, so those of a boundary are never more than the interval.
    """
    one = boundary_bytes(geometry)
    windows = min(one.windows, interval_tokens * window_bytes_per_token(geometry))
    return one.states + one.pooling + windows


class KeptSession(NamedTuple):
    """A session that nobody is running: its pages stay cached."""

    pages: tuple[int, ...]
    boundaries: int
    """Positions at which states and windows are kept; 0 where there are none."""


def kept_session(geometry: Geometry, tokens: int, interval_tokens: int | None) -> KeptSession:
    """What a session of `tokens` tokens leaves: full blocks, its end, and every multiple.

    `interval_tokens` as in a retention policy: None is dense, 0 keeps the end of the last turn
    alone (older ends are superseded: the first victims), N every multiple of N too.

    Raises:
        ConfigError: the interval is no multiple of the grid, or there are too many tokens.
    """
    grid = geometry.grid_tokens
    _check(geometry, tokens, interval_tokens)
    step = grid if interval_tokens is None else interval_tokens
    pages = [0 for _ in geometry.rules]
    ends = [0 for _ in geometry.rules]
    boundaries = 0
    for positions in _boundaries(tokens, step, tokens // grid * grid):
        boundaries += len(positions)
        for i, rules in enumerate(geometry.rules):
            more, ends[i] = _kept_pages(rules, positions, ends[i])
            pages[i] += more
    for i, rules in enumerate(geometry.rules):
        if rules.kind == "full":
            pages[i] = tokens // rules.block_tokens
    kept = any(rules.kind in {"span", "state"} for rules in geometry.rules)
    return KeptSession(tuple(pages), boundaries if kept else 0)


def sessions_that_fit(geometry: Geometry, slabs: int, pages: Sequence[int]) -> int:
    """How many times `pages` of each group go into an arena of so many slabs, all at once.

    Pages of several sessions share slabs. O(log slabs).
    """
    of_class = [0] * len(geometry.pages_per_slab)
    for count, size_class in zip(pages, geometry.class_of_group, strict=True):
        of_class[size_class] += count
    if not any(of_class):
        raise ConfigError("a session without any page fits any number of times: give a longer one")

    def slabs_of(sessions: int) -> int:
        return sum(
            -(-sessions * n // k) for n, k in zip(of_class, geometry.pages_per_slab, strict=True)
        )

    low, high = 0, 1
    while slabs_of(high) <= slabs:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slabs_of(middle) <= slabs else (low, middle)
    return low


def _is_window(rules: GroupRules) -> bool:
    return rules.kind == "span" and not rules.transient


def _boundary_pages(rules: GroupRules, grid_tokens: int) -> int:
    if rules.kind == "state":
        return 1
    if rules.kind != "span":
        return 0
    # The chunk that a grid point lies in began at most chunk - gcd(chunk, grid) tokens before.
    behind = rules.chunk_tokens - int(np.gcd(rules.chunk_tokens, grid_tokens))
    return -(-(rules.lead_tokens + behind) // rules.block_tokens)


def _check(geometry: Geometry, tokens: int, interval_tokens: int | None) -> None:
    if not 1 <= tokens <= MAX_CONTEXT_TOKENS:
        raise ConfigError(f"--context {tokens}: a session has 1 to {MAX_CONTEXT_TOKENS} tokens")
    grid = geometry.grid_tokens
    if interval_tokens is not None and (interval_tokens < 0 or interval_tokens % grid):
        raise ConfigError(
            f"an interval of {interval_tokens} tokens is neither 0 nor a multiple of the hit grid,"
            f" {grid} tokens"
        )


def _boundaries(tokens: int, step: int, end: int) -> Iterator[NDArray[np.int64]]:
    """Multiples of `step` (0: none) up to `tokens`, and `end`: ascending, in parts of bounded size."""
    most = tokens // step if step else 0
    for first in range(0, most, _PART):
        yield np.arange(first + 1, min(first + _PART, most) + 1, dtype=np.int64) * step
    if end > most * step:
        yield np.array([end], np.int64)


def _kept_pages(rules: GroupRules, positions: NDArray[np.int64], counted: int) -> tuple[int, int]:
    """Pages that hits at these ascending positions read, from block `counted` on; and where they end."""
    if rules.kind == "state":
        return len(positions), 0
    if rules.kind != "span":
        return 0, 0
    chunk = positions // rules.chunk_tokens * rules.chunk_tokens
    first = np.maximum(chunk - rules.lead_tokens, 0) // rules.block_tokens
    end = -(-positions // rules.block_tokens)
    before = np.concatenate(([counted], end[:-1]))  # blocks up to here belong to earlier positions
    return int(np.maximum(end - np.maximum(first, before), 0).sum()), int(end[-1])
