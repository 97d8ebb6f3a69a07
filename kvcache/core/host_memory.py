"""Host memory as this process may use it: the machine's, and the limits of its control groups.

Everything is read from `/proc` and `/sys` under `root`; what cannot be read sets no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_LIMIT_BYTES = 1 << 62
"""Version 1 of control groups writes "no limit" as a number near 2^63."""

MOST_RESERVE_BYTES = 1 << 30


class GroupLimit(NamedTuple):
    """The memory limit of one control group."""

    folder: Path
    limit_bytes: int
    room_bytes: int
    """Limit less usage, where usage does not count file cache that the kernel can drop."""


def read(path: Path) -> str:
    """The text of a file of the kernel, empty where there is none."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def machine(root: Path = Path("/")) -> dict[str, int]:
    """`/proc/meminfo` in bytes by name."""
    sizes = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def group_limits(root: Path = Path("/")) -> list[GroupLimit]:
    """Limits on the way up from this process's control group, versions 1 and 2.

    In a container the group may be named by a path outside the container's view: then only the
    root of the view is found.
    """
    found = []
    for folder, limit_name, usage_name in _folders(root):
        limit = read(folder / limit_name).strip()
        if not limit.isdigit() or int(limit) >= NO_LIMIT_BYTES:  # no such group, or "max"
            continue
        usage = read(folder / usage_name).strip()
        used = max((int(usage) if usage.isdigit() else 0) - _file_cache(folder), 0)
        found.append(GroupLimit(folder, int(limit), max(int(limit) - used, 0)))
    return found


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that a pool of this process may still take, and what sets the limit.

    Less a reserve (`reserve_bytes`): the pool is not all that will grow.
    """
    sizes = machine(root)
    free = sizes.get("MemAvailable", NO_LIMIT_BYTES)
    total = sizes.get("MemTotal", free)
    rooms = [(free - reserve_bytes(total), "the machine's available memory")]
    for group in group_limits(root):
        room = group.room_bytes - reserve_bytes(group.limit_bytes)
        rooms.append((room, f"the memory limit of control group {group.folder}"))
    room, limit = min(rooms)
    return max(room, 0), limit


def reserve_bytes(limit_bytes: int) -> int:
    """What a pool leaves of a limit: whoever asks for the last page is killed, and asks next.

    That is the engine: for its tensors, its heap, and the kernel's tables of the pool itself, which
    are 1/512 of it. A thirty-second part; a large machine needs no more than `MOST_RESERVE_BYTES`.
    """
    return min(limit_bytes // 32, MOST_RESERVE_BYTES)


def _folders(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each control group above us, with its files for limit and usage."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.strip("/")
        for step in (folder, *folder.parents):
            if step.is_relative_to(base):
                yield step, *names


def _file_cache(folder: Path) -> int:
    sizes = [0]
    for line in read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"} and value.isdigit():
            sizes.append(int(value))
    return max(sizes)
