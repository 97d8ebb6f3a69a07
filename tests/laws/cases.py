"""Geometries, policies and hypothesis settings that the law tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings, strategies as st

from kvcache import FullAttention, Geometry, RecurrentState
from kvcache.core.retain import RetentionPolicy
from kvcache.retention import Dense, Sparse

SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
"""Multiplies example counts; above 1 the examples are random instead of always the same."""
SHRINK = bool(os.environ.get("KVCACHE_TEST_SHRINK"))
"""Look for the smallest failing example, which takes minutes. The same one is found without."""


def law(examples: int, *, steps: int = 50) -> settings:
    """Settings of one test: the same examples in every run, no files left behind."""
    return settings(
        max_examples=examples * SCALE,
        stateful_step_count=steps,
        derandomize=SCALE == 1,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if SHRINK else [])],
        report_multiple_bugs=SHRINK,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def full(name: str, block_tokens: int) -> FullAttention:
    return FullAttention(name=name, layers=1, kv_heads=1, head_dim=8, block_tokens=block_tokens)


def state(name: str) -> RecurrentState:
    return RecurrentState(name=name, layers=1, state_bytes_per_layer=64)


GEOMETRIES = {
    "full": Geometry((full("a", 4),)),
    "hybrid": Geometry((full("a", 4), state("s"))),
    "recurrent": Geometry((state("s"),), state_grid_tokens=4),
    "two sizes": Geometry((full("a", 2), full("b", 4), state("s"))),
    "coprime": Geometry((state("s"), full("a", 4), full("b", 6), state("t"))),
}
"""The last two differ in hash unit and grid: 2 and 4, 2 and 12."""

names = st.sampled_from(sorted(GEOMETRIES))
with_states = st.sampled_from([n for n in sorted(GEOMETRIES) if n != "full"])
intervals = st.sampled_from([None, 0, 1, 2, 3])
"""None: dense; otherwise grid units between states."""
chunk_plans = st.lists(st.integers(1, 30), min_size=1, max_size=4)
"""Tokens per step, used in a circle."""
token = st.integers(0, 2)
"""So few that independent prompts share prefixes."""


def texts(most: int, *, least: int = 1) -> st.SearchStrategy[list[int]]:
    """Token lists of evenly spread lengths (plain `st.lists` prefers short ones)."""
    lengths = st.integers(least, most)
    return lengths.flatmap(lambda n: st.lists(token, min_size=n, max_size=n))


prompts = texts(40)


def policy_of(geometry: Geometry, interval: int | None) -> RetentionPolicy:
    return Dense() if interval is None else Sparse(interval * geometry.grid_tokens)


class Turn(NamedTuple):
    """A request of a history: the head of an earlier one's tokens, and its own."""

    parent: int
    cut: int
    tail: list[int]
    output: list[int]
    chunks: list[int]

    def prompt(self, earlier: Sequence[Sequence[int]]) -> list[int]:
        head = earlier[self.parent % len(earlier)][: self.cut] if earlier else []
        return [*head, *self.tail]


turns = st.builds(
    Turn,
    parent=st.integers(0, 5),
    cut=st.integers(0, 50),
    tail=texts(20),
    output=texts(9, least=0),
    chunks=chunk_plans,
)
histories = st.lists(turns, min_size=1, max_size=5)
