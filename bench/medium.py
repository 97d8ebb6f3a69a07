"""On what the files of a folder lie: a benchmark of files in memory would measure no disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvcache.connectors.disk_folder import DiskFolder
from kvcache.core.errors import ConfigError

IN_MEMORY = ("ramfs", "tmpfs")
MOUNTS = Path("/proc/self/mountinfo")


def medium(folder: Path, *, allow_tmpfs: bool) -> dict[str, Any]:
    """The type of the folder's file system, and whether the disk tier goes past the kernel's cache.

    Raises:
        ConfigError: the files would lie in memory, which was not asked for.
    """
    kind = file_system(folder, MOUNTS.read_text(errors="surrogateescape"))
    if kind in IN_MEMORY and not allow_tmpfs:
        raise ConfigError(
            f"{folder.parent} is on {kind}, which is memory, no disk: give --folder a place on a disk,"
            " or add --allow-tmpfs"
        )
    probe = DiskFolder(
        folder / "probe", text="", page_bytes=[1], direct=None, durable=False, threads=1
    )
    probe.close()
    return {"file_system": kind, "direct": probe.direct}


def file_system(folder: Path, mounts: str) -> str:
    """Of the innermost of those mounts (proc(5), mountinfo) that the folder is in."""
    place, found = folder.resolve(), ("", "unknown")
    for line in mounts.splitlines():
        fields = line.split(" ")
        at = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
        # Of two mounts at one place the later one hides the other.
        if place.is_relative_to(at) and len(at) >= len(found[0]):
            found = (at, fields[fields.index("-") + 1])
    return found[1]


def describe_medium(found: dict[str, Any]) -> str:
    """For people."""
    cache = (
        "past the kernel's cache (O_DIRECT)" if found["direct"] else "through the kernel's cache"
    )
    return f"files: {found['file_system']}, {cache}"
