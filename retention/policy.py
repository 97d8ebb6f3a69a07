"""Dense and sparse-interval retention.

What a sparse policy keeps, for a prompt of n tokens on a grid of g:

    0 ----- boundary ----- junction ------------ floor(n-1) --- decode ---> floor(computed)
            declared       attention went on     replay         end of turn, preempt or
            by the caller  without a state       boundary       abort point: left by the core

The last one is not a position of the plan: the core holds the newest grid point of every running
request and gives it a key when the request ends, whatever the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core.errors import ConfigError
from kvcache.core.retain import RetentionPlan, TurnShape


@dataclass(frozen=True)
class Dense:
    """Keeps a state at every grid point: the most reuse, and one state page per grid unit."""

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """The interval is the grid itself."""
        return RetentionPlan(shape.grid_tokens, (), ())


@dataclass(frozen=True)
class Sparse:
    """Keeps what is known to be reusable, and every `interval_tokens` tokens if that is above 0.

    Args:
        interval_tokens: 0, or a multiple of the geometry's hit grid.
    """

    interval_tokens: int = 0

    def __post_init__(self) -> None:
        if self.interval_tokens < 0:
            raise ConfigError(
                f"Sparse.interval_tokens is {self.interval_tokens}: it must be 0 or a multiple of"
                " the hit grid"
            )

    def plan(self, shape: TurnShape) -> RetentionPlan:
        """Declared boundaries and junctions are kept; the replay boundary may be superseded."""
        grid = shape.grid_tokens
        if self.interval_tokens % grid:
            raise ConfigError(
                f"Sparse.interval_tokens is {self.interval_tokens}: not a multiple of the hit grid"
                f" of {grid} tokens"
            )
        points = {(shape.prompt_tokens - 1) // grid * grid: False}
        for position in (*shape.boundaries, *shape.junctions):
            points[position // grid * grid] = True
        positions = sorted(p for p in points if 0 < p <= shape.prompt_tokens)
        return RetentionPlan(self.interval_tokens, positions, [points[p] for p in positions])
