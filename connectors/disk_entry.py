"""One process's stay in the folder of a disk tier: its locks, its own files, and what dead ones left.

    FOLDER/lock                    held while somebody enters
    FOLDER/gone-...                on its way out: a layout that nobody used any more
    FOLDER/ROLE-LAYOUT/            locked, shared, by each process that uses the layout
      layout.txt                   what the layout is, for people
      board                        what processes tell each other (disk_board.py)
      tmp/WRITER/                  files on their way, in a folder that its process keeps locked
      GROUP/ab/abcd...             pages (disk_format.py)

Locks are those of open files, so that they end with their process, however it ends.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from kvcache.connectors.disk_board import Board
from kvcache.connectors.disk_locks import leads_to, lock_now, locked
from kvcache.connectors.forks import mind_forks
from kvcache.core.errors import ConfigError

_LAYOUT_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{32}")
_GONE = "gone-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ADVICE = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOSPC: "make room there, or give another folder",
    errno.EDQUOT: "make room there, or give another folder",
    errno.ENOLCK: "give a folder on a local file system: this one has no locks",
    errno.EOPNOTSUPP: "give a folder on a local file system",
} | dict.fromkeys(
    (errno.ENOTDIR, errno.ELOOP, errno.EEXIST),
    "remove what lies there in place of a folder (links are not followed)",
)


def cannot_use(root: Path, error: OSError) -> ConfigError:
    """What to do about a folder that cannot be used."""
    advice = _ADVICE.get(error.errno or 0, "give a folder that this process may write")
    return ConfigError(f"DiskConnector.folder {root} cannot be used ({error}): {advice}")


class FolderEntry:
    """What is open while a process uses one layout. For one thread at a time.

    Args:
        root: the folder; made where it is not there.
        name: of the layout's folder, `disk_format.layout_name`. Other layouts of the same role that
            nobody uses are removed.
        text: what the layout is.
        groups: how many there are.
        durable: the folders that are made here outlive a loss of power.
        seconds: so long another process may take to enter.

    Raises:
        ConfigError: another process did not get on.
        OSError: a folder that cannot be made or written.
    """

    def __init__(
        self, root: Path, name: str, *, text: str, groups: int, durable: bool, seconds: float
    ) -> None:
        self.path = root / name
        self._writer = secrets.token_hex(8)
        self._open: list[int] = []
        mind_forks(self)
        try:
            new = not root.exists()
            root.mkdir(parents=True, exist_ok=True)
            with locked(root / "lock", seconds):
                self._retire_unused(root)
                self._enter(text, groups)
            if durable:
                for folder in (self.path, root, *([root.parent] if new else [])):
                    _sync(folder)
            for folder in root.glob(f"{_GONE}*"):  # without the lock: it may take a while
                if folder.is_dir() and not folder.is_symlink():  # `rmtree` would wait for a pipe
                    shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            self.close()
            raise

    @property
    def temporary(self) -> str:
        """How names of files on their way begin, seen from the folder of a group."""
        return f"../tmp/{self._writer}/"

    def _retire_unused(self, root: Path) -> None:
        """Other layouts of this role that nobody uses: nothing will ever read them here again.

        Renamed first: if this process is killed while it removes them, the next one goes on.
        """
        role = self.path.name.partition("-")[0]
        for entry in root.glob(f"{role}-*"):
            if entry == self.path or not _LAYOUT_NAME.fullmatch(entry.name):
                continue
            with suppress(OSError):
                folder = os.open(entry, _FOLDER)
                try:
                    if lock_now(folder) and leads_to(entry, folder):
                        entry.rename(root / f"{_GONE}{secrets.token_hex(8)}")
                finally:
                    os.close(folder)

    def _enter(self, text: str, groups: int) -> None:
        users = self._folder(self.path)
        alone = lock_now(users)
        lock_now(users, shared=True)  # under FOLDER/lock nobody else asks for more than this
        self._describe(text)
        self._tmp = self._folder(self.path / "tmp")
        self.own = self._folder(self.path / "tmp" / self._writer)
        lock_now(self.own)
        self.groups = [self._folder(self.path / str(group)) for group in range(groups)]
        self.board = Board(self.path / "board", int(self._writer, 16), fresh=alone)
        self._open.append(self.board.file)
        if self._remove_dead():
            self.board.alarm()
        self._linked = [d for d in self._open if os.fstat(d).st_nlink]  # some systems tell none

    def _describe(self, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(
            OSError
        ):  # a full disk, or something else in its place: it is for people only
            file = os.open(self.path / "layout.txt", flags, 0o600)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)

    def bury(self) -> bool:
        """Sweep up after processes that have died. True: there were some; all others know it.

        What such a one stored last, it may have told nobody.
        """
        with suppress(OSError, ConfigError):  # somebody enters: the next time
            if len(os.listdir(self._tmp)) > 1:  # noqa: PTH208  (a descriptor)
                with locked(self.path.parent / "lock", 0):
                    dead = self._remove_dead()
                if dead:
                    self.board.alarm()
                return dead
        return False

    def _remove_dead(self) -> bool:
        """What writers left that do not hold their folders any more. Under FOLDER/lock.

        Else the folder of one that has not locked it yet would look like it.
        """
        found = False
        for name in os.listdir(self._tmp):  # noqa: PTH208  (a descriptor)
            if name == self._writer:
                continue
            with suppress(OSError):
                descriptor = os.open(name, _FOLDER, dir_fd=self._tmp)
                try:
                    if lock_now(descriptor) and leads_to(name, descriptor, within=self._tmp):
                        shutil.rmtree(name, ignore_errors=True, dir_fd=self._tmp)
                        found = True
                finally:
                    os.close(descriptor)
        return found

    def _folder(self, path: Path) -> int:
        """Made where it is not there. A link would lead to what is somebody else's: an `OSError`."""
        path.mkdir(mode=0o700, exist_ok=True)
        self._open.append(os.open(path, _FOLDER))
        return self._open[-1]

    def is_whole(self) -> bool:
        """Whether all that is open is still there: somebody may have removed it."""
        return all(os.fstat(descriptor).st_nlink for descriptor in self._linked)

    def close(self) -> None:
        """Let go of locks and files. Idempotent.

        Who could not tell the others what it did leaves as the dead do: they will look for it.
        """
        if hasattr(self, "own"):  # by descriptors: the folder may have another name by now
            with suppress(OSError):
                for name in os.listdir(self.own):  # noqa: PTH208  (a descriptor)
                    os.unlink(name, dir_fd=self.own)
                if not hasattr(self, "board") or self.board.tell():
                    os.rmdir(self._writer, dir_fd=self._tmp)
            del self.own
        while self._open:
            os.close(self._open.pop())

    def after_fork(self) -> None:
        """In a forked child: what it kept open would keep its parent's locks, after that one's death."""
        if hasattr(self, "own"):
            del self.own
        self.close()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
