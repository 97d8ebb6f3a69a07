"""The native host copy against numpy, on every instruction path that this CPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache.core.copy import CopySegment, copy_pages, copy_path
from kvcache.core.errors import ConfigError

GUARD = 0xA5
SIZES = (1, 7, 15, 63, 64, 999, 1023, 1024, 1025, 1087, 4096, 4096 + 16, 70_001)


class Memory:
    """Pages inside a larger buffer: guard bytes before, between and after them."""

    def __init__(
        self, rng: np.random.Generator, size: int, gap: int, pages: int, shift: int
    ) -> None:
        self.size, self.stride, self.pages, self.shift = size, size + gap, pages, 64 + shift
        self.bytes = np.full(self.shift + self.stride * pages + 64, GUARD, np.uint8)
        self.page_mask = np.zeros(len(self.bytes), bool)
        for page in range(pages):
            start = self.shift + page * self.stride
            self.bytes[start : start + size] = rng.integers(0, 256, size, dtype=np.uint8)
            self.page_mask[start : start + size] = True

    def page(self, page: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        start = self.shift + page * self.stride
        return self.bytes[start : start + self.size]

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data + self.shift


def segment(source: Memory, target: Memory) -> CopySegment:
    return CopySegment(
        source.address,
        source.stride,
        source.pages,
        target.address,
        target.stride,
        target.pages,
        source.size,
    )


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


@settings(max_examples=150)
@given(data=st.data())
def test_a_copy_equals_numpy_and_touches_no_other_byte(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size = data.draw(st.sampled_from(SIZES))
    gaps = data.draw(st.tuples(st.sampled_from((0, 0, 3, 64)), st.sampled_from((0, 0, 5, 64))))
    shifts = data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70)))
    source = Memory(rng, size, gaps[0], data.draw(st.integers(1, 12)), shifts[0])
    target = Memory(rng, size, gaps[1], data.draw(st.integers(1, 12)), shifts[1])
    # Runs that rise, fall, or stay on one side only: pieces of ascending ids, some of them turned.
    to = data.draw(st.permutations(range(target.pages)) | st.just(list(range(target.pages))))
    to = to[: data.draw(st.integers(0, target.pages))]
    start, step = data.draw(st.integers(0, 20)), data.draw(st.sampled_from((1, -1, 0, 5)))
    shifted = [(start + step * i) % source.pages for i in range(len(to))]
    loose = st.lists(st.integers(0, source.pages - 1), min_size=len(to), max_size=len(to))
    of = data.draw(st.just(shifted) | loose)
    expected = target.bytes.copy()
    for s, t in zip(of, to, strict=True):
        begin = target.shift + t * target.stride
        expected[begin : begin + size] = source.page(s)
    before = source.bytes.copy()
    copy_pages([segment(source, target)], ids(*of), ids(*to))
    np.testing.assert_array_equal(target.bytes, expected)
    np.testing.assert_array_equal(source.bytes, before)
    assert (target.bytes[~target.page_mask] == GUARD).all()


def test_layers_are_gathered_into_one_slot_and_back() -> None:
    """Layer-first device memory, page-first slots: interleaved segments on one side."""
    rng = np.random.default_rng(0)
    layers, pages, part = 5, 6, 2111
    device = rng.integers(0, 256, (layers, pages, part), dtype=np.uint8)
    slots = np.zeros((8, layers, part), np.uint8)
    gather = [
        CopySegment(
            device[i].ctypes.data, part, pages, slots.ctypes.data + i * part, layers * part, 8, part
        )
        for i in range(layers)
    ]
    copy_pages(gather, ids(4, 0, 1, 2), ids(7, 1, 2, 3))
    for page, slot in ((4, 7), (0, 1), (1, 2), (2, 3)):
        np.testing.assert_array_equal(slots[slot], device[:, page])
    assert not slots[[0, 4, 5, 6]].any()
    back = np.zeros_like(device)
    scatter = [
        CopySegment(
            slots.ctypes.data + i * part, layers * part, 8, back[i].ctypes.data, part, pages, part
        )
        for i in range(layers)
    ]
    copy_pages(scatter, ids(7, 1), ids(0, 5))
    np.testing.assert_array_equal(back[:, 0], device[:, 4])
    np.testing.assert_array_equal(back[:, 5], device[:, 0])
    assert not back[:, 1:5].any()


def test_pages_move_inside_one_pool_when_no_byte_is_both_read_and_written() -> None:
    rng = np.random.default_rng(1)
    pool = Memory(rng, 4096, 0, 8, 0)
    before = pool.bytes.copy()
    copy_pages([segment(pool, pool)], ids(0, 1, 0), ids(5, 2, 7))
    for page, origin in ((5, 0), (2, 1), (7, 0)):
        begin = pool.shift + origin * 4096
        np.testing.assert_array_equal(pool.page(page), before[begin : begin + 4096])


@pytest.mark.parametrize(
    ("source", "target", "changes", "message"),
    [
        ([0, 4], [0, 1], {}, "pair 1: source page 4 is outside 0 to 3"),
        ([0, -1], [0, 1], {}, "pair 1: source page -1 is outside"),
        ([0, 1], [0, 6], {}, "pair 1: destination page 6 is outside 0 to 5"),
        ([0, 1], [-2147483648, 1], {}, "destination page -2147483648 is outside"),
        (
            [0, 1, 2],
            [3, 0, 3],
            {},
            "destination page 3 is named twice in one copy, by pairs 0 and 2",
        ),
        ([0, 1], [3, 3], {}, "destination page 3 is named twice in one copy, by pairs 0 and 1"),
        ([0], [0], {"length_bytes": 0}, "bytes"),
        ([0], [0], {"length_bytes": -5}, "bytes"),
        ([0], [0], {"source_stride_bytes": 99}, "stride"),
        ([0], [0], {"target_stride_bytes": -100}, "stride"),
        ([0], [0], {"source_pages": 0}, "pages"),
        ([0], [0], {"target_pages": -1}, "pages"),
        ([0], [0], {"target_address": 0}, "NULL"),
        ([0], [0], {"source_pages": 2**62}, "end of memory"),
        ([0], [0], {"target_stride_bytes": 2**62}, "end of memory"),
        ([0], [0], {"source_address": 2**64 - 64}, "end of memory"),
    ],
)
def test_bad_input_is_named_and_copies_nothing(
    source: list[int], target: list[int], changes: dict[str, int], message: str
) -> None:
    rng = np.random.default_rng(2)
    a, b = Memory(rng, 100, 0, 4, 0), Memory(rng, 100, 0, 6, 0)
    before = b.bytes.copy()
    with pytest.raises(ConfigError, match=message):
        copy_pages([segment(a, b)._replace(**changes)], ids(*source), ids(*target))
    np.testing.assert_array_equal(b.bytes, before)


def test_far_apart_destinations_are_compared_too() -> None:
    """Ids too sparse for a bit each: the table."""
    page = np.zeros(16, np.uint8)
    wide = CopySegment(page.ctypes.data, 1, 1, page.ctypes.data + 8, 1, 2**31 - 1, 1)
    with pytest.raises(ConfigError, match="destination page 2000000000 is named twice"):
        copy_pages([wide], ids(0, 0, 0), ids(2_000_000_000, 0, 2_000_000_000))


@pytest.mark.parametrize("second", [100, 150])
def test_segments_may_fill_the_gaps_of_each_other(second: int) -> None:
    rng = np.random.default_rng(3)
    a, b = Memory(rng, 100, 100, 4, 0), Memory(rng, 100, 100, 4, 0)
    one = segment(a, b)
    copy_pages(
        [one, one._replace(target_address=one.target_address + second)], ids(0, 1), ids(2, 0)
    )
    for page, origin in ((2, 0), (0, 1)):
        np.testing.assert_array_equal(b.page(page), a.page(origin))
        begin = b.shift + page * b.stride + second
        np.testing.assert_array_equal(b.bytes[begin : begin + 100], a.page(origin))


@pytest.mark.parametrize("second", [0, 50, -30])
def test_overlapping_segments_are_refused(second: int) -> None:
    """Two segments that write the same bytes, or read what the other writes."""
    rng = np.random.default_rng(3)
    a, b = Memory(rng, 100, 100, 4, 0), Memory(rng, 100, 100, 4, 0)
    one = segment(a, b)
    two = one._replace(target_address=one.target_address + second)
    before = b.bytes.copy()
    with pytest.raises(ConfigError, match="overlaps another range"):
        copy_pages([one, two], ids(0, 1), ids(2, 0))
    with pytest.raises(ConfigError, match="overlaps another range"):
        copy_pages([one._replace(source_address=one.target_address + second)], ids(0), ids(0))
    np.testing.assert_array_equal(b.bytes, before)


def test_a_segment_that_reaches_into_the_next_page_is_refused() -> None:
    """Beside the other in one page, but not when pages touch."""
    rng = np.random.default_rng(3)
    a, b = Memory(rng, 100, 100, 4, 0), Memory(rng, 100, 100, 4, 0)
    one = segment(a, b)
    two = one._replace(target_address=one.target_address + 150)
    before = b.bytes.copy()
    with pytest.raises(ConfigError, match="overlaps another range"):
        copy_pages([one, two], ids(0, 1), ids(0, 1))
    np.testing.assert_array_equal(b.bytes, before)


def test_strides_that_differ_are_compared_byte_by_byte() -> None:
    """Views whose ranges cross are fine as long as no byte of theirs does."""
    pool = np.arange(400, dtype=np.uint8)
    address = pool.ctypes.data
    crossing = CopySegment(address, 40, 10, address + 20, 80, 4, 20)
    expected = pool.copy()
    expected[20:40], expected[100:120] = pool[0:20], pool[40:60]
    copy_pages([crossing], ids(0, 1), ids(0, 1))
    np.testing.assert_array_equal(pool, expected)
    with pytest.raises(ConfigError, match="overlaps another range"):
        copy_pages([crossing._replace(length_bytes=21)], ids(0, 1), ids(0, 1))


def test_nothing_to_copy_is_fine() -> None:
    copy_pages([], ids(), ids())
    page = np.zeros(8, np.uint8)
    address = page.ctypes.data
    copy_pages([CopySegment(address, 8, 1, address, 8, 1, 8)], ids(), ids())
    with pytest.raises(ConfigError, match="pairs"):
        copy_pages([], ids(0), ids())


PROBE = """
import json, sys
import numpy as np
from kvcache.core.copy import CopySegment, copy_pages, copy_path
rng, wrong = np.random.default_rng(0), []
for size in json.loads(sys.argv[1]):
    pages = 3 + (600 << 10) // size  # a copy that fits into the caches takes another way
    for shift in (0, 1, 33):
        a = rng.integers(0, 256, pages * size, dtype=np.uint8)
        b = np.full(pages * size + shift + 64, 0xA5, np.uint8)
        of, to = (rng.permutation(pages)[:-2].astype(np.int32) for _ in range(2))
        copy_pages([CopySegment(a.ctypes.data, size, pages, b.ctypes.data + shift, size, pages, size)], of, to)
        want = np.full_like(b, 0xA5)
        want[shift:shift + pages * size].reshape(pages, size)[to] = a.reshape(pages, size)[of]
        if not np.array_equal(b, want):
            wrong.append([size, shift])
print(json.dumps([copy_path(), wrong]))
"""


@pytest.mark.parametrize("path", ["memcpy", "avx2", "avx512"])
def test_every_path_copies_the_same(path: str) -> None:
    order = ("memcpy", "avx2", "avx512")
    best = copy_path()
    out = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([size for size in SIZES if size > 60])],
        env={**os.environ, "KVCACHE_COPY_PATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    used, wrong = json.loads(out)
    assert used == min(path, best, key=order.index)
    assert wrong == []


@pytest.mark.parametrize("path", ["AVX2", "avx10", "none", " avx2"])
def test_a_path_that_is_none_is_an_error_and_doctor_tells(path: str) -> None:
    command = [sys.executable, "-m", "kvcache.cli", "doctor", "--json"]
    done = subprocess.run(
        command,
        env={**os.environ, "KVCACHE_COPY_PATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem.startswith(f"KVCACHE_COPY_PATH is {path!r}: unset it, or give one of avx512")
