"""The same bytes moved plainly: memory to memory in one piece, and through one file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from kvcache.core.errors import ConfigError


class PlainCopies:
    """`size_bytes` of random bytes, and a path where a file may be.

    Raises:
        ConfigError: there is no memory for it, or the file cannot be written or read.
    """

    def __init__(self, size_bytes: int, path: Path) -> None:
        self._path = path
        try:
            self._source = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
            self._target = np.zeros(size_bytes, np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"no memory for {size_bytes} bytes: lower --size or --count"
            ) from error

    def round(self) -> dict[str, float]:
        """Seconds of one copy of each kind. The file is written and synced; then read cold."""
        seconds = {}
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        seconds["memcpy"] = time.perf_counter() - begin
        try:
            begin = time.perf_counter()
            with self._path.open("wb", buffering=0) as file:
                self._write(file.fileno())
            seconds["file_write"] = time.perf_counter() - begin
            begin = time.perf_counter()
            with self._path.open("rb", buffering=0) as file:
                self._read(file.fileno())
            seconds["file_read"] = time.perf_counter() - begin
        except OSError as error:
            raise ConfigError(f"{self._path} in --folder: {error.strerror}") from error
        finally:
            self._path.unlink(missing_ok=True)
        if not np.array_equal(self._source, self._target):
            raise ConfigError(f"{self._path} in --folder gave other bytes than were written")
        return seconds

    def _write(self, file: int) -> None:
        view, done = self._source.data, 0
        while done < len(view):
            done += os.write(file, view[done:])
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(self, file: int) -> None:
        view, done = self._target.data, 0
        while done < len(view):
            got = os.readv(file, [view[done:]])
            if not got:
                break
            done += got
