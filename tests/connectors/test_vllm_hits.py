"""How far a prefix reaches in all groups of a model, against the definition tried at every position.

Needs no vLLM: of its connector this is the part that only counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings, strategies as st

from kvcache.connectors.adapters.vllm.hits import Found, longest_hit
from kvcache.core.specs.base import GroupRules


class Group(NamedTuple):
    rules: GroupRules
    present: list[int]
    """1 where the tier has the block; a state is the block that it follows."""
    tail: int


class Case(NamedTuple):
    groups: list[Group]
    begin: int
    most: int
    align: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    align = draw(st.sampled_from([2, 4, 8]))
    largest = align * draw(st.sampled_from([1, 2, 4]))
    blocks = draw(st.integers(1, 20))
    begin = draw(st.integers(0, blocks)) * largest
    end = blocks * largest
    groups = draw(st.lists(group(align, largest, begin, end), min_size=1, max_size=3))
    return Case(groups, begin, draw(st.integers(begin, end + 3)), align)


@st.composite
def group(draw: st.DrawFn, align: int, largest: int, begin: int, end: int) -> Group:
    kind = draw(st.sampled_from(["full", "span", "state"]))
    sizes = [size for size in (1, 2, 4, 8, largest) if largest % size == 0]
    size = 0 if kind == "state" else draw(st.sampled_from(sizes))
    options = {}
    if kind == "span":
        options = {
            "chunk_tokens": draw(st.sampled_from([1, 16])),
            "lead_tokens": draw(st.integers(0, 20)),
        }
    count = max(0, end // (size or align) - draw(st.integers(0, 1)))
    present = np.ones(count, np.uint8)
    if count:
        present[draw(st.lists(st.integers(0, count - 1), max_size=4))] = 0
    tail = 0
    if kind == "full" and size > align and draw(st.booleans()):
        missing = np.flatnonzero(present[begin // size :] == 0)
        first = begin // size + int(missing[0]) if len(missing) else max(begin // size, count)
        tail = first * size + draw(st.integers(1, size // align - 1)) * align
    return Group(GroupRules(kind, size, **options), present.tolist(), tail)


def there(group: Group, blocks: Sequence[int]) -> bool:
    return all(i < len(group.present) and group.present[i] for i in blocks)


def can_go_on(group: Group, begin: int, end: int, align: int) -> bool:
    rules, size = group.rules, group.rules.block_tokens
    if rules.kind == "state":
        return there(group, [end // align - 1])
    if rules.kind == "span":
        first = max(rules.need_begin(end), begin)
        return end % size == 0 and there(group, range(first // size, end // size))
    if there(group, range(begin // size, -(-end // size))):
        return True
    cut = end // size
    partial = end % size and group.tail >= end and group.tail // size == cut
    return bool(partial) and there(group, range(begin // size, cut))


def naive(case: Case) -> int:
    positions = range(case.begin + case.align, case.most + 1, case.align)
    good = [
        end
        for end in positions
        if all(can_go_on(group, case.begin, end, case.align) for group in case.groups)
    ]
    return max(good, default=case.begin)


@settings(max_examples=1000)
@given(case=cases())
def test_the_longest_hit(case: Case) -> None:
    def asked(group: Group) -> Found:
        def has(first: int, last: int) -> np.ndarray:
            assert 0 <= first <= last
            flags = np.zeros(last - first, np.uint8)
            own = group.present[first:last]
            flags[: len(own)] = own
            return flags

        return Found(group.rules, has, group.tail)

    found = [asked(group) for group in case.groups]
    assert longest_hit(found, begin=case.begin, most=case.most, align=case.align) == naive(case)
