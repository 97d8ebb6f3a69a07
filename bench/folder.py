"""A folder for the files of one benchmark, removed at its end, or by the next one after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcache.core.errors import ConfigError

PREFIX = "kvcache-files-"
LOCK = "in-use"
"""Locked as long as the process lives; it appears in the folder when it is locked already."""


@contextmanager
def temporary_folder(given: str | None, option: str = "--folder") -> Iterator[Path]:
    """A new folder inside the given one; None: where temporary files go.

    What a killed process left there is removed first.

    Raises:
        ConfigError: there is no such folder, or nothing can be made in it.
    """
    _sweep(Path(given or tempfile.gettempdir()))
    try:
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=given))
        lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{option} {given} cannot be used ({error})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (made / "lock").rename(made / LOCK)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _sweep(place: Path) -> None:
    """Folders whose process is gone. Of others' folders nothing is touched."""
    for path in place.glob(PREFIX + "*"):
        with suppress(OSError):
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
