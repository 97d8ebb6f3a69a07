"""How large pools are made for a number of tokens: pages of each group, and slabs that hold them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.core.layout import Geometry

STATES_PER_TURN = 4
"""Recurrent states that a turn leaves at most: replay boundary, end of turn, two in progress."""


def pages_for(geometry: Geometry, tokens: int, states: int) -> list[int]:
    """Pages of each group for so many tokens of attention, and so many states.

    O(groups).
    """
    return [
        states if rules.kind == "state" else -(-tokens // rules.block_tokens)
        for rules in geometry.rules
    ]


def slabs_for(geometry: Geometry, pages: Sequence[int]) -> int:
    """Slabs that so many pages of each group fill; memory moves between the groups later."""
    of_class = [0] * len(geometry.pages_per_slab)
    for count, c in zip(pages, geometry.class_of_group, strict=True):
        of_class[c] += count
    return sum(-(-n // k) for n, k in zip(of_class, geometry.pages_per_slab, strict=True))
