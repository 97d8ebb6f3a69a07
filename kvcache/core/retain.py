"""What the manager asks of a retention policy. The policies live in `kvcache.retention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays
from kvcache.core.errors import ConfigError
from kvcache.core.values import shown


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
    """A pure object: the same shape gives the same plan.

    It is asked once when the manager is made, for a prompt of one token, so that what does not fit
    the geometry shows there; then once per open, and per new junction.
    """

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """What a request of this shape keeps. O(boundaries + groups)."""


class PlanArrays(NamedTuple):
    """A plan as C takes it: int64, int64, uint8."""

    intervals: NDArray[np.int64]
    positions: NDArray[np.int64]
    declared: NDArray[np.uint8]


def plan_of(policy: RetentionPolicy, shape: TurnShape) -> PlanArrays:
    """The policy's answer as arrays of matching lengths; `ConfigError` for any other answer.

    That they ascend and lie on the grid is checked in C.
    """
    plan, name = policy.plan(shape), type(policy).__name__
    if not isinstance(plan, RetentionPlan):
        raise ConfigError(f"{name}.plan gave {shown(plan)}: give a RetentionPlan")
    made = PlanArrays(
        arrays.flat(plan.intervals, np.int64, f"{name}.plan's intervals"),
        arrays.flat(plan.positions, np.int64, f"{name}.plan's positions"),
        arrays.flat(plan.declared, np.uint8, f"{name}.plan's declared flags"),
    )
    if len(made.positions) != len(made.declared):
        raise ConfigError(
            f"{name}.plan gave {len(made.positions)} positions and {len(made.declared)} declared"
            " flags: one each"
        )
    if len(made.intervals) != len(shape.groups):
        raise ConfigError(
            f"{name}.plan gave {len(made.intervals)} intervals for {len(shape.groups)} groups: one"
            " each"
        )
    return made


def require_policy(policy: RetentionPolicy, grid_tokens: int, groups: Sequence[str]) -> None:
    """`ConfigError` unless it can plan for these groups: asked once, for a prompt of one token."""
    if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
        raise ConfigError(
            f"retention is {shown(policy)}: give a policy, such as Sparse() or Dense()"
        )
    plan = plan_of(policy, TurnShape(1, grid_tokens, groups=groups))
    for group, interval in zip(groups, plan.intervals.tolist(), strict=True):
        if interval < 0 or interval % grid_tokens:
            raise ConfigError(
                f"{type(policy).__name__}.plan gave group {group!r} an interval of {interval}"
                f" tokens: it must be 0 or a multiple of the hit grid of {grid_tokens} tokens"
            )
