"""The page files of a disk tier's folder: found, written, read, removed, for as long as it is there.

A file gets its name when it is complete. It is not synced unless `durable`: after a loss of power a
file may have its name and not its bytes, which its checksum tells, so that it is a miss; a process
that dies, however it dies, loses no file that had its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors import disk_format
from kvcache.connectors.disk_board import Board
from kvcache.connectors.disk_entry import FolderEntry, cannot_use
from kvcache.connectors.disk_scan import FoundPages, scanning
from kvcache.core.errors import ConfigError
from kvcache.core.page_files import PageFiles, page_file_bytes

OPEN_SECONDS = 60.0
"""So long another process may take to open the folder."""

RENEW_SECONDS = 0.5
"""The same, for a folder that was removed under this process: its transfers wait meanwhile."""

PROBE_BYTES = 4096
_REFUSES_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskFolder:
    """One layout in one folder, with everything that has to be open for it.

    For one thread: its maker, then the one that moves pages. What others change after this was made,
    they tell on the `board`.

    Args:
        root: the folder; made where it is not there.
        text: `disk_format.layout_text`.
        role: the part of it that says whose layout it is.
        page_bytes: of each group.
        direct: past the kernel's cache; None: where the file system can.
        durable: files outlive a loss of power.
        threads: files that are written or read at once.
        files: replaces the native reads and writes; for tests.

    Raises:
        ConfigError: a folder that cannot be made, written, or opened in time.
    """

    def __init__(
        self,
        root: Path,
        *,
        text: str,
        role: str = "",
        page_bytes: Sequence[int],
        direct: bool | None,
        durable: bool,
        threads: int,
        files: type[PageFiles] = PageFiles,
    ) -> None:
        self.layout = disk_format.layout_digest(text)
        self._root = root.absolute()
        self._page_bytes = tuple(page_bytes)

        def enter(seconds: float) -> FolderEntry:
            return FolderEntry(
                self._root,
                disk_format.layout_name(role, self.layout),
                text=text,
                groups=len(self._page_bytes),
                durable=durable,
                seconds=seconds,
            )

        def open_files(folder: int, size: int) -> PageFiles:
            return files(
                folder,
                page_bytes=size,
                head_bytes=disk_format.HEAD_DTYPE.itemsize,
                name_bytes=disk_format.FILE_NAME_BYTES,
                direct=self.direct,
                durable=durable,
                threads=threads,
            )

        self._enter: Callable[[float], FolderEntry] = enter
        self._open_files: Callable[[int, int], PageFiles] = open_files
        try:
            self._entry = enter(OPEN_SECONDS)
        except OSError as error:
            raise cannot_use(root, error) from error
        try:
            self.direct = _probe(self._entry.own, self.path, wanted=direct)
            self._files = self._of_groups()
        except OSError as error:
            self.close()
            raise cannot_use(root, error) from error
        except BaseException:
            self.close()
            raise

    def _of_groups(self) -> list[PageFiles]:
        return list(map(self._open_files, self._entry.groups, self._page_bytes))

    @property
    def path(self) -> Path:
        """The folder of the layout."""
        return self._entry.path

    @property
    def board(self) -> Board:
        """Where processes tell each other what changed."""
        return self._entry.board

    # ---- what there is -------------------------------------------------------------------------

    def scanning(self, group: int) -> Generator[None, None, FoundPages]:
        """Every file of a group, in steps."""
        return scanning(self.path / str(group), page_file_bytes(self._page_bytes[group]))

    def scan(self, group: int) -> FoundPages:
        """Every file of a group, at once."""
        steps = self.scanning(group)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: FoundPages = end.value
                return found

    def absent(self, group: int, names: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """For each name whether there is no file. O(names), one `stat` each."""
        out = np.zeros(len(names), np.bool_)
        folder = self._entry.groups[group]
        for i, row in enumerate(disk_format.file_names(names)):
            try:
                os.stat(row.tobytes().rstrip(b"\0"), dir_fd=folder, follow_symlinks=False)
            except OSError:
                out[i] = True
        return out

    def renew(self) -> bool:
        """Enter again where somebody removed the folder, or a part of it. True: it was done.

        What cannot be done now is tried at the next call.
        """
        with suppress(OSError, ConfigError):
            if self._entry.is_whole():
                return False
            before, self._entry = self._entry, self._enter(RENEW_SECONDS)
            self._files = self._of_groups()
            before.close()
            return True
        return False

    def bury(self) -> bool:
        """Sweep up after processes that have died. True: there were some."""
        return self._entry.bury()

    # ---- pages ---------------------------------------------------------------------------------

    def write(
        self,
        group: int,
        names: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Pages to files; outcomes as of `PageFiles.write`."""
        return self._files[group].write(
            self._entry.temporary,
            disk_format.file_names(names),
            self._heads(group, names),
            addresses,
            times,
        )

    def read(
        self,
        group: int,
        names: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Files to pages; outcomes as of `PageFiles.read`."""
        return self._files[group].read(
            disk_format.file_names(names), self._heads(group, names), addresses, times
        )

    def remove(self, group: int, names: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The files are gone, or cannot be removed; outcomes as of `PageFiles.remove`."""
        return self._files[group].remove(disk_format.file_names(names))

    def _heads(self, group: int, names: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return disk_format.heads(self.layout, group, self._page_bytes[group], names)

    def close(self) -> None:
        """Let go of locks and files. Idempotent."""
        self._entry.close()


def _probe(folder: int, path: Path, *, wanted: bool | None) -> bool:
    """Whether files are to be written and read past the cache, tried with one."""
    page = np.zeros(2 * PROBE_BYTES, np.uint8)
    address = np.array([page.ctypes.data // PROBE_BYTES * PROBE_BYTES + PROBE_BYTES], np.uint64)
    name, head = np.frombuffer(b"probe\0\0\0", np.uint8)[None], np.ones((1, 8), np.uint8)
    when = np.zeros(1, np.int64)
    for direct in (True, False) if wanted is None else (wanted,):
        probe = PageFiles(folder, page_bytes=PROBE_BYTES, head_bytes=8, name_bytes=8, direct=direct)
        outcome = int(probe.write("try", name, head, address, when)[0])
        outcome = outcome or int(probe.read(name, head, address, when)[0])
        probe.remove(name)
        if outcome == 0 or outcome in _FULL:
            return direct
        if outcome not in _REFUSES_DIRECT:
            raise OSError(outcome, os.strerror(outcome))
    raise ConfigError(
        f"DiskConnector.direct is {wanted}, and the file system of {path} cannot do that:"
        " leave it out"
    )
