"""The small arenas that are searched: every mix of groups, page ratio, window, prefix and transfers.

Full attention with a state, with a window, with both; slabs of 1 to 3 pages of each class, groups
of equal pages in classes of their own or in one; windows of 1 and 2 pages; 2 or 3 requests of 2 to
4 pages, with nothing or their first page in common; 0 to 2 transfers at a time; pages given up
free at once or two steps later. All have as many slabs as the longest request needs, 2 to 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from arena.rules import Group, Instance, smallest_arena

MIXES = {
    "full, state": (0, 1),
    "full, window": (0, 2),
    "full, window, state": (0, 2, 1),
}
"""Windows of the groups in pages; 0: full attention."""
LENGTHS = ((2, 2), (3, 2), (2, 3), (3, 3), (4, 2), (2, 2, 2), (3, 2, 2))


def class_maps(groups: int) -> list[tuple[int, ...]]:
    """Which groups share a class: numbers in order of first use."""
    maps = [(0,)]
    for _ in range(groups - 1):
        maps = [(*m, c) for m in maps for c in range(max(m) + 2)]
    return maps


def instances() -> Iterator[Instance]:
    for windows, lengths, shared, transfers, fence in product(
        MIXES.values(), LENGTHS, (0, 1), (0, 1, 2), (0, 2)
    ):
        for classes in class_maps(len(windows)):
            for pages in product((1, 2, 3), repeat=max(classes) + 1):
                groups = tuple(Group(c, w) for c, w in zip(classes, windows, strict=True))
                instance = Instance(pages, groups, lengths, shared, transfers, fence)
                if 2 <= smallest_arena(instance) <= 4 and max(pages) > 1:
                    yield instance
