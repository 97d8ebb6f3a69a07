"""What a pool of host memory may not go beyond, asked before any of it is touched.

Each check raises `ConfigError` with the numbers and the setting to change: of the library, and of
the system where a limit of it stands in the way. Afterwards would be too late: the kernel answers a
touched page that it does not have with SIGBUS, or by killing the process.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvcache.core import host_memory
from kvcache.core.errors import ConfigError
from kvcache.core.values import human_bytes

HUGE_PAGE_BYTES = 2 << 20
_IPC_LOCK = 14
"""Number of the capability that RLIMIT_MEMLOCK does not bind (linux/capability.h)."""


def require_memory(setting: str, needed: int) -> None:
    """The machine, and each control group above this process, has so much left."""
    available, limit = host_memory.available()
    if needed > available:
        raise ConfigError(
            f"{setting} asks for {amount(needed)} of host memory, but {limit} leaves"
            f" {amount(available)} for a pool: lower {setting}"
        )


def require_lockable(setting: str, needed: int) -> None:
    """RLIMIT_MEMLOCK, less what is locked, allows to keep so much in memory."""
    room = lockable_bytes()
    if room is not None and needed > room:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise ConfigError(
            f"{setting} asks for {amount(needed)} of locked memory, but RLIMIT_MEMLOCK is"
            f" {amount(soft)}, of which {amount(room)} are left: set `ulimit -l unlimited` (docker:"
            f" --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity), lower {setting}, or leave out"
            " lock"
        )


def lockable_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still lock; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = dict(
        line.split(":", 1)
        for line in host_memory.read(root / "proc/self/status").splitlines()
        if ":" in line
    )
    capabilities = status.get("CapEff", "0").strip()
    if soft == resource.RLIM_INFINITY or int(capabilities or "0", 16) >> _IPC_LOCK & 1:
        return None
    locked = status.get("VmLck", "0 kB").split()
    return max(soft - int(locked[0]) * 1024, 0)


def require_file_space(setting: str, folder: Path, needed: int) -> None:
    """The file system of a folder has so much left: a page of it that is not there is a SIGBUS."""
    about = os.statvfs(folder)
    free, total = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    if needed > free:
        raise ConfigError(
            f"{setting} asks for {amount(needed)} in {folder}, but its file system of {amount(total)}"
            f" has {amount(free)} left: lower {setting}, or make it larger (docker: --shm-size;"
            f" else: mount -o remount,size=... {folder})"
        )


def require_node(setting: str, node: int, needed: int, root: Path = Path("/")) -> None:
    """The NUMA node is there, and has so much free memory."""
    nodes = numa_nodes(root)
    if node not in nodes:
        raise ConfigError(
            f"{setting} is {node}: this machine has the NUMA nodes {', '.join(map(str, nodes))}"
        )
    free = node_free_bytes(node, root)
    if free is not None and needed > free:
        raise ConfigError(
            f"{setting} is {node}, which has {amount(free)} of free memory for a pool of"
            f" {amount(needed)}: lower the pool, or leave out {setting}"
        )


def numa_nodes(root: Path = Path("/")) -> list[int]:
    """Nodes that are online; [0] where the system does not say."""
    nodes: list[int] = []
    for part in host_memory.read(root / "sys/devices/system/node/online").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes or [0]


_TO_BE_HAD = {"MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:"}
"""What the kernel's MemAvailable is made of, all but a small reserve."""


def node_free_bytes(node: int, root: Path = Path("/")) -> int | None:
    """Free memory, and file cache that can be dropped, of one node; None: not known."""
    folder = root / f"sys/devices/system/node/node{node}"
    found = []
    for line in host_memory.read(folder / "meminfo").splitlines():
        words = line.split()  # Node 0 MemFree: 123 kB
        if len(words) == 5 and words[2] in _TO_BE_HAD and words[3].isdigit():
            found.append(int(words[3]) * 1024)
    return sum(found) if found else None


def free_huge_pages(root: Path = Path("/")) -> int:
    """Huge pages of 2 MiB that are reserved, free, and promised to nobody."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free, promised = (
        host_memory.read(folder / name).strip() for name in ("free_hugepages", "resv_hugepages")
    )
    if not (free.isdigit() and promised.isdigit()):
        return 0
    return max(int(free) - int(promised), 0)


def file_huge_pages(folder: Path, root: Path = Path("/")) -> str:
    """When the file system of a folder takes huge pages: tmpfs's option `huge`; `never` without."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in host_memory.read(root / "proc/self/mountinfo").splitlines():
        words = line.split()
        if len(words) > 2 and words[2] == device:
            for option in words[-1].split(","):
                if option.startswith("huge="):
                    return option.removeprefix("huge=")
    return "never"


def require_file_huge_pages(setting: str, folder: Path) -> None:
    """The file system of a folder takes huge pages for what is reserved in it."""
    when = file_huge_pages(folder)
    if when not in {"always", "within_size"}:
        raise ConfigError(
            f"{setting} is True, and the file system of {folder} takes huge pages {when!r}: mount it"
            f" with them (mount -o remount,huge=within_size {folder}), or leave out {setting}"
        )


def amount(size: int) -> str:
    """Bytes, exactly and for people."""
    return f"{size} bytes ({human_bytes(size)})"
