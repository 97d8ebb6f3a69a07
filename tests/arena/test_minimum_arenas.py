"""That the random crowds of law 12 meet what they are there for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from arena.crowds import RATIOS, random_crowd, two_sizes


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_are_what_they_say(ratio: int) -> None:
    drawn = [two_sizes(random.Random(seed), ratio).pages_per_slab for seed in range(20)]
    assert any(1 in pages and ratio in pages for pages in drawn)
    assert all(max(pages) >= 0.95 * ratio for pages in drawn)


def test_crowds_meet_refusals_of_every_kind_loads_and_moves() -> None:
    met = Counter[str]()
    for seed in range(10, 40):
        crowd = random_crowd(seed, ratio=5)
        crowd.run()
        met += crowd.met
        met["moves"] += crowd.manager.arena_stats().moved_pages
    assert not {"preempt", "wait", "frozen", "restart", "loads", "moves"} - set(met), met
