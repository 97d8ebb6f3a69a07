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
    """Where the full groups went on and a state or span was missing, seen by its lookups."""
    groups: Sequence[str] = ("",)
    """Names of the geometry's groups."""


class RetentionPlan(NamedTuple):
    """Where span and state groups keep what a hit needs."""

    intervals: Sequence[int]
    """For each group: at every multiple of this (a multiple of the grid), 0 for none."""
    positions: Sequence[int]
    """Further positions, for all groups: ascending, unique, on the grid."""
    declared: Sequence[bool]
    """For each position: keeps its place in eviction order when a later one supersedes it."""


class RetentionPolicy(Protocol):
    """A pure object: the same shape gives the same plan; it is called once per open or lookup."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """What a request of this shape keeps. O(boundaries + groups)."""
