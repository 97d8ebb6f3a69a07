"""How pages of several sizes share one arena: size classes, slabs, and the search for a slab size.

    slab_bytes = pages_per_slab[c] * stride_bytes[c], exactly, for every size class c

    class 0   [        page, stride 428.6 MiB, k = 1        ]
    class 1   [p|p|p|p|p|p|p|p| ...  stride 3.4 MiB, k = 127 ]

What a stride is longer than its page is padding. The smallest number of largest pages that keeps
padding within `PADDING_LIMIT` everywhere is taken: large slabs are hard to take back whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvcache.core.specs.base import padded

PADDING_LIMIT = 0.05
SHARED_CLASS_LIMIT = 0.02
"""Pages that differ by this share at most are made one size class."""
ALIGNMENT_LIMIT = 0.02
"""Rounding to the wished alignment may cost this share; else the alignment is halved."""
MOST_LARGEST_PAGES = 4
MOST_PAGES_PER_SLAB = 65_535
_SEARCH_BUDGET = 5_000
"""Choices tried for each number of largest pages; real models take a dozen."""


class SlabPlan(NamedTuple):
    """Slabs of an arena. Tuples over size classes, largest pages first, but for `class_of_group`."""

    slab_bytes: int
    pages_per_slab: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    class_of_group: tuple[int, ...]


class _SizeClass(NamedTuple):
    size: int  # of its largest page, rounded up to the alignment
    least: int  # its smallest page: what padding is counted against
    alignment: int
    groups: tuple[int, ...]


def plan_slabs(pages: Sequence[int], alignments: Sequence[int], wished_alignment: int) -> SlabPlan:
    """The slabs for groups with pages of `pages[g]` bytes, whose kernels want `alignments[g]`.

    `wished_alignment` (a power of two) is the arena's own; where pages are so small that rounding
    to it would cost more than `ALIGNMENT_LIMIT` it is halved as often as it takes. If no slab of up
    to `MOST_LARGEST_PAGES` keeps `PADDING_LIMIT`, the best one there is returned.
    """
    alignment = wished_alignment
    while alignment > 1 and not _is_cheap(pages, alignments, alignment):
        alignment //= 2
    classes = _size_classes(pages, [math.lcm(a, alignment) for a in alignments])
    search = _Search(classes)
    for count in range(1, MOST_LARGEST_PAGES + 1):
        search.run(count)
        if search.waste <= PADDING_LIMIT:
            break
    class_of = {g: c for c, size_class in enumerate(classes) for g in size_class.groups}
    return SlabPlan(
        search.slab,
        search.counts,
        tuple(search.slab // k for k in search.counts),
        tuple(class_of[g] for g in range(len(pages))),
    )


def _is_cheap(pages: Sequence[int], alignments: Sequence[int], alignment: int) -> bool:
    return all(
        padded(size, math.lcm(own, alignment)) * (1 - ALIGNMENT_LIMIT) <= padded(size, own)
        for size, own in zip(pages, alignments, strict=True)
    )


def _size_classes(pages: Sequence[int], alignments: Sequence[int]) -> list[_SizeClass]:
    """Groups by page size, largest first; a page joins the class above it if that is cheap."""
    sizes = [padded(size, own) for size, own in zip(pages, alignments, strict=True)]
    classes: list[_SizeClass] = []
    for g in sorted(range(len(pages)), key=lambda g: (-sizes[g], -pages[g])):
        if classes:
            last = classes[-1]
            alignment = math.lcm(last.alignment, alignments[g])
            size = padded(last.size, alignment)
            if sizes[g] >= size * (1 - SHARED_CLASS_LIMIT):
                least = min(last.least, pages[g])
                classes[-1] = _SizeClass(size, least, alignment, (*last.groups, g))
                continue
        classes.append(_SizeClass(sizes[g], pages[g], alignments[g], (g,)))
    return classes


class _Search:
    """Depth first over pages per slab, class by class, bounded by the least padding found.

    A partial choice k_0..k_i fixes that the slab is a multiple of lcm(k_c * alignment_c) and at
    least max(k_c * size_c); the smallest such slab is the best one for that choice.
    """

    def __init__(self, classes: Sequence[_SizeClass]) -> None:
        self._classes = classes
        self._budget = _SEARCH_BUDGET
        self.waste = math.inf
        self.slab = 0
        self.counts: tuple[int, ...] = ()

    def run(self, largest_pages: int) -> None:
        """Slabs of so many of the largest pages; keeps the best of all runs in the attributes."""
        self._budget = _SEARCH_BUDGET
        first = self._classes[0]
        slab = padded(largest_pages * first.size, largest_pages * first.alignment)
        self._descend((largest_pages,), slab, largest_pages * first.alignment)

    def _descend(self, counts: tuple[int, ...], slab: int, multiple: int) -> None:
        if len(counts) == len(self._classes):
            waste = self._waste(counts, slab)
            if waste < self.waste:
                self.waste, self.slab, self.counts = waste, slab, counts
            return
        for _, total, count, new_multiple in sorted(self._options(counts, slab, multiple)):
            chosen = (*counts, count)
            if self._budget <= 0 or self._waste(chosen, total) >= self.waste:
                return
            self._budget -= 1
            self._descend(chosen, total, new_multiple)

    def _options(
        self, counts: tuple[int, ...], slab: int, multiple: int
    ) -> list[tuple[float, int, int, int]]:
        """(padding so far, slab, pages of the next class, what divides the slab), any order."""
        nxt = self._classes[len(counts)]
        bound = min(self.waste, 0.5)
        highest = min(int(slab / (1 - bound)) // nxt.size, MOST_PAGES_PER_SLAB)
        lowest = max(1, min(int(slab * (1 - bound)) // nxt.least, highest))
        options = []
        for count in range(lowest, max(highest, lowest) + 1):
            new_multiple = math.lcm(multiple, count * nxt.alignment)
            total = padded(max(slab, count * nxt.size), new_multiple)
            options.append((self._waste((*counts, count), total), total, count, new_multiple))
        return options

    def _waste(self, counts: tuple[int, ...], slab: int) -> float:
        """Largest share of padding among the classes chosen so far."""
        return max(
            1 - count * size_class.least / slab
            for count, size_class in zip(counts, self._classes, strict=False)
        )
