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
from pathlib import Path

import numpy as np

from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError

GIB = 1 << 30


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still take, and what sets the limit.

    The least of the machine's available memory and the room in each control group above us.
    """
    limits = [(_meminfo(root), "the machine's available memory")]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            folder = base / path.lstrip("/")
            while folder.is_relative_to(base):
                if (room := _cgroup_room(folder, *names)) is not None:
                    limits.append((room, f"the memory limit of control group {folder}"))
                folder = folder.parent
    return min(limits)


def _meminfo(root: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """Limit less usage, where usage does not count file cache that the kernel can drop."""
    try:
        limit = int((folder / limit_name).read_text())
        usage = int((folder / usage_name).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return None
    cache = 0
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in {"inactive_file", "total_inactive_file"}:
                cache = max(cache, int(value))
    return max(limit - max(usage - cache, 0), 0)


class HostPool:
    """Owns the mappings. `regions[g]` is where the slots of group g lie, valid until `close`."""

    def __init__(self, slot_bytes: Sequence[int], slots: Sequence[int], *, setting: str) -> None:
        total = sum(size * count for size, count in zip(slot_bytes, slots, strict=True))
        available, limit = available_memory()
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
