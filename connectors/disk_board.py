"""What the processes of one folder tell each other: a ring of the last changes, in a small file.

    0     magic, version, records that were ever written
    64    record 0 | record 1 | ... | record RECORDS - 1

Whoever changes the folder writes records; whoever looks finds those since it looked last. So each
process knows, soon, what all have stored, and all together keep to one bound. Who comes too late for
records, or finds the board damaged, is told that it missed some, and looks into the folder itself.
No answer relies on it: where a file was thought to be there is none, and that is a miss.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.disk_locks import lock_within, unlock

RECORDS = 8192
"""More than the pages of one store, so that who looks now and then misses nothing."""

LOCK_SECONDS = 0.05
"""A process that was stopped in the middle of a record is not waited for any longer, ..."""

HURRY_SECONDS = 5.0
"""... and then, for so long, not at all: each record would be waited for."""

MOST_RECORDS = 1 << 62
"""More were never written: the board is damaged."""

RECORD_DTYPE = np.dtype([("writer", "<u8"), ("kind", "<u4"), ("group", "<u4"), ("name", "u1", 64)])

_HEAD = struct.Struct("<8sQQ")
_MAGIC, _VERSION = b"kvcboard", 1
_FIRST = 64


class Change(IntEnum):
    """What became of a file."""

    STORED = 1
    REMOVED = 2
    USED = 3
    """Loaded: it is not old."""


class Seen(NamedTuple):
    """What `Board.look` found."""

    records: NDArray[np.void]
    """Of others, in order, `RECORD_DTYPE`."""
    missed: bool
    """There were others that are not told any more."""


class Board:
    """One process's view of the board. For one thread. `file` is the caller's to close.

    Args:
        path: made where it is not there.
        writer: what this process's records are known by, not 0.
        fresh: nobody else uses it: begin anew.

    Raises:
        OSError: it cannot be made or read. Nothing is open then.
    """

    def __init__(self, path: Path, writer: int, *, fresh: bool) -> None:
        self._writer = writer
        self._hurry_until = 0.0
        self._waiting = np.zeros(0, RECORD_DTYPE)
        self._untold = 0
        """Records that could not be written yet, and alarms as so many that all others miss some."""
        if fresh:
            with suppress(FileNotFoundError):
                path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.open(path, flags, 0o600)
        try:
            self._seen = self._written()
        except OSError:
            os.close(self.file)
            raise

    def post(self, kind: Change, group: int, names: NDArray[np.uint8]) -> bool:
        """Tell the others. False: not yet, see `tell`. Bounded time, no exception."""
        records = np.zeros(len(names), RECORD_DTYPE)
        records["writer"], records["kind"], records["group"] = self._writer, kind, group
        records["name"] = names
        self._keep(records, len(records))
        return self.tell()

    def alarm(self) -> bool:
        """Let all others look into the folder: something changed that nobody told, or will tell."""
        self._keep(np.zeros(RECORDS, RECORD_DTYPE), RECORDS + 1)
        return self.tell()

    def _keep(self, records: NDArray[np.void], count: int) -> None:
        """Of more than the ring takes the last; who reads them finds that it missed some."""
        self._waiting = np.concatenate([self._waiting, records])[-RECORDS:]
        self._untold += count

    @property
    def untold_files(self) -> int:
        """Files that this process has stored and nobody knows of."""
        return int((self._waiting["kind"] == Change.STORED).sum())

    def tell(self) -> bool:
        """Write what could not be told before. False: some of it still waits. As `post`."""
        if not self._untold:
            return True
        try:
            if not self._lock():
                return False
            first = self._written()
            written = first + self._untold
            start = written - len(self._waiting)
            for part in _parts(start, written):
                os.pwrite(
                    self.file,
                    self._waiting[part.start - start : part.stop - start].tobytes(),
                    _place(part),
                )
            self._write_head(written)
            if first == self._seen:  # nothing of others is in between
                self._seen = written
        except OSError:
            return False
        finally:
            with suppress(OSError):
                unlock(self.file)
        self._waiting, self._untold = self._waiting[:0], 0
        return True

    def _lock(self) -> bool:
        hurry = time.monotonic() < self._hurry_until
        if lock_within(self.file, 0 if hurry else LOCK_SECONDS):
            return True
        if not hurry:
            self._hurry_until = time.monotonic() + HURRY_SECONDS
        return False

    def look(self) -> Seen:
        """What others told since the last call; the last `RECORDS` of it at most. Tells what waits."""
        self.tell()
        nothing = Seen(np.zeros(0, RECORD_DTYPE), missed=False)
        with suppress(OSError):
            if self._written() == self._seen:
                return nothing
            if not lock_within(self.file, 0, shared=True):
                return nothing  # somebody writes: the next time
            try:
                return self._since_seen()
            finally:
                unlock(self.file)
        return nothing

    def _since_seen(self) -> Seen:
        written = self._written()
        missed = not self._seen <= written <= self._seen + RECORDS
        first = written if written < self._seen else max(self._seen, written - RECORDS)
        size = RECORD_DTYPE.itemsize
        raw = b"".join(
            os.pread(self.file, size * len(part), _place(part)) for part in _parts(first, written)
        )
        self._seen = written
        if len(raw) != (written - first) * size:  # cut short by somebody
            return Seen(np.zeros(0, RECORD_DTYPE), missed=True)
        records = np.frombuffer(raw, RECORD_DTYPE)
        return Seen(records[records["writer"] != self._writer], missed)

    def _written(self) -> int:
        raw = os.pread(self.file, _HEAD.size, 0)
        if len(raw) < _HEAD.size:
            return 0
        magic, version, written = _HEAD.unpack(raw)
        known = (magic, version) == (_MAGIC, _VERSION) and written < MOST_RECORDS
        return int(written) if known else 0

    def _write_head(self, written: int) -> None:
        os.pwrite(self.file, _HEAD.pack(_MAGIC, _VERSION, written), 0)


def _parts(first: int, last: int) -> list[range]:
    """Records `[first, last)`, at most `RECORDS`, as ranges that lie one after another in the ring."""
    turn = min(last, (first // RECORDS + 1) * RECORDS)
    return [part for part in (range(first, turn), range(turn, last)) if part]


def _place(part: range) -> int:
    return _FIRST + part.start % RECORDS * RECORD_DTYPE.itemsize
