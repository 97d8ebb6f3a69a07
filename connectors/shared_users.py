"""Users of a shared region, by number: each holds the lock of one byte of the region's own file.

So a number belongs to the region and not to a name, which somebody may remove, or give to another
file. Locks are those of an open file (F_OFD_SETLK): they end with its last descriptor, and a child
that was forked closes its copy.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcache.connectors.disk_locks import leads_to
from kvcache.connectors.forks import mind_forks

_LOCK = struct.Struct("hhqqi")  # struct flock: kind, whence, first byte, length, process
_BUSY = (BlockingIOError, PermissionError)


class UserLocks:
    """The numbers of one open file. A descriptor of its own: no mapping has a copy of it.

    Args:
        path: the file.
        in_child: called in a child that was forked, which is no user.
    """

    def __init__(self, path: Path, in_child: Callable[[], None] = lambda: None) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._in_child = in_child
        mind_forks(self)

    def take(self, user: int) -> bool:
        """False: a living process has the number."""
        try:
            self._set(fcntl.F_WRLCK, user, 1)
        except _BUSY:
            return False
        return True

    def give_back(self, user: int) -> None:
        """Nobody has the number."""
        self._set(fcntl.F_UNLCK, user, 1)

    def others(self) -> bool:
        """Whether a living process has any number, but for those that are taken here."""
        about = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # to the end, whatever it is
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, about)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _set(self, kind: int, first: int, length: int) -> None:
        about = _LOCK.pack(kind, os.SEEK_SET, first, length, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, about)

    def lead_from(self, path: Path) -> bool:
        """Whether the path leads to this file."""
        return leads_to(path, self._file)

    def close(self) -> None:
        """The numbers that were taken are free. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def after_fork(self) -> None:
        """In the child."""
        if self._file >= 0:
            with suppress(OSError):
                self.close()
            self._in_child()


def is_used(path: Path) -> bool:
    """Whether a living process is a user of the region whose file this is; also if that cannot be told."""
    try:
        locks = UserLocks(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return locks.others()
    except OSError:
        return True
    finally:
        locks.close()
