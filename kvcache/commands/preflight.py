"""Host memory before pools are made: what there is, which limits stand, and what to do about them.

Everything is read from `/proc` and `/sys`; what cannot be read is None, never an error.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvcache.core import host_limits, host_memory
from kvcache.core.errors import ConfigError
from kvcache.core.values import human_bytes

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
GIB = 2**30
LOW_MEMORY_BYTES = 2 * GIB
SMALL_SHM_BYTES = GIB


@dataclass(frozen=True)
class HostMemory:
    """Sizes in bytes; None: no limit, or not known."""

    total_bytes: int | None
    available_bytes: int | None
    """What a host pool may take: the machine's, or less where a cgroup has less room."""
    cgroup_limit_bytes: int | None
    """The smallest memory limit among this process's cgroup and its parents."""
    memlock_limit_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    transparent_huge_pages: str | None
    """`always`, `madvise` or `never`."""
    available_limit: str = "the machine's available memory"
    """What sets `available_bytes`."""
    lockable_bytes: int | None = None
    """What this process may still lock, of RLIMIT_MEMLOCK; None: as root, or with CAP_IPC_LOCK, all."""
    huge_pages: int = 0
    """Of 2 MiB, reserved, free and promised to nobody."""
    numa_free_bytes: dict[int, int | None] = field(default_factory=dict)
    """Of each node: free memory, with file cache that can be dropped."""

    @property
    def largest_shared_bytes(self) -> int | None:
        """The largest pool that processes could share now."""
        sizes = [size for size in (self.available_bytes, self.shm_free_bytes) if size is not None]
        return None if self.shm_free_bytes is None else min(sizes)


def _statvfs(path: str) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def selected(text: str) -> str | None:
    """The bracketed word of a sysfs choice: `always [madvise] never`."""
    return next((word[1:-1] for word in text.split() if word.startswith("[")), None)


def measure() -> HostMemory:
    """What holds for this process now."""
    total = host_memory.machine().get("MemTotal")
    available, limit = host_memory.available()
    limits = [group.limit_bytes for group in host_memory.group_limits()]
    huge_pages = host_memory.read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = _statvfs(SHM)
    return HostMemory(
        total_bytes=total,
        available_bytes=available if available < host_memory.NO_LIMIT_BYTES else None,
        cgroup_limit_bytes=min(limits, default=None),
        memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        transparent_huge_pages=selected(huge_pages),
        available_limit=limit,
        lockable_bytes=host_limits.lockable_bytes(),
        huge_pages=host_limits.free_huge_pages(),
        numa_free_bytes={
            node: host_limits.node_free_bytes(node) for node in host_limits.numa_nodes()
        },
    )


def refusals(pool_bytes: int) -> list[str]:
    """What would refuse a host pool of this size: private, shared, locked. One line each."""
    checks: tuple[Callable[[], None], ...] = (
        partial(host_limits.require_memory, "--pool", pool_bytes),
        partial(host_limits.require_file_space, "--pool (shared)", Path(SHM), pool_bytes),
        partial(host_limits.require_lockable, "--pool (locked)", pool_bytes),
    )
    lines = []
    for check in checks:
        try:
            check()
        except (ConfigError, OSError) as error:
            lines.append(str(error))
    return lines


def size(count: int | None) -> str:
    """Bytes for people; None is not known."""
    return "unknown" if count is None else human_bytes(count)


def limit(count: int | None) -> str:
    """A limit for people; None is no limit."""
    return "without limit" if count is None else human_bytes(count)


def advice(memory: HostMemory) -> list[str]:
    """One line for each thing that will stand in the way of a host pool."""
    lines = []
    available = memory.available_bytes
    of_group = memory.cgroup_limit_bytes
    if available is not None and available < LOW_MEMORY_BYTES:
        lines.append(f"only {size(available)} of memory are available: make host pools smaller")
    if of_group is not None and (memory.total_bytes is None or of_group < memory.total_bytes):
        lines.append(
            f"the cgroup limit is {size(of_group)}: size host pools by it, or raise the container's"
            " memory limit"
        )
    if memory.memlock_limit_bytes is not None and memory.lockable_bytes is not None:
        lines.append(
            f"RLIMIT_MEMLOCK is {size(memory.memlock_limit_bytes)}: a pool above that cannot be"
            " pinned for a GPU or NIC; set `ulimit -l unlimited` (docker: --ulimit memlock=-1)"
        )
    if memory.shm_total_bytes is None:
        lines.append(f"{SHM} is missing: processes cannot share a pool; mount a tmpfs there")
    elif memory.shm_total_bytes < SMALL_SHM_BYTES:
        lines.append(
            f"{SHM} has {size(memory.shm_total_bytes)}: too small for a pool shared between"
            " processes (docker: --shm-size)"
        )
    if memory.transparent_huge_pages == "never":
        lines.append(
            "transparent huge pages are off: copies to and from host pools are slower; write"
            " `madvise` to /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return lines
