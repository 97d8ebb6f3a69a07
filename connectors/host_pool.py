"""Host memory of a tier: one mapping, exactly as large as its slots, made ready in the background.

    | group 0: slot 0 | slot 1 | ... | group 1: slot 0 | ... |     a slot = one page of the group,
                                     ^ a multiple of 4096          all its layers, contiguous

Anonymous and private: a killed process leaves nothing behind. Nothing is rounded up to powers of
two. Limits are asked before the mapping is made, and again before each chunk is touched.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress

from kvcache.connectors.base import PageRegion
from kvcache.connectors.pool_chunks import PoolChunks, require_room
from kvcache.core import memory_calls
from kvcache.core.errors import ConfigError
from kvcache.core.host_limits import (
    HUGE_PAGE_BYTES,
    amount,
    free_huge_pages,
    require_lockable,
    require_memory,
    require_node,
)

PAGE_BYTES = 4096
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_HUGETLB = 0x40000  # linux/mman.h; Python has no name for it


def place(setting: str, node: int, address: int, size_bytes: int) -> None:
    """What a range gets comes from the NUMA node, as long as it has some; `ConfigError` where it cannot."""
    try:
        memory_calls.prefer_node(address, size_bytes, node)
    except OSError as error:
        raise ConfigError(
            f"{setting} is {node}, and the system cannot place memory ({error}): leave it out"
        ) from error


class HostPool:
    """Owns the mapping. `regions[g]` is where the slots of group g lie, valid until `close`.

    Args:
        slot_bytes, slots: of each group.
        setting: what asked for so much, for messages.
        huge_pages: True: of those that are reserved (`vm.nr_hugepages`); False: none; None: of the
            reserved where they are enough, else transparent ones where the kernel has them.
        numa_node: where memory is to come from as long as there is some; None: wherever.
        lock: keep it from being swapped, within RLIMIT_MEMLOCK.

    Raises:
        ConfigError: more than a limit leaves, or what this machine does not have.
    """

    def __init__(
        self,
        slot_bytes: Sequence[int],
        slots: Sequence[int],
        *,
        setting: str,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        lock: bool = False,
    ) -> None:
        offsets, total = [], 0
        for size, count in zip(slot_bytes, slots, strict=True):
            offsets.append(total)
            total += -(-size * count // PAGE_BYTES) * PAGE_BYTES
        reserved = self._reserves(setting, total, huge_pages)
        if lock:
            require_lockable(setting, total)
        mapping = self._map_reserved(setting, total, huge_pages) if reserved else None
        reserved = mapping is not None
        if mapping is None:
            require_memory(setting, total)
            mapping = self._map(setting, total)
        if numa_node is not None:
            require_node("CpuConnector.numa_node", numa_node, 0 if reserved else total)
        self._mapping = mapping
        # A forked child has no use for it, and its parent would copy each page that it writes.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.mapped_bytes = len(self._mapping)
        """With what is rounded up: to 4 KiB a group, to 2 MiB in all where huge pages are reserved."""
        self.huge_pages = "reserved" if reserved else "none"
        """What backs it: `reserved`, `transparent` (where the kernel finds some) or `none`."""
        if not reserved and huge_pages is None:
            with suppress(OSError):  # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
                self.huge_pages = "transparent"
        if numa_node is not None:
            place("CpuConnector.numa_node", numa_node, self.address, self.mapped_bytes)
        self.regions = tuple(
            PageRegion(self.address + offset, size, count)
            for offset, size, count in zip(offsets, slot_bytes, slots, strict=True)
        )

        def make_ready(address: int, size_bytes: int) -> None:
            if not reserved:
                require_room(size_bytes)
            memory_calls.populate(address, size_bytes)
            if lock:
                memory_calls.lock(address, size_bytes)

        self.chunks = PoolChunks(self.regions, make_ready)

    @staticmethod
    def _reserves(setting: str, total: int, huge_pages: bool | None) -> bool:  # noqa: FBT001
        """Whether reserved huge pages are to be taken: there are enough."""
        if huge_pages is False:
            return False
        needed, free = -(-total // HUGE_PAGE_BYTES), free_huge_pages()
        if huge_pages and needed > free:
            raise ConfigError(
                f"{setting} asks for {amount(total)} in huge pages, {needed} of 2 MiB, but {free}"
                " are reserved and free: raise /proc/sys/vm/nr_hugepages, lower the pool, or leave"
                " out huge_pages"
            )
        return needed <= free

    @staticmethod
    def _map_reserved(setting: str, total: int, huge_pages: bool | None) -> mmap.mmap | None:  # noqa: FBT001
        """None: others took the reserved huge pages meanwhile, and it may be done without."""
        length = -(-total // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            return mmap.mmap(-1, length, flags=_PRIVATE | _MAP_HUGETLB)
        except OSError as error:
            if not huge_pages:
                return None
            raise ConfigError(
                f"{setting}: the system refused {amount(length)} in huge pages ({error}): raise"
                " /proc/sys/vm/nr_hugepages, lower the pool, or leave out huge_pages"
            ) from error

    @staticmethod
    def _map(setting: str, total: int) -> mmap.mmap:
        try:
            return mmap.mmap(-1, total, flags=_PRIVATE)
        except OSError as error:
            raise ConfigError(
                f"{setting}: the system refused to map {amount(total)} of host memory ({error}):"
                f" lower {setting}"
            ) from error

    def close(self) -> None:
        """Unmap. Nobody may touch the slots from now on. Idempotent.

        Where a chunk is still being made ready, after a long wait, the memory stays mapped.
        """
        if self.chunks.close():
            self._mapping.close()
