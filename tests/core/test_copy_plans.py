"""Plans of copies: their moves against a plain list, threads, processes that fork, what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache.core.copy import RANGE, CopySegment, PageCopy, copy_pages, cores
from kvcache.core.errors import ConfigError

PART = 3000


def layers(
    device: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], *, store: bool
) -> list[CopySegment]:
    """Device `[layers, pages, PART]`, slots `[slots, layers, PART]`."""
    count, pages, _ = device.shape
    segments = []
    for layer in range(count):
        device_side = device[layer].ctypes.data, PART, pages
        slot_side = slots.ctypes.data + layer * PART, count * PART, len(slots)
        sides = (*device_side, *slot_side) if store else (*slot_side, *device_side)
        segments.append(CopySegment(*sides, PART))
    return segments


def merged(of: list[int], to: list[int], base: tuple[int, int], part: int) -> list[tuple[int, ...]]:
    """The moves of a packed segment, the plain way: one at a time, each joined to the last where it may be."""
    moves: list[tuple[int, int, int]] = []
    step = 0
    for i, (a, b) in enumerate(zip(of, to, strict=True)):
        change = (a - of[i - 1], b - to[i - 1]) if i else (0, 0)
        if change in {(1, 1), (-1, -1)} and step in {0, change[0]}:
            low, high, pages = moves.pop()
            moves.append((min(low, a), min(high, b), pages + 1))
            step = change[0]
        else:
            moves.append((a, b, 1))
            step = 0
    return [(base[0] + a * part, base[1] + b * part, pages * part) for a, b, pages in moves]


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Runs up and down on both sides, of up to 40 pages, targets distinct."""
    of: list[int] = []
    to: list[int] = []
    free = list(range(40))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(free) - 1)))
        piece = free[at : at + draw(st.integers(1, 9))]
        del free[at : at + len(piece)]
        start = draw(st.integers(0, 39 - 9))
        rising = list(range(start, start + len(piece)))
        of += draw(st.sampled_from((rising, rising[::-1], [start] * len(piece))))
        to += draw(st.sampled_from((piece, piece[::-1])))
    return of, to


@settings(max_examples=150)
@given(pairs=page_pairs(), count=st.integers(1, 3), part=st.sampled_from((1, 7, 4096)))
def test_moves_of_packed_segments_are_runs_merged(
    pairs: tuple[list[int], list[int]], count: int, part: int
) -> None:
    bases = [(1 << 40 | i << 30, 1 << 44 | i << 30) for i in range(count)]
    copy = PageCopy([CopySegment(a, part, 40, b, part, 40, part) for a, b in bases])
    found = copy.ranges(*pairs)
    assert found.tolist() == [move for base in bases for move in merged(*pairs, base, part)]


@settings(max_examples=50)
@given(pairs=page_pairs(), gap=st.integers(1, 5))
def test_pages_with_gaps_are_moved_one_by_one(pairs: tuple[list[int], list[int]], gap: int) -> None:
    found = PageCopy([CopySegment(1 << 40, 64, 40, 1 << 44, 64 + gap, 40, 64)]).ranges(*pairs)
    wanted = [
        ((1 << 40) + a * 64, (1 << 44) + b * (64 + gap), 64) for a, b in zip(*pairs, strict=True)
    ]
    assert found.tolist() == wanted


def test_moves_may_be_written_to_an_array_that_is_there() -> None:
    copy = PageCopy([CopySegment(1 << 40, 64, 9, 1 << 44, 64, 9, 64)])
    out = np.zeros(5, RANGE)
    found = copy.ranges([0, 1, 5], [3, 4, 0], out=out)
    assert np.shares_memory(found, out)
    assert found["length_bytes"].tolist() == [128, 64]
    for wrong in (np.zeros(2, RANGE), np.zeros(5, np.int64), np.zeros((5, 1), RANGE)):
        with pytest.raises(ConfigError, match=r"give 3 or more of copy\.RANGE"):
            copy.ranges([0, 1, 5], [3, 4, 0], out=wrong)
    sealed = np.zeros(5, RANGE)
    sealed.flags.writeable = False
    for wrong in (sealed, np.zeros(9, RANGE)[::2], np.zeros(5, RANGE)[::-1]):
        with pytest.raises(ConfigError, match=r"copy\.RANGE, contiguous, writeable"):
            copy.ranges([0, 1, 5], [3, 4, 0], out=wrong)
    with pytest.raises(ConfigError, match=r"out is \[1\]: give an array of 3"):
        copy.ranges([0, 1, 5], [3, 4, 0], out=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("segments", [[1], None, 7, [None]])
def test_what_is_no_segment_is_named(segments: Any) -> None:
    with pytest.raises(ConfigError, match="segments"):
        PageCopy(segments)


@pytest.mark.parametrize("threads", [1, 2, 3, 256])
@pytest.mark.parametrize("store", [True, False])
def test_threads_share_a_copy_of_layers_and_slots(threads: int, store: bool) -> None:
    """12 MiB, pages that are no multiple of anything: slices end within pages and segments."""
    rng = np.random.default_rng(threads)
    device = rng.integers(0, 256, (4, 1000, PART), dtype=np.uint8)
    slots = rng.integers(0, 256, (1100, 4, PART), dtype=np.uint8)
    pages, places = (
        rng.permutation(1000).astype(np.int32),
        rng.permutation(1100)[:1000].astype(np.int32),
    )
    copy = PageCopy(layers(device, slots, store=store))
    if store:
        wanted = slots.copy()
        wanted[places] = device[:, pages].transpose(1, 0, 2)
        copy.run(pages, places, threads=threads)
        np.testing.assert_array_equal(slots, wanted)
    else:
        wanted = device.copy()
        wanted[:, pages] = slots[places].transpose(1, 0, 2)
        copy.run(places, pages, threads=threads)
        np.testing.assert_array_equal(device, wanted)


@pytest.mark.parametrize("threads", [0, -1, 257, 2**31 - 1, 1.5])
def test_numbers_of_threads_that_cannot_be_are_named(threads: Any) -> None:
    memory = np.zeros(64, np.uint8)
    at = memory.ctypes.data
    with pytest.raises(ConfigError, match="threads"):
        copy_pages([CopySegment(at, 8, 4, at + 32, 8, 4, 8)], [0], [0], threads=threads)


COUNTS = """
import os, numpy as np
from kvcache.core.copy import cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(cores())
"""


def test_cores_are_those_of_the_affinity_mask_as_it_is_now() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", COUNTS], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1\n"


def test_a_process_that_forks_while_it_copies_can_copy_on_both_sides() -> None:
    """Threads end with their copy, so that a fork loses none."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (2000, PART), dtype=np.uint8)
    stop = threading.Event()
    failures: list[BaseException] = []

    def copy_once() -> bool:
        target = np.zeros_like(source)
        one = CopySegment(source.ctypes.data, PART, 2000, target.ctypes.data, PART, 2000, PART)
        pages = np.arange(2000, dtype=np.int32)
        copy_pages([one], pages[::-1].copy(), pages[::-1].copy(), threads=2)
        return bool((target == source).all())

    def keep_copying() -> None:
        try:
            while not stop.is_set():
                assert copy_once()
        except BaseException as error:  # noqa: BLE001  (told below)
            failures.append(error)

    other = threading.Thread(target=keep_copying)
    other.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if copy_once() else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        other.join(60)
    assert not other.is_alive()
    assert failures == []


def test_the_example_in_the_docs_does_what_it_says(repo_root: Path) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (repo_root / "docs/copy.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(code, "copy.md", "exec"), names)  # noqa: S102
    assert (names["host"][30] == 1).all()
    assert names["host"].sum() == names["host"][30].sum()
    assert len(names["moves"]) == 12


def test_the_message_of_an_overlap_names_both_ranges() -> None:
    memory = np.zeros(400, np.uint8)
    at = memory.ctypes.data
    one = CopySegment(at, 40, 3, at + 200, 40, 3, 40)
    two = one._replace(
        source_address=at + 120, source_pages=1, target_address=at + 230, target_pages=1
    )
    message = (
        rf"segment 1, pair 0 writes {at + 230:#x} to {at + 269:#x}, which overlaps another range of"
        rf" the copy: segment 0, pair 0 writes {at + 200:#x} to {at + 239:#x}\."
    )
    with pytest.raises(ConfigError, match=message):
        copy_pages([one, two], [0], [0])
    reads = one._replace(source_address=at + 190)
    with pytest.raises(ConfigError, match=r"pair 0 writes .* segment 0, pair 0 reads"):
        copy_pages([reads], [0], [0])
    assert not memory.any()
