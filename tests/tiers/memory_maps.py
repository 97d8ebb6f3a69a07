"""What the kernel says of a mapping of this process."""

from __future__ import annotations

import re
from pathlib import Path


def flags_of(address: int) -> list[str]:
    """Of the mapping that the address lies in: the kernel may have joined several."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError("the address is not mapped")


def policy_of(address: int) -> str:
    """The kernel's line on where its memory comes from."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line for line in lines if int(line.split()[0], 16) <= address][-1]
