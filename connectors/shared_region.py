"""A named region of host memory that processes of one user share: made, attached to, and removed.

    FOLDER/lock                 held while somebody attaches or leaves
    FOLDER/NAME/region          tables, then pages (csrc/shared_pool.h); as large as it says from the start;
                                each user has a byte of it locked (shared_users.py)

A region without a living user is stale: whoever attaches next, under whatever name, removes it. The
last user that leaves removes its own, if it still has its name. Memory of the region is reserved chunk by chunk before it is
touched, so that a full /dev/shm is an error and no SIGBUS.

Folders are readable for their owner alone, and refused where they are somebody else's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvcache.connectors.base import PageRegion
from kvcache.connectors.disk_locks import leads_to, locked
from kvcache.connectors.host_pool import place
from kvcache.connectors.pool_chunks import PoolChunks, require_room
from kvcache.connectors.shared_users import UserLocks, is_used
from kvcache.core import memory_calls
from kvcache.core.errors import ConfigError
from kvcache.core.host_limits import (
    require_file_huge_pages,
    require_file_space,
    require_lockable,
    require_memory,
    require_node,
)
from kvcache.core.shared_pool import MOST_USERS, SharedTables, format_region, region_layout
from kvcache.core.values import shown

SHM = Path("/dev/shm")  # noqa: S108  (a folder of our own in it, see `_own`)
OPEN_SECONDS = 30.0
"""So long another process may take to attach: it reserves the tables."""

BUSY_SECONDS = 5.0
"""So long others may have the lock of the tables, one after another, while a process attaches."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SharedRegion:
    """One attachment. `tables`, `regions` and `chunks` are valid until `close`.

    Args:
        folder: for regions alone; made where it is not there.
        name: of the region: letters, digits, `.`, `_`, `-`.
        slots, page_bytes: of each group; equal for all users.
        layout: 32 bytes that say what the pages are; equal for all users.
        setting: what asked for so much, for messages.
        lock: keep it from being swapped, within RLIMIT_MEMLOCK.
        huge_pages: True: the folder's file system must take them; None: where it does; False: none.
        numa_node: where memory that is not there yet comes from, as long as there is some.

    Raises:
        ConfigError: a region of another kind or size, a limit, a folder that is not this user's, or
            too many users.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        *,
        slots: Sequence[int],
        page_bytes: Sequence[int],
        layout: bytes,
        setting: str,
        lock: bool = False,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        seed: int | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"SharedConnector.name is {shown(name)}: give up to 64 letters, digits, '.', '_' or '-',"
                " a letter or digit first"
            )
        self._folder = SHM / f"kvcache-{os.geteuid()}" if folder is None else folder
        self.path = self._folder / name
        self._memory = -1
        self._locks: UserLocks | None = None
        self._mapping: mmap.mmap | None = None
        layout_of = region_layout(slots, page_bytes)
        tables, total = layout_of.tables_bytes, layout_of.total_bytes
        self.tables_bytes, self.mapped_bytes = tables, total
        if lock:
            require_lockable(setting, total - tables)
        try:
            _own(self._folder)
            if huge_pages:
                require_file_huge_pages("SharedConnector.huge_pages", self._folder)
            if numa_node is not None:
                require_node("SharedConnector.numa_node", numa_node, 0)
            with locked(self._folder / "lock", OPEN_SECONDS):
                self._remove_stale()
                self._attach(setting, slots, page_bytes, layout, seed)
            self._back(huge_pages, numa_node)
        except OSError as error:
            self._drop()
            raise ConfigError(
                f"the shared region {self.path} cannot be used ({error}): give a folder that this"
                " user may write, in memory (a tmpfs such as /dev/shm)"
            ) from error
        except BaseException:
            self._drop()
            raise
        base = self._address()
        self.regions = tuple(
            PageRegion(base + at, size, count)
            for at, size, count in zip(layout_of.pages_at, page_bytes, slots, strict=True)
        )
        memory = self._memory

        def is_there(address: int, size_bytes: int) -> bool:
            at = address - base
            return os.lseek(memory, at, os.SEEK_HOLE) >= at + size_bytes

        def make_ready(address: int, size_bytes: int) -> None:
            if not is_there(address, size_bytes):
                require_room(size_bytes)
            os.posix_fallocate(memory, address - base, size_bytes)
            memory_calls.populate(address, size_bytes)
            if lock:
                memory_calls.lock(address, size_bytes)

        self.chunks = PoolChunks(self.regions, make_ready, is_there)

    # ---- attaching, under FOLDER/lock ----------------------------------------------------------

    def _attach(
        self,
        setting: str,
        slots: Sequence[int],
        page_bytes: Sequence[int],
        layout: bytes,
        seed: int | None,
    ) -> None:
        fresh = not os.path.lexists(self.path / "region")
        if fresh:
            require_file_space(setting, self._folder, self.mapped_bytes)
            require_memory(setting, self.mapped_bytes)
            self.path.mkdir(mode=0o700, exist_ok=True)
        _own(self.path)
        file = self.path / "region"
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if fresh else 0
        self._memory = os.open(file, flags, 0o600)
        if fresh:
            os.ftruncate(self._memory, self.mapped_bytes)
            os.posix_fallocate(self._memory, 0, self.tables_bytes)
        _own_file(self._memory, file)
        self._locks = UserLocks(file, self._leave_child)
        if not (leads_to(file, self._memory) and self._locks.lead_from(file)):
            raise ConfigError(self._misfit("somebody removed it at this moment"))
        self.user = self._be_a_user(self._locks)
        length = os.fstat(self._memory).st_size
        if length < self.tables_bytes:  # not even tables: another geometry, or cut short
            raise ConfigError(
                self._misfit(f"it has {length} bytes, {self.mapped_bytes} are asked for")
            )
        self._mapping = mmap.mmap(self._memory, length, flags=mmap.MAP_SHARED)
        if fresh:
            format_region(
                self._address(),
                length,
                slots,
                page_bytes,
                layout=layout,
                seed=secrets.randbits(64) if seed is None else seed,
            )
        try:
            self.tables = SharedTables(
                self._address(), length, slots, page_bytes, layout=layout, user=self.user
            )
        except ConfigError as error:
            raise ConfigError(self._misfit(str(error))) from None
        # A number that was used before: its last user may have died since.
        end = time.monotonic() + BUSY_SECONDS
        while not self.tables.forget(self.user):
            if time.monotonic() > end:
                raise ConfigError(
                    self._misfit(
                        "a process that uses it is stopped and holds its lock: let it go on, or end it"
                    )
                )

    def _back(self, huge_pages: bool | None, numa_node: int | None) -> None:  # noqa: FBT001
        assert self._mapping is not None
        with suppress(OSError):  # a kernel, or a file system, without them
            wanted = mmap.MADV_NOHUGEPAGE if huge_pages is False else mmap.MADV_HUGEPAGE
            self._mapping.madvise(wanted)
        if numa_node is not None:
            place("SharedConnector.numa_node", numa_node, self._address(), len(self._mapping))

    def _misfit(self, why: str) -> str:
        return (
            f"the shared region {self.path} is in use and cannot be shared: {why}. Give the same"
            " geometry, capacity and fingerprint as its other users, or another name"
        )

    def _be_a_user(self, locks: UserLocks) -> int:
        """The lowest number that no living process has, taken from now on."""
        for user in range(MOST_USERS):
            if locks.take(user):
                return user
        raise ConfigError(self._misfit(f"it has {MOST_USERS} users, and no room for more"))

    def _address(self) -> int:
        assert self._mapping is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    # ---- the dead ------------------------------------------------------------------------------

    def _remove_stale(self) -> None:
        """Regions of this folder that no living process uses."""
        for entry in list(self._folder.iterdir()):
            if _is_region(entry) and not is_used(entry / "region"):
                _remove(entry)

    def bury(self) -> int:
        """Takes back what dead users hold. How many there were. For the copying thread."""
        locks, buried = self._locks, 0
        if locks is None:
            return 0
        known = self.tables.users()
        for user in range(MOST_USERS):
            if user == self.user or not known >> user & 1:
                continue
            with suppress(OSError):
                if locks.take(user):  # a process that comes now takes another number
                    try:
                        buried += self.tables.forget(user)
                    finally:
                        locks.give_back(user)
        return buried

    # ---- leaving -------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything that is held here; remove the region if nobody else uses it. Idempotent.

        Where a chunk is still being made ready, after a long wait, the memory stays mapped.
        """
        if self._mapping is None:
            return
        idle = self.chunks.close()
        locks = self._locks
        if locks is not None:  # else a forked child's
            self.tables.forget(self.user)
            self.tables.detach()
            with suppress(OSError, ConfigError), locked(self._folder / "lock", OPEN_SECONDS):
                if locks.lead_from(self.path / "region") and not locks.others():
                    _remove(self.path)
                self._let_go()
            self._let_go()
        if idle:
            self._drop()

    def _let_go(self) -> None:
        """No user any more."""
        if self._locks is not None:
            self._locks.close()
            self._locks = None

    def _leave_child(self) -> None:
        """A child has no tier: it may close it, and nothing of its parent's is touched."""
        self._locks = None
        if hasattr(self, "tables"):
            self.tables.abandon()

    def _drop(self) -> None:
        self._let_go()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _own(folder: Path) -> None:
    """The folder is this user's, and nobody else may look into it; made where it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"{folder} is no folder: remove it, or give another one")
    _require_own(about, folder)


def _own_file(descriptor: int, path: Path) -> None:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{path} is no file: remove it, or give another name")
    _require_own(about, path)


def _require_own(about: os.stat_result, path: Path) -> None:
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"{path} belongs to user {about.st_uid} with mode {about.st_mode & 0o777:o}: it must be"
            f" user {os.geteuid()}'s alone (chmod go-rwx), as who may write there can give wrong"
            " bytes; give another folder or name"
        )


def _is_region(path: Path) -> bool:
    """A folder with the file of a region, and no other: whatever else somebody keeps here stays."""
    if path.is_symlink() or not path.is_dir():
        return False
    return [entry.name for entry in path.iterdir()] == ["region"]


def _remove(path: Path) -> None:
    """Whoever has it mapped keeps the memory."""
    with suppress(OSError):
        (path / "region").unlink()
        path.rmdir()
