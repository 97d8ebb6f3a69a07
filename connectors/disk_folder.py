"""The folder of a disk tier: opened by several processes at once, cleaned after those that died.

    FOLDER/lock                      held while somebody opens the folder
    FOLDER/LAYOUT/layout.txt         what the layout is, for people
    FOLDER/LAYOUT/users              locked, shared, by each process that uses the layout
    FOLDER/LAYOUT/board              what processes tell each other (disk_board.py)
    FOLDER/LAYOUT/tmp/WRITER/        files on their way, in a folder that its process keeps locked
    FOLDER/LAYOUT/GROUP/ab/abcd...   pages (disk_format.py)

A file gets its name when it is complete. It is not synced unless `durable`: after a loss of power a
file may have its name and not its bytes, which its checksum tells, so that it is a miss; a process
that dies, however it dies, loses no file that had its name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors import disk_format
from kvcache.connectors.disk_board import Board
from kvcache.connectors.disk_locks import lock_now, locked
from kvcache.core.errors import ConfigError
from kvcache.core.page_files import PageFiles, page_file_bytes

OPEN_SECONDS = 60.0
"""So long another process may take to open the folder: it reads the names of all files."""

PROBE_BYTES = 4096
_REFUSES_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LAYOUT_NAME = re.compile(r"[0-9a-f]{32}")


class FoundPages(NamedTuple):
    """Files of one group, the oldest first."""

    names: NDArray[np.uint8]
    """`[n, 64]`, as `Transfer.names`."""
    damaged: int
    """Files of another length: removed."""


class DiskFolder:
    """One layout in one folder, with everything that has to be open for it.

    `scan` is for its maker, before the thread starts that uses the rest. What others change after
    this was made, they tell on the `board`.

    Args:
        root: the folder; made where it is not there.
        layout: `disk_format.layout_text`.
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
        layout: str,
        page_bytes: Sequence[int],
        direct: bool | None,
        durable: bool,
        threads: int,
        files: type[PageFiles] = PageFiles,
    ) -> None:
        self.layout = disk_format.layout_digest(layout)
        self.path = root / self.layout.hex()[:32]
        self._page_bytes = tuple(page_bytes)
        self._open: list[int] = []
        self._writer = secrets.token_hex(8)
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root / "lock", OPEN_SECONDS):
                self._remove_unused(root)
                self._enter(layout)
            self.direct = self._probe(wanted=direct)
            self._files = [
                files(
                    self._descriptor(self.path / str(group)),
                    page_bytes=size,
                    head_bytes=disk_format.HEAD_DTYPE.itemsize,
                    name_bytes=disk_format.FILE_NAME_BYTES,
                    direct=self.direct,
                    durable=durable,
                    threads=threads,
                )
                for group, size in enumerate(page_bytes)
            ]
        except OSError as error:
            self.close()
            raise ConfigError(
                f"DiskConnector.folder {root} cannot be used ({error}): give a folder that this"
                " process may write"
            ) from error
        except BaseException:
            self.close()
            raise

    # ---- opening -------------------------------------------------------------------------------

    def _remove_unused(self, root: Path) -> None:
        """Other layouts that nobody uses: nothing will ever read them here again."""
        for entry in root.iterdir():
            if entry == self.path or not _LAYOUT_NAME.fullmatch(entry.name):
                continue
            with suppress(OSError):
                users = os.open(entry / "users", os.O_RDWR | os.O_CLOEXEC)
                try:
                    if lock_now(users):
                        shutil.rmtree(entry, ignore_errors=True)
                finally:
                    os.close(users)

    def _enter(self, layout: str) -> None:
        folders = [self.path, self.path / "tmp", self.path / "tmp" / self._writer]
        for folder in (*folders, *(self.path / str(g) for g in range(len(self._page_bytes)))):
            folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # a full disk: it is for people only
            (self.path / "layout.txt").write_text(layout)
        users = self._descriptor(self.path / "users", os.O_RDWR | os.O_CREAT)
        alone = lock_now(users)
        lock_now(users, shared=True)  # under FOLDER/lock nobody else asks for more than this
        lock_now(self._descriptor(folders[-1]))
        for folder in (self.path / "tmp").iterdir():
            self._remove_dead(folder)
        self.board = Board(self.path / "board", int(self._writer, 16), fresh=alone)
        self._open.append(self.board.file)

    def _remove_dead(self, folder: Path) -> None:
        """What a writer left that does not hold its folder any more."""
        if folder.name == self._writer:
            return
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if lock_now(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)

    def _descriptor(self, path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> int:
        self._open.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        return self._open[-1]

    def _probe(self, *, wanted: bool | None) -> bool:
        """Whether files are to be written and read past the cache, tried with one."""
        folder = self._descriptor(self.path / "tmp" / self._writer)
        page = np.zeros(2 * PROBE_BYTES, np.uint8)
        address = np.array([page.ctypes.data // PROBE_BYTES * PROBE_BYTES + PROBE_BYTES], np.uint64)
        name, head = np.frombuffer(b"probe\0\0\0", np.uint8)[None], np.ones((1, 8), np.uint8)
        when = np.zeros(1, np.int64)
        for direct in (True, False) if wanted is None else (wanted,):
            probe = PageFiles(
                folder, page_bytes=PROBE_BYTES, head_bytes=8, name_bytes=8, direct=direct
            )
            outcome = int(probe.write("try", name, head, address, when)[0])
            outcome = outcome or int(probe.read(name, head, address, when)[0])
            probe.remove(name)
            if outcome == 0 or outcome in _FULL:
                return direct
            if outcome not in _REFUSES_DIRECT:
                raise OSError(outcome, os.strerror(outcome))
        raise ConfigError(
            f"DiskConnector.direct is {wanted}, and the file system of {self.path} cannot do that:"
            " leave it out"
        )

    # ---- what there is -------------------------------------------------------------------------

    def scan(self, group: int) -> FoundPages:
        """Every file of a group that is as long as it must be. O(files), one `stat` each."""
        found: list[tuple[int, bytes]] = []
        damaged = 0
        length = page_file_bytes(self._page_bytes[group])
        for folder in os.scandir(self.path / str(group)):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                name = disk_format.name_of_file(entry.name)
                if name is None:
                    continue
                with suppress(OSError):  # removed by another process
                    about = entry.stat(follow_symlinks=False)
                    if about.st_size == length:
                        found.append((about.st_mtime_ns, name))
                        continue
                    Path(entry.path).unlink()
                    damaged += 1
        found.sort()
        names = np.frombuffer(b"".join(name for _, name in found), np.uint8)
        return FoundPages(names.reshape(-1, 64), damaged)

    # ---- on the copy thread --------------------------------------------------------------------

    def write(
        self,
        group: int,
        names: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
        times: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Pages to files; outcomes as of `PageFiles.write`."""
        return self._files[group].write(
            f"../tmp/{self._writer}/",
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

    def remove(self, group: int, names: NDArray[np.uint8]) -> None:
        """The files are gone, or cannot be removed: then the next start finds them."""
        self._files[group].remove(disk_format.file_names(names))

    def _heads(self, group: int, names: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return disk_format.heads(self.layout, group, self._page_bytes[group], names)

    def close(self) -> None:
        """Let go of locks and files. Idempotent."""
        shutil.rmtree(self.path / "tmp" / self._writer, ignore_errors=True)
        while self._open:
            os.close(self._open.pop())
