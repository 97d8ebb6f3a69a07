"""Dense and sparse-interval retention.

What a sparse policy keeps, for a prompt of n tokens on a grid of g:

    0 ----- boundary ----- junction ------------ floor(n-1) --- decode ---> floor(computed)
            declared       full groups went on   replay         end of turn, preempt or
            by the caller  without a state       boundary       abort point: left by the core

The last one is not a position of the plan: the core holds what a hit at the newest grid point of
every running request needs, and gives it keys when the request ends, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache.core.errors import ConfigError
from kvcache.core.records import MOST_TOKENS
from kvcache.core.retain import RetentionPlan, TurnShape
from kvcache.core.values import shown, text, whole


@dataclass(frozen=True)
class Dense:
    """Keeps everything at every grid point: the most reuse, and one state page per grid unit."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """The interval is the grid itself; what was declared is so here too."""
        declared = _declared(shape)
        intervals = [shape.grid_tokens] * len(shape.groups)
        return RetentionPlan(intervals, declared, [True] * len(declared))


@dataclass(frozen=True)
class Sparse:
    """Keeps what is known to be reusable, and every `interval_tokens` tokens if that is above 0.

    Args:
        interval_tokens: 0, or a multiple of the geometry's hit grid.
        group_intervals: the same for single groups, by name.
    """

    interval_tokens: int = 0
    group_intervals: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_interval(self.interval_tokens, "Sparse.interval_tokens")
        if not isinstance(self.group_intervals, Mapping):
            raise ConfigError(
                f"Sparse.group_intervals is {shown(self.group_intervals)}: give a mapping from"
                " names of groups to tokens"
            )
        for name, interval in self.group_intervals.items():
            _check_interval(interval, f"Sparse.group_intervals[{shown(text(name, 'a group'))}]")

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """Declared boundaries and junctions are declared; the replay boundary may be superseded."""
        grid = shape.grid_tokens
        for interval in (self.interval_tokens, *self.group_intervals.values()):
            if interval % grid:
                raise ConfigError(
                    f"Sparse has an interval of {interval} tokens: not a multiple of the hit grid"
                    f" of {grid} tokens"
                )
        if unknown := set(self.group_intervals) - set(shape.groups):
            raise ConfigError(
                f"Sparse.group_intervals names {sorted(unknown)}: the groups are"
                f" {list(shape.groups)}"
            )
        declared = set(_declared(shape))
        replay = (shape.prompt_tokens - 1) // grid * grid
        positions = sorted(declared | ({replay} if replay else set()))
        intervals = [self.group_intervals.get(g, self.interval_tokens) for g in shape.groups]
        return RetentionPlan(intervals, positions, [p in declared for p in positions])


def _check_interval(interval: int, what: str) -> None:
    whole(interval, what, least=0, most=MOST_TOKENS)


def _declared(shape: TurnShape) -> list[int]:
    """Boundaries and junctions, on the grid."""
    grid = shape.grid_tokens
    floors = {position // grid * grid for position in (*shape.boundaries, *shape.junctions)}
    return sorted(floors - {0})
