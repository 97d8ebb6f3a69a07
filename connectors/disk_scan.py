"""The page files of one group of a disk tier, found in steps that are short beside a transfer."""

from __future__ import annotations

import os
from array import array
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.disk_format import name_of_file

STEP_FILES = 256
"""A few ms."""

_LATEST = 2**63 - 1
"""Nanoseconds since 1970: a file may say more, or less than 0."""


class FoundPages(NamedTuple):
    """Files of one group, the oldest first."""

    names: NDArray[np.uint8]
    """`[n, 64]`, as `Transfer.names`."""
    damaged: int
    """Files of another length: removed."""
    newest: int = 0
    """Time of the last of them, nanoseconds since 1970."""


def scanning(folder: Path, file_bytes: int) -> Generator[None, None, FoundPages]:
    """Every file that is as long as it must be; stops after each so many. O(files), one `stat` each.

    Raises:
        OSError: the folder is not there any more.
    """
    times, names = array("q"), bytearray()
    seen = damaged = 0
    for letters in os.scandir(folder):
        if not letters.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(letters.path):
            name = name_of_file(entry.name)
            if name is None:
                continue
            with suppress(OSError):  # removed by another process
                about = entry.stat(follow_symlinks=False)
                if about.st_size == file_bytes and entry.name.startswith(letters.name):
                    times.append(min(max(about.st_mtime_ns, 0), _LATEST))
                    names += name
                else:
                    Path(entry.path).unlink()
                    damaged += 1
            seen += 1
            if seen % STEP_FILES == 0:
                yield
    changed = np.frombuffer(times, np.int64)
    order = np.argsort(changed, kind="stable")
    rows = np.frombuffer(names, np.uint8).reshape(-1, 64)[order]
    return FoundPages(rows, damaged, int(changed[order[-1]]) if len(order) else 0)
