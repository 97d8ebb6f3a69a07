"""`kvcache bench copy`: random pages copied between host memories, beside torch and a contiguous copy.

    gather     random source pages -> pages in order      torch: index_select(..., out=)
    scatter    pages in order -> random target pages      torch: index_copy_
    contiguous all bytes as one page, by our copy: non-temporal, what the memory can do
    memcpy     the same bytes by numpy's copyto, on one thread: no merit of ours

All of a kind are measured in turns, over the same memory, and each ratio is the median of
those of the rounds. One thread is timed by its CPU time, which other work on the machine disturbs
through caches alone; two by the clock on the wall, and what CPU time they take is told beside it.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.bench.machine import machine
from kvcache.core import host_memory
from kvcache.core.copy import RANGE, CopySegment, PageCopy, copy_path, cores
from kvcache.core.errors import ConfigError, InvariantError

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
THREADS = (1, 2)
QUICK = {"bytes": 16 * MIB, "repeats": 3, "sizes": (4 * KIB, 64 * KIB)}
HUGE_PAGE = 2 * MIB
WORD = 8
"""Torch moves the elements of an index copy one by one: it gets pages of int64."""

TORCH_AIM, TORCH_AIM_SMALL = 1.5, 1.3
"""Of pages of 16 KiB and more, and below."""
CONTIGUOUS_AIM = 0.9
"""Of pages of 64 KiB and more."""
RANGE_AIM_NANOSECONDS = 2.0
"""Of plans of many segments."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CopyBench:
    """What to measure. Each side has `bytes`, in pages of each size."""

    sizes: tuple[int, ...] = SIZES
    bytes: int = 256 * MIB
    """Several times the caches."""
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}: at least 1")
        for size in self.sizes:
            if size < WORD or size % WORD or size > self.bytes:
                raise ConfigError(
                    f"--size {size}: pages are of 8 bytes, a multiple of 8, and at most --bytes"
                    f" ({self.bytes})"
                )
        available, limit = host_memory.available()
        if 2 * (self.bytes + HUGE_PAGE) > available:
            raise ConfigError(
                f"--bytes {self.bytes}: twice as much is needed, but {limit} leaves {available}"
                " bytes: lower --bytes"
            )


class _Side:
    """Memory of one side, on huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        # Private: the kernel has another setting, mostly `never`, for huge pages of shared memory.
        self._mapping = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without transparent huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._mapping, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self.bytes = whole[start : start + size]
        self.bytes[:] = 0

    def pages(self, size: int) -> NDArray[np.int64]:
        """`[pages, words]`."""
        return self.bytes[: len(self.bytes) // size * size].view(np.int64).reshape(-1, size // WORD)


class _Work(NamedTuple):
    """One kind of copy, each way that it can be made."""

    ours: Callable[[], None]
    torch: Callable[[], object]
    contiguous: Callable[[], None]
    memcpy: Callable[[], None]


def run_copy_bench(bench: CopyBench, progress: Progress) -> dict[str, Any]:
    """Measure; the report as plain values.

    Raises:
        ConfigError: less memory than is asked for.
    """
    rng = np.random.default_rng(bench.seed)
    source, target = _Side(bench.bytes), _Side(bench.bytes)
    source.bytes[:] = rng.integers(0, 256, bench.bytes, dtype=np.uint8)
    copies, cases = [], _cases(rng)
    for size in bench.sizes:
        for threads in (n for n in THREADS if n <= cores()):
            for direction in ("gather", "scatter"):
                progress(f"{direction} of {_size(size)}, {threads} threads")
                work = _works(direction, source, target, size, threads, rng)
                with _torch_threads(threads):
                    wall, cpu = _measure(work, bench.repeats)
                measured = cpu if threads == 1 else wall
                moved = len(source.pages(size)) * size
                copies.append(
                    {
                        "direction": direction,
                        "page_bytes": size,
                        "threads": threads,
                        "gb_per_second": {
                            name: moved / 1e9 / statistics.median(seconds)
                            for name, seconds in measured.items()
                        },
                        "vs_torch": _ratio(measured, "torch"),
                        "vs_contiguous": _ratio(measured, "contiguous"),
                        "contiguous_vs_memcpy": _ratio(measured, "memcpy", "contiguous"),
                        "cpu_vs_torch": _ratio(cpu, "torch"),
                        **_aims(size),
                    }
                )
            _time_lists(cases.values(), bench.repeats)
    ranges = {
        name: statistics.median(case.nanoseconds) / case.moves for name, case in cases.items()
    }
    return {
        "bench": "copy",
        "bytes": bench.bytes,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "copy_path": copy_path(),
        "cores": cores(),
        "copies": copies,
        "nanoseconds_per_move": ranges,
        "limit_nanoseconds_per_move": RANGE_AIM_NANOSECONDS,
        "missed": _missed(copies, ranges),
        "machine": machine(),
    }


def _works(
    direction: str,
    source: _Side,
    target: _Side,
    size: int,
    threads: int,
    rng: np.random.Generator,
) -> _Work:
    """Both copies were compared with numpy when this returns."""
    of, to = source.pages(size), target.pages(size)
    count = len(of)
    order, shuffled = np.arange(count, dtype=np.int32), rng.permutation(count).astype(np.int32)
    copy = PageCopy([_segment(source, target, size, count)])
    whole = PageCopy([_segment(source, target, count * size, 1)])
    first = np.zeros(1, np.int32)
    rows, out, index = torch.from_numpy(of), torch.from_numpy(to), torch.from_numpy(shuffled).long()
    if direction == "gather":
        pages, expected = (shuffled, order), shuffled
        other: Callable[[], object] = lambda: torch.index_select(rows, 0, index, out=out)  # noqa: E731
    else:
        pages, expected = (order, shuffled), np.argsort(shuffled).astype(np.int32)
        other = lambda: out.index_copy_(0, index, rows)  # noqa: E731
    work = _Work(
        ours=lambda: copy.run(*pages, threads=threads),
        torch=other,
        contiguous=lambda: whole.run(first, first, threads=threads),
        memcpy=lambda: np.copyto(to, of),
    )
    for made in (work.ours, work.torch):
        to[:] = 0
        made()
        for page, origin in enumerate(expected):
            if not np.array_equal(to[page], of[origin]):
                raise InvariantError(f"{direction} of {_size(size)}: page {page} has other bytes")
    return work


def _segment(source: _Side, target: _Side, size: int, count: int) -> CopySegment:
    return CopySegment(
        source.bytes.ctypes.data, size, count, target.bytes.ctypes.data, size, count, size
    )


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Seconds = dict[str, list[float]]


def _measure(work: _Work, repeats: int) -> tuple[Seconds, Seconds]:
    """Seconds of each round on the wall, and of the CPUs; each is first in its turn."""
    ways = list(work._asdict().items())
    wall: Seconds = {name: [] for name, _ in ways}
    cpu: Seconds = {name: [] for name, _ in ways}
    for turn in range(repeats):
        for name, made in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            began, spent = time.perf_counter(), time.process_time()
            made()
            cpu[name].append(time.process_time() - spent)
            wall[name].append(time.perf_counter() - began)
    return wall, cpu


def _ratio(seconds: Seconds, slow: str, fast: str = "ours") -> float:
    """How many times faster the second is."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def _aims(size: int) -> dict[str, float]:
    aims = {"aim_vs_torch": TORCH_AIM if size >= 16 * KIB else TORCH_AIM_SMALL}
    return aims | ({"aim_vs_contiguous": CONTIGUOUS_AIM} if size >= 64 * KIB else {})


class _Case(NamedTuple):
    """A plan whose check and list of moves are timed."""

    copy: PageCopy
    pages: Sequence[NDArray[np.int32]]
    moves: int
    """Pairs of all segments."""
    nanoseconds: list[int]


def _cases(rng: np.random.Generator) -> dict[str, _Case]:
    layers, count, pages, part = 118, 256, 4096, 8 * KIB
    order = np.arange(count, dtype=np.int32)
    random = [rng.permutation(pages)[:count].astype(np.int32) for _ in range(2)]
    alone = [rng.permutation(pages).astype(np.int32) for _ in range(2)]

    def layer_first(place: int) -> list[tuple[int, int]]:
        return [(place + layer * pages * part, part) for layer in range(layers)]

    def page_first(place: int) -> list[tuple[int, int]]:
        return [(place + layer * part, layers * part) for layer in range(layers)]

    def plan(of: list[tuple[int, int]], to: list[tuple[int, int]]) -> PageCopy:
        return PageCopy(
            [CopySegment(*a, pages, *b, pages, part) for a, b in zip(of, to, strict=True)]
        )

    # Addresses that nobody reads: a list of moves touches no page.
    one, other = 1 << 40, 1 << 44
    slots, same = (
        plan(layer_first(one), page_first(other)),
        plan(layer_first(one), layer_first(other)),
    )
    first = plan(layer_first(one)[:1], layer_first(other)[:1])
    return {
        "118_layers_to_slots_random": _Case(slots, random, layers * count, []),
        "118_layers_to_layers_random": _Case(same, random, layers * count, []),
        "118_layers_to_layers_in_order": _Case(same, [order, order], layers * count, []),
        "1_layer_random": _Case(first, alone, pages, []),
    }


def _time_lists(cases: Iterable[_Case], repeats: int) -> None:
    """Lists of moves, made between the copies: no slow moment of the machine meets all of them."""
    cases = list(cases)
    out = np.zeros(max(case.moves for case in cases), RANGE)
    for case in cases:
        for _ in range(4 * repeats):
            begin = time.thread_time_ns()
            case.copy.ranges(*case.pages, out=out)
            case.nanoseconds.append(time.thread_time_ns() - begin)


def _missed(copies: list[dict[str, Any]], ranges: dict[str, float]) -> list[str]:
    """The aims that were not reached, in words."""
    missed = []
    for row in copies:
        name = f"{row['direction']} of {_size(row['page_bytes'])}, {row['threads']} threads"
        for ratio in ("vs_torch", "vs_contiguous"):
            aim = row.get(f"aim_{ratio}", 0.0)
            if row[ratio] < aim:
                missed.append(f"{name}: {ratio} {row[ratio]:.2f}, aim {aim}")
    for name, spent in ranges.items():
        if spent > RANGE_AIM_NANOSECONDS:
            missed.append(f"{name}: {spent:.2f} ns a move, aim {RANGE_AIM_NANOSECONDS}")
    return missed


def _size(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def describe(report: dict[str, Any]) -> Sequence[str]:
    """The report for people."""
    lines = [
        (
            f"{_size(report['bytes'])} a side, {report['copy_path']}, GB/s copied, medians of"
            f" {report['repeats']}; how many times torch by time and by CPU time, and the contiguous"
            " copy (aims); memcpy is one thread's:"
        ),
        f"{'':26}{'ours':>7}{'torch':>7}{'contig.':>9}{'memcpy':>8}{'x torch':>13}{'CPU':>7}{'x contig.':>13}",
    ]
    for row in report["copies"]:
        rates = row["gb_per_second"]
        name = f"{row['direction']} {_size(row['page_bytes'])}, {row['threads']} thr."
        lines.append(
            f"{name:26}{rates['ours']:7.2f}{rates['torch']:7.2f}{rates['contiguous']:9.2f}{rates['memcpy']:8.2f}"
            f"{_beside_aim(row, 'vs_torch'):>13}{row['cpu_vs_torch']:7.2f}"
            f"{_beside_aim(row, 'vs_contiguous'):>13}"
        )
    lines.append(f"Checked list of a plan's moves, ns a move (aim {RANGE_AIM_NANOSECONDS}):")
    return lines + [
        f"  {name:32}{spent:6.2f}" for name, spent in report["nanoseconds_per_move"].items()
    ]


def _beside_aim(row: dict[str, Any], ratio: str) -> str:
    aim = row.get(f"aim_{ratio}")
    return f"{row[ratio]:.2f} ({aim})" if aim else f"{row[ratio]:.2f}      "
