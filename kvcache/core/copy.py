"""Copies of pages between host memories, and the plans of copies that any executor moves.

A plan is segments x pairs: what lies at one place in every page, and which page goes to which
(`kvcache_core.h` has the picture). One native call without the GIL, however many pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.values import sequence, shown

__all__ = ["RANGE", "CopySegment", "PageCopy", "copy_pages", "copy_path", "cores"]

RANGE = np.dtype([("source", np.uint64), ("target", np.uint64), ("length_bytes", np.int64)])
"""One contiguous move, between addresses."""


class CopySegment(NamedTuple):
    """One part of a page on both sides: page p starts at `address + p * stride_bytes`."""

    source_address: int
    source_stride_bytes: int
    source_pages: int
    target_address: int
    target_stride_bytes: int
    target_pages: int
    length_bytes: int


def copy_path() -> str:
    """Which instructions move the bytes: `avx512`, `avx2` or `memcpy`."""
    ffi, lib = native.load()
    return str(ffi.string(lib.kvc_copy_path()).decode())


def cores() -> int:
    """Threads that can run at a time: CPUs of the affinity mask, or the control groups' quota."""
    _, lib = native.load()
    return int(lib.kvc_cores())


class PageCopy:
    """The segments of a copy that is made again and again, with other pages each time.

    Owns no page memory: that the addresses are mapped, and stay so, is the caller's promise.

    Raises:
        ConfigError: a number that does not fit.
    """

    def __init__(self, segments: Sequence[CopySegment]) -> None:
        self._ffi, self._lib = native.load()
        rows = [
            [
                segment.source_address,
                segment.target_address,
                segment.source_stride_bytes,
                segment.target_stride_bytes,
                segment.length_bytes,
                segment.source_pages,
                segment.target_pages,
            ]
            for segment in sequence(segments, "segments", of=CopySegment)
        ]
        self._count = len(rows)
        self._segments = native.new("kvc_segment[]", rows)

    def run(
        self, source_pages: npt.ArrayLike, target_pages: npt.ArrayLike, *, threads: int = 1
    ) -> None:
        """Copy `source_pages[i]` to `target_pages[i]` in every segment. O(bytes).

        All ids, strides and ranges are validated first: on a `ConfigError` nothing was copied.
        Returns when the bytes are visible to other threads.

        Args:
            source_pages: int32 `[n]`; a page may be named more than once.
            target_pages: int32 `[n]`, each named once.
            threads: at most so many (1 to 256), and no more than `cores()`.
        """
        plan, _kept = self._plan(source_pages, target_pages)
        native.call(self._lib.kvc_copy, plan, threads)

    def ranges(
        self,
        source_pages: npt.ArrayLike,
        target_pages: npt.ArrayLike,
        *,
        out: NDArray[np.void] | None = None,
    ) -> NDArray[np.void]:
        """The same as moves between addresses, what is contiguous on both sides merged.

        Validated as by `run`. O(segments * pages).

        Args:
            source_pages: as of `run`.
            target_pages: as of `run`.
            out: `RANGE [at least segments * pages]`, to write to; None: a new array.

        Returns:
            `RANGE [n]`, the beginning of `out` where that was given.
        """
        plan, (source, _) = self._plan(source_pages, target_pages)
        room = self._count * len(source)
        found = np.empty(room, RANGE) if out is None else out
        if not isinstance(found, np.ndarray):
            raise ConfigError(f"out is {shown(found)}: give an array of {room} of copy.RANGE")
        usable = found.flags.c_contiguous and found.flags.writeable
        if found.dtype != RANGE or found.ndim != 1 or len(found) < room or not usable:
            raise ConfigError(
                f"out is {found.dtype} of shape {found.shape} and strides {found.strides}: give {room} or"
                " more of copy.RANGE, contiguous, writeable"
            )
        count = self._ffi.new("int64_t*")
        buffer = self._ffi.from_buffer("kvc_range[]", found, require_writable=True)
        native.call(self._lib.kvc_copy_ranges, plan, buffer, room, count)
        return found[: count[0]]

    def _plan(
        self, source_pages: npt.ArrayLike, target_pages: npt.ArrayLike
    ) -> tuple[Any, tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """The plan, and the arrays that it points into."""
        source = arrays.flat(source_pages, np.int32, "source_pages")
        target = arrays.flat(target_pages, np.int32, "target_pages")
        if len(source) != len(target):
            raise ConfigError(
                f"{len(source)} source pages and {len(target)} target pages: they are pairs"
            )
        plan = self._ffi.new("kvc_copy_plan*")
        plan.segments, plan.n_segments = self._segments, self._count
        plan.src = self._ffi.from_buffer("int32_t[]", source)
        plan.dst = self._ffi.from_buffer("int32_t[]", target)
        plan.n_pairs = len(source)
        return plan, (source, target)


def copy_pages(
    segments: Sequence[CopySegment],
    source_pages: npt.ArrayLike,
    target_pages: npt.ArrayLike,
    *,
    threads: int = 1,
) -> None:
    """`PageCopy(segments).run(...)`, for a copy that is made once."""
    PageCopy(segments).run(source_pages, target_pages, threads=threads)
