"""Host memory of a tier: one mapping for each group, exactly as large as its slots.

    group 0:  | slot 0 | slot 1 | ... |      a slot = one page of the group, all its layers,
    group 1:  | slot 0    | slot 1    |      contiguous (page-first)

Anonymous and private: a killed process leaves nothing behind. Nothing is rounded up to powers of
two; the kernel hands out memory as slots are first written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvcache.connectors.base import PageRegion
from kvcache.core import host_memory
from kvcache.core.errors import ConfigError

GIB = 1 << 30


class HostPool:
    """Owns the mappings. `regions[g]` is where the slots of group g lie, valid until `close`."""

    def __init__(self, slot_bytes: Sequence[int], slots: Sequence[int], *, setting: str) -> None:
        total = sum(size * count for size, count in zip(slot_bytes, slots, strict=True))
        available, limit = host_memory.available()
        if total > available:
            raise ConfigError(
                f"{setting} asks for {total} bytes ({total / GIB:.2f} GiB) of host memory, but"
                f" {limit} leaves {available} bytes ({available / GIB:.2f} GiB): lower {setting}"
            )
        self._mappings: list[mmap.mmap] = []
        regions = []
        try:
            for size, count in zip(slot_bytes, slots, strict=True):
                mapping = mmap.mmap(-1, size * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._mappings.append(mapping)
                with suppress(OSError):  # a kernel without transparent huge pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                address = np.frombuffer(mapping, np.uint8).ctypes.data
                regions.append(PageRegion(address, size, count))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{setting}: the system refused to map {total} bytes ({total / GIB:.2f} GiB) of"
                f" host memory ({error}): lower {setting}"
            ) from error
        self.regions = tuple(regions)
        self.mapped_bytes = total

    def close(self) -> None:
        """Unmap. Nobody may touch the slots from now on. Idempotent."""
        while self._mappings:
            self._mappings.pop().close()
