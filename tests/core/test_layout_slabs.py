from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from kvcache.core.slabs import PADDING_LIMIT, SlabPlan, plan_slabs

MIB = 2**20


def worst_padding(plan: SlabPlan, pages: list[int]) -> float:
    return max(1 - p / plan.stride_bytes[plan.class_of_group[g]] for g, p in enumerate(pages))


def best_padding(pages: list[int], largest_pages: int) -> float:
    """Least padding of any slab of so many of the largest page, each size a class of its own."""
    largest, best = max(pages), 1.0
    for slab in range(largest * largest_pages, largest * (largest_pages + 1)):
        worst = 0.0
        for page in pages:
            strides = [slab // k for k in range(1, slab // page + 1) if slab % k == 0]
            if page == largest:
                strides = [slab // largest_pages] if slab % largest_pages == 0 else []
            worst = max([worst, min((1 - page / s for s in strides), default=1.0)])
        best = min(best, worst)
    return best


sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=6)
alignments = st.sampled_from([1, 16, 256])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(sizes, alignments, st.sampled_from([1, 1, 3, 12]))
def test_slabs_hold_whole_pages_of_every_class(
    pages: list[int], alignment: int, own_alignment: int
) -> None:
    plan = plan_slabs(pages, [own_alignment] * len(pages), alignment)
    assert len(plan.class_of_group) == len(pages)
    assert set(plan.class_of_group) == set(range(len(plan.stride_bytes)))
    for k, stride in zip(plan.pages_per_slab, plan.stride_bytes, strict=True):
        assert k * stride == plan.slab_bytes
        assert stride % own_alignment == 0
    for page, c in zip(pages, plan.class_of_group, strict=True):
        assert page <= plan.stride_bytes[c]
    assert all(a >= b for a, b in pairwise(plan.stride_bytes))
    equal = dict(zip(pages, plan.class_of_group, strict=True))
    assert [equal[page] for page in pages] == list(plan.class_of_group)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(20, 300), min_size=2, max_size=3, unique=True))
def test_the_smallest_slab_within_the_limit_is_taken_and_is_the_best_of_its_size(
    pages: list[int],
) -> None:
    plan = plan_slabs(pages, [1] * len(pages), 1)
    if len(plan.stride_bytes) < len(pages):
        return  # a shared class costs padding that the exhaustive search does not know
    count = plan.pages_per_slab[0]
    for smaller in range(1, count):
        assert best_padding(pages, smaller) > PADDING_LIMIT
    assert worst_padding(plan, pages) == pytest.approx(best_padding(pages, count), abs=1e-9)


def test_equal_pages_make_slabs_of_one_page() -> None:
    assert plan_slabs([4096, 4096, 4096], [1, 1, 1], 256) == SlabPlan(4096, (1,), (4096,), (0,) * 3)


def test_nearly_equal_pages_share_a_class_at_two_percent_and_no_more() -> None:
    assert plan_slabs([9900, 10_000], [1, 1], 1).class_of_group == (0, 0)
    assert plan_slabs([9700, 10_000], [1, 1], 1).class_of_group == (1, 0)


def test_published_slab_sizes_come_out() -> None:
    # Kimi K3: 127 MLA pages of 3.375 MiB beside a state of 428.55 MiB, 16 on one of eight ranks.
    assert plan_slabs([3_538_944, 449_372_160], [1, 1], 256).slab_bytes == 127 * 3_538_944
    assert plan_slabs([3_538_944, 56_171_520], [1, 1], 256).slab_bytes == 16 * 3_538_944
    assert plan_slabs([30 * MIB, 75 * MIB // 2], [1, 1], 256).pages_per_slab == (4, 5)


def test_padding_stays_within_the_limit_at_a_ratio_of_2000_and_at_mixed_alignments() -> None:
    pages = [4096, 2000 * 4096 - 700]
    assert worst_padding(plan_slabs(pages, [1, 1], 256), pages) < 0.001
    rows = [61 * 37_440, 30 * 19_008]
    plan = plan_slabs(rows, [576, 576], 256)
    assert worst_padding(plan, rows) <= PADDING_LIMIT
    assert all(stride % 2304 == 0 for stride in plan.stride_bytes)  # of both 576 and 256


def test_small_pages_lower_the_alignment_instead_of_wasting_memory() -> None:
    assert plan_slabs([64], [1], 256).stride_bytes == (64,)
    assert plan_slabs([12, 36], [1, 1], 256).stride_bytes == (36, 12)
    assert plan_slabs([4096], [1], 256).stride_bytes == (4096,)
    assert plan_slabs([1], [1], 256).stride_bytes == (1,)


def test_a_slab_that_no_size_suits_is_the_best_there_is() -> None:
    plan = plan_slabs([16, 10**9], [1, 1], 256)
    assert plan.pages_per_slab == (1, 65_535)
    assert worst_padding(plan, [10**9]) < 0.001
    # 64 groups with pages of every size
    many = [1000 * i + 17 for i in range(1, 65)]
    plan = plan_slabs(many, [1] * 64, 256)
    assert worst_padding(plan, many) < 0.3
    assert plan.slab_bytes <= 5 * max(many)
