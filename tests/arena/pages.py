"""Slabs and pages of the model: small tuples of integers, sorted, since slabs have no names.

slab    (size class, its pages); slabs without pages are empty and not listed
page    key | copy | holders | pin    copy: another page has the key; freed at once when let go
        pin 1, 2: steps that a transfer still reads it; 3, 4: given up, busy for 1 or 2 steps more
"""

from __future__ import annotations

from collections.abc import Iterator

Slab = tuple[int, tuple[int, ...]]
Slabs = tuple[Slab, ...]

PIN = 7
HOLDERS = 3
COPY = 1 << 8
USED = COPY - 1
"""Held or pinned: cannot be taken."""
KEY = 9
BUSY = 2


def tidy(slabs: Iterator[Slab] | Slabs | list[Slab]) -> Slabs:
    """Slabs have no names: sorted, and their pages too. One without pages is empty."""
    return tuple(sorted([(c, tuple(sorted(pages))) for c, pages in slabs if pages]))


def put(slabs: Slabs, at: int, slab: Slab) -> Slabs:
    return (*slabs[:at], slab, *slabs[at + 1 :])


def change(pages: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    at = pages.index(old)
    return (*pages[:at], new, *pages[at + 1 :])


def aged(page: int, alive: set[int], *, junk: bool) -> Iterator[int]:
    """The page a step later, if it is still there. Keys that nobody will ask for become zero."""
    pin, key = page & PIN, page >> KEY << KEY
    page -= pin if pin in {0, BUSY + 1} else 1
    if page & USED:
        yield page
    elif not page & COPY and (key in alive or junk):
        yield page if key in alive else 0


def let_go(page: int, holder: int, keep: set[int], fence: int) -> Iterator[int]:
    """The page without this holder, busy for `fence` steps if nobody else uses it; a copy goes."""
    if not page & holder or page >> KEY in keep:
        yield page
        return
    page &= ~holder
    if not page & USED and fence:
        page |= BUSY + fence
    if page & USED or not page & COPY:
        yield page
