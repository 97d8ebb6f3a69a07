"""The copy of pages between two regions, of which one may lie in the memories of several ranks.

What moves whole pages from and to addresses (files, a network) goes by way of a `PageStage`.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import PageRegion
from kvcache.core.copy import CopySegment, copy_pages
from kvcache.core.errors import ConfigError


def native_copy(
    source: PageRegion,
    target: PageRegion,
    source_pages: NDArray[np.int32],
    target_pages: NDArray[np.int32],
    *,
    threads: int = 1,
) -> None:
    """The native gather/scatter copy, whole pages, pair by pair; all or an exception.

    Of parts that several ranks hold, one is read and all are written. By at most so many threads.

    Raises:
        ConfigError: pages that are not there, or regions in parts on both sides.
    """
    if source.parts and target.parts:
        raise ConfigError("both regions of a copy lie in parts: one of them must be a tier's slots")
    parts = max(source.places, target.places, key=len)
    length = source.page_bytes // len(parts)
    segments = []
    for i in range(len(parts)):
        come, go = _part(source, i, length)[:1], _part(target, i, length)
        segments += [
            CopySegment(
                come[0],
                source.step_bytes,
                source.pages,
                address,
                target.step_bytes,
                target.pages,
                length,
            )
            for address in go
        ]
    copy_pages(segments, source_pages, target_pages, threads=threads)


def _part(region: PageRegion, part: int, length: int) -> tuple[int, ...]:
    """Addresses of a part of page 0."""
    return region.parts[part] if region.parts else (region.address + part * length,)


class PageStage:
    """Host memory for whole pages of regions that lie in parts. Grows as needed; for one thread.

    For one batch after the other: `addresses`, then the move, then for loads `scatter`.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def addresses(
        self, region: PageRegion, pages: NDArray[np.int32], *, filled: bool
    ) -> NDArray[np.uint64]:
        """Where pages are whole: in the region itself, or here.

        Args:
            filled: they are to be read: their bytes are there.
        """
        if not region.parts:
            return region.address + pages.astype(np.uint64) * np.uint64(region.step_bytes)
        size = len(pages) * region.page_bytes
        if len(self._memory) < size:
            self._memory.close()
            self._memory = mmap.mmap(-1, size)
        stage, places = self._region(region, len(pages)), np.arange(len(pages), dtype=np.int32)
        if filled:
            native_copy(region, stage, pages, places)
        return stage.address + places.astype(np.uint64) * np.uint64(region.page_bytes)

    def scatter(
        self, region: PageRegion, pages: NDArray[np.int32], good: NDArray[np.bool_]
    ) -> None:
        """Those pages that are good, and were written to the `addresses` of all, to the region."""
        if region.parts and good.any():
            places = np.flatnonzero(good).astype(np.int32)
            native_copy(self._region(region, len(pages)), region, places, pages[good])

    def close(self) -> None:
        """Unmap."""
        self._memory.close()

    def _region(self, region: PageRegion, count: int) -> PageRegion:
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        return PageRegion(address, region.page_bytes, count)
