"""Locks of files that end with their process, however it ends. Held by an open file, not by a thread."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache.core.errors import ConfigError

RETRY_SECONDS = 0.005


def lock_now(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file or folder, or change the kind of it. False: another has it.

    Raises:
        OSError: a file system without locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, seconds: float, *, shared: bool = False) -> bool:
    """As `lock_now`, tried for so long."""
    end = time.monotonic() + seconds
    while not lock_now(descriptor, shared=shared):
        if time.monotonic() >= end:
            return False
        time.sleep(RETRY_SECONDS)
    return True


def unlock(descriptor: int) -> None:
    """Let the lock go."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """The lock of a file, made where it is not there.

    Raises:
        ConfigError: somebody kept it for so long.
    """
    end = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not lock_within(descriptor, end - time.monotonic()):
                raise ConfigError(
                    f"{path} is locked for more than {seconds:.0f} s: another process opens this"
                    " folder and does not get on; stop it, or give another folder"
                )
            if leads_to(path, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def leads_to(path: Path | str, descriptor: int, *, within: int | None = None) -> bool:
    """Whether the path is that of the open file, and not of another one that came in its place.

    `within`: a folder that it is relative to.
    """
    try:
        ours, there = os.fstat(descriptor), os.lstat(path, dir_fd=within)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
