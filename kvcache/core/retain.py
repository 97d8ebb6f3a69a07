"""What the manager asks of a retention policy. The policies live in `kvcache.retention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TurnShape(NamedTuple):
    """What a policy may know of a request: lengths and positions in tokens, no content."""

    prompt_tokens: int
    grid_tokens: int
    boundaries: Sequence[int] = ()
    """Declared by the caller (end of system prompt, of a message): unordered, not on the grid."""
    junctions: Sequence[int] = ()
    """Where attention went on and a state was missing, seen by this request's lookups."""


class RetentionPlan(NamedTuple):
    """Which states a request keeps."""

    interval_tokens: int
    """A state at every multiple of this (a multiple of the grid), 0 for none."""
    positions: Sequence[int]
    """Further states: ascending, unique, on the grid."""
    kept: Sequence[bool]
    """For each position: keeps its place in LRU order when a later state supersedes it."""


class RetentionPolicy(Protocol):
    """A pure object: the same shape gives the same plan; it is called once per open or lookup."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """The states that a request of this shape keeps. O(boundaries)."""
