"""`kvcache bench disk`: pages written to files and read back, beside plain writes and reads of Python.

Ours in every way that it may go (past the kernel's cache or through it, synced or not, one file at a
time or two), and plainly: one `write` or `read` a page, no head, no checksum, no rename. Rounds of all
are interleaved; the best round of each counts. Cold: the kernel is asked to forget the files.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.folder import temporary_folder
from kvcache.bench.machine import machine
from kvcache.bench.medium import describe_medium, medium
from kvcache.connectors import disk_format
from kvcache.connectors.disk import DEFAULT_BATCH_BYTES
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.page_files import PageFiles

MOST_BYTES = 1 << 36
HEAD_BYTES = disk_format.HEAD_DTYPE.itemsize
LAYOUT = bytes(32)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DiskBench:
    """What to measure. `pages` of `page_bytes` are written and read in each round."""

    folder: str | None = None
    """None: a temporary one."""
    allow_tmpfs: bool = False
    """The folder may be in memory."""
    page_bytes: int = 720 << 10
    """16 tokens of SmolLM2-135M in float32."""
    pages: int = 96
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_bytes", "pages", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: at least 1"
                )
        if self.page_bytes * self.pages > MOST_BYTES:
            raise ConfigError(
                f"--pages {self.pages} of --page-bytes {self.page_bytes} are more than {MOST_BYTES}"
                " bytes: give fewer"
            )


class _Way(NamedTuple):
    direct: bool
    durable: bool
    threads: int

    @property
    def name(self) -> str:
        cache = "direct" if self.direct else "cached"
        return f"{cache}{'_synced' if self.durable else ''}_{self.threads}"


class _Pages:
    """Page memory on boundaries of 4 KiB, and what the files are called."""

    def __init__(self, bench: DiskBench) -> None:
        step = -(-bench.page_bytes // 4096) * 4096
        self._memory = np.zeros(bench.pages * step + 4096, np.uint8)
        start = -self._memory.ctypes.data % 4096
        self.rows = self._memory[start : start + bench.pages * step].reshape(bench.pages, step)
        self.addresses = np.array([row.ctypes.data for row in self.rows], np.uint64)
        names = np.zeros((bench.pages, 64), np.uint8)
        rng = np.random.default_rng(bench.seed)
        names[:, 32:] = rng.integers(0, 256, (bench.pages, 32), dtype=np.uint8)
        self.names = disk_format.file_names(names)
        self.heads = disk_format.heads(LAYOUT, 0, bench.page_bytes, names)
        self.times = np.arange(bench.pages, dtype=np.int64)


def run_disk_bench(bench: DiskBench, progress: Progress) -> dict[str, Any]:
    """Measure; the report as plain values, in bytes of pages a second.

    Raises:
        ConfigError: the folder cannot be used, or a file of it cannot be written.
    """
    with temporary_folder(bench.folder) as folder:
        found = medium(folder, allow_tmpfs=bench.allow_tmpfs)
        ways = [_Way(*way) for way in itertools.product((True, False), (False, True), (1, 2))]
        if not found["direct"]:
            ways = [way for way in ways if not way.direct]
        source, target = _Pages(bench), _Pages(bench)
        shape = bench.pages, bench.page_bytes
        random = np.random.default_rng(bench.seed).integers(0, 256, shape, dtype=np.uint8)
        source.rows[:, : bench.page_bytes] = random
        rates: dict[str, dict[str, float]] = {}
        for repeat in range(bench.repeats):
            progress(f"round {repeat + 1} of {bench.repeats}")
            for way in ways:
                _note(rates, way.name, _ours(bench, folder, way, source, target))
            _note(rates, "plain", _plain(bench, folder, source, target))
    return {
        "bench": "disk",
        "page_bytes": bench.page_bytes,
        "pages": bench.pages,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "medium": found,
        "bytes_per_second": rates,
        "machine": machine(),
    }


def _note(rates: dict[str, dict[str, float]], name: str, found: dict[str, float]) -> None:
    row = rates.setdefault(name, found)
    rates[name] = {what: max(rate, row[what]) for what, rate in found.items()}


def _ours(
    bench: DiskBench, folder: Path, way: _Way, source: _Pages, target: _Pages
) -> dict[str, float]:
    place = folder / "ours"
    place.mkdir()
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files = PageFiles(
            descriptor,
            page_bytes=bench.page_bytes,
            head_bytes=HEAD_BYTES,
            name_bytes=disk_format.FILE_NAME_BYTES,
            **way._asdict(),
        )

        def write(rows: slice) -> NDArray[np.int32]:
            return files.write(
                "way",
                source.names[rows],
                source.heads[rows],
                source.addresses[rows],
                source.times[rows],
            )

        def read(rows: slice) -> NDArray[np.int32]:
            return files.read(
                source.names[rows],
                source.heads[rows],
                target.addresses[rows],
                source.times[rows],
            )

        rates = {"write": _rate(bench, write)}
        _forget(place)
        rates["read_cold"] = _rate(bench, read)
        if not way.direct:
            rates["read_warm"] = _rate(bench, read)
    finally:
        os.close(descriptor)
        shutil.rmtree(place)
    _compare(source, target)
    return rates


def _plain(bench: DiskBench, folder: Path, source: _Pages, target: _Pages) -> dict[str, float]:
    place = folder / "plain"
    place.mkdir()
    none = np.zeros(1, np.int32)

    def write(rows: slice) -> NDArray[np.int32]:
        for i in range(bench.pages)[rows]:
            with (place / str(i)).open("wb", buffering=0) as file:
                file.write(source.rows[i, : bench.page_bytes].data)
        return none

    def read(rows: slice) -> NDArray[np.int32]:
        for i in range(bench.pages)[rows]:
            with (place / str(i)).open("rb", buffering=0) as file:
                file.readinto(target.rows[i, : bench.page_bytes].data)
        return none

    try:
        rates = {"write": _rate(bench, write)}
        _forget(place)
        rates |= {"read_cold": _rate(bench, read), "read_warm": _rate(bench, read)}
    finally:
        shutil.rmtree(place)
    _compare(source, target)
    return rates


def _rate(bench: DiskBench, move: Callable[[slice], NDArray[np.int32]]) -> float:
    """In batches as the connector makes them."""
    step = max(1, DEFAULT_BATCH_BYTES // bench.page_bytes)
    begin = time.perf_counter()
    for first in range(0, bench.pages, step):
        outcomes = move(slice(first, first + step))
        if outcomes.any():
            error = int(outcomes[outcomes != 0][0])
            raise ConfigError(f"a page of --folder failed: {os.strerror(abs(error))} ({error})")
    return bench.pages * bench.page_bytes / (time.perf_counter() - begin)


def _forget(folder: Path) -> None:
    """Written out, and not in the kernel's cache any more."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _compare(source: _Pages, target: _Pages) -> None:
    if not np.array_equal(source.rows, target.rows):
        raise InvariantError("other bytes came back from --folder than were written")
    target.rows[:] = 0


def describe(report: dict[str, Any]) -> Sequence[str]:
    """The report for people."""
    pages, repeats = f"{report['pages']} pages of {report['page_bytes']} bytes", report["repeats"]
    lines = [
        f"{pages}, GB/s, best of {repeats}; {describe_medium(report['medium'])}:",
        f"{'':18}{'write':>8}{'read cold':>12}{'read warm':>12}",
    ]
    for name, rates in report["bytes_per_second"].items():
        row = [rates["write"], rates["read_cold"], rates.get("read_warm")]
        cells = ["" if rate is None else f"{rate / 1e9:.2f}" for rate in row]
        lines.append(f"{name:18}{cells[0]:>8}{cells[1]:>12}{cells[2]:>12}")
    return lines
