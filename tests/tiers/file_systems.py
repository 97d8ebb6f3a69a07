"""File systems of a few kinds and sizes, for as long as a test takes. Mounting needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


@contextmanager
def mounted(
    folder: Path, kind: str, options: str, require: Callable[[str, str], NoReturn]
) -> Iterator[Path]:
    """`folder` with a new file system of a kind; the test is skipped where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", options, "none", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        require("mount", f"this process may not mount a {kind}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        command = ["umount", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
