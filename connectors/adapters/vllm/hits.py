"""How far a prefix reaches that a tier holds for every group, asking the tier for little more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.specs.base import GroupRules

STATES_AT_ONCE = 512
"""Keys of states that are asked for in one go, from the longest prefix downwards."""


class Found(NamedTuple):
    """What can be told of one group."""

    rules: GroupRules
    has: Callable[[int, int], NDArray[np.uint8]]
    """1 where the tier has block i, for `first <= i < last`; a state is the block that it follows.

    For states a block is `align` tokens; blocks that have no key are not there.
    """
    tail: int = 0
    """Of a full group: tokens up to which it has the first block that is missing as a whole, too."""


def longest_hit(groups: Sequence[Found], *, begin: int, most: int, align: int) -> int:
    """The last position from `begin` to `most` at which every group can go on.

    What lies before `begin` is on the device for all groups, as far as a position behind it reads.
    A pass lowers the position to what one group can serve; it ends when no group lowers it.
    O(blocks of full groups), where the others have what they need near the end.

    Args:
        groups: those that must have every block come first, best.
        begin: tokens that are there already, a multiple of every group's blocks.
        most: tokens, at most.
        align: hits end at multiples of this. Blocks of full groups may be longer.
    """
    end = most // align * align
    while end > begin:
        before = end
        for group in groups:
            end = _REACH[group.rules.kind](group, begin, end, align)
        if end == before:
            break
    return max(end, begin)


def _full(group: Found, begin: int, end: int, align: int) -> int:
    span = group.rules.block_tokens
    first, last = begin // span, -(-end // span)
    missing = np.flatnonzero(group.has(first, last) == 0)
    reached = (first + int(missing[0]) if len(missing) else last) * span
    return max(begin, min(end, max(reached, group.tail)) // align * align)


def _state(group: Found, begin: int, end: int, align: int) -> int:
    last, least = end // align, begin // align
    while last > least:
        first = max(least, last - STATES_AT_ONCE)
        there = np.flatnonzero(group.has(first, last))
        if len(there):
            return (first + int(there[-1]) + 1) * align
        last = first
    return begin


def _span(group: Found, begin: int, end: int, align: int) -> int:
    """Mostly all is there; else at each position at once, by sums from the left."""
    rules, size = group.rules, group.rules.block_tokens
    first, last = max(rules.need_begin(end), begin) // size, end // size
    if end % size == 0 and (first == last or group.has(first, last).all()):
        return end
    base = begin // size
    present = group.has(base, last)
    sums = np.concatenate([[0], np.cumsum(present, dtype=np.int64)])
    positions = np.arange(begin + align, end + 1, align)
    positions = positions[positions % size == 0]
    begins = positions // rules.chunk_tokens * rules.chunk_tokens - rules.lead_tokens
    ends = positions // size
    begins = np.minimum(np.maximum(begins, begin) // size, ends)
    there = sums[ends - base] - sums[begins - base]
    whole = np.flatnonzero(there == ends - begins)
    return int(positions[whole[-1]]) if len(whole) else begin


_REACH = {"full": _full, "state": _state, "span": _span}
