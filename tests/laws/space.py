"""Whether pages can be had, counted from what is held: slabs, size classes, the oldest request.

Pages of one size share a class, a slab holds `k` pages of one class. Whatever is not held can be
evicted, and a slab without a held page can change its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from laws.oracle import Oracle
from laws.records import Page, ceil_div

from kvcache import Geometry
from kvcache.core.records import UNLIMITED


class Arena:
    """Counts for one geometry and arena. `slabs` is T, or `UNLIMITED`."""

    def __init__(self, geometry: Geometry, slabs: int) -> None:
        self.oracle = Oracle.of(geometry)
        self.slabs = slabs
        self.class_of = list(geometry.class_of_group)
        self.k = list(geometry.pages_per_slab)
        self.classes = range(len(self.k))

    def by_class(self, pages_of_group: Sequence[int]) -> list[int]:
        out = [0] * len(self.k)
        for group, pages in enumerate(pages_of_group):
            out[self.class_of[group]] += pages
        return out

    def needed(self, tokens: int) -> list[int]:
        """Slabs of each class (N) with which a request of so many tokens can always go on."""
        pages = self.by_class([self.oracle.pages(g, tokens) for g in self.oracle.groups])
        return [ceil_div(n, k) for n, k in zip(pages, self.k, strict=True)]

    def admits(self, tokens: int) -> bool:
        return self.slabs == UNLIMITED or sum(self.needed(tokens)) <= self.slabs

    def slabs_with(self, pages: Iterable[Page]) -> list[int]:
        """Slabs of each class with at least one of these pages (P, if they are a request's)."""
        touched = {(c, number // self.k[c]) for c, number in pages}
        return [sum(c == found for found, _ in touched) for c in self.classes]

    def can_take(self, wanted: Sequence[int], held: set[Page], owned: Sequence[int]) -> bool:
        """Can so many pages of each class be had at once, `owned` slabs being each class's now?"""
        if self.slabs == UNLIMITED:
            return True
        taken = [sum(c == found for found, _ in held) for c in self.classes]
        own = [owned[c] * self.k[c] - taken[c] for c in self.classes]
        idle = [n - with_held for n, with_held in zip(owned, self.slabs_with(held), strict=True)]
        lacking = sum(ceil_div(max(0, wanted[c] - own[c]), self.k[c]) for c in self.classes)
        spare = sum(max(0, min(idle[c], (own[c] - wanted[c]) // self.k[c])) for c in self.classes)
        return lacking <= self.slabs - sum(owned) + spare

    def free_choice(self, tokens: int, holds: Iterable[Page], wanted: Sequence[int]) -> bool:
        """May the oldest request take any page, even one in a new slab for each, and keep its quota?

        Its quota: the sum over classes of max(slabs with a page of its, slabs that it needs) stays
        within T.
        """
        if self.slabs == UNLIMITED:
            return True
        mine, needed = self.slabs_with(holds), self.needed(tokens)
        return sum(max(mine[c] + wanted[c], needed[c]) for c in self.classes) <= self.slabs

    def keeps_quota(self, tokens: int, holds: Iterable[Page]) -> bool:
        """Can a request that holds these pages go on to its end, if the rest comes free?"""
        return self.free_choice(tokens, holds, [0] * len(self.k))
