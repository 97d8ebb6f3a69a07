"""Slots that several processes share: the tables in a mapped region, each group of them as a `Pool`.

A namespace's number is the namespace, as a whole number of 32 bytes. What does not get the region's
lock in time raises `PoolBusyError` where it asks, takes less where it takes, and is done before the next
call that gets the lock where it gives keys, drops them, or lets go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.pool import POOL_EVENT_DTYPE, Pool, PoolBusyError
from kvcache.core.records import PoolStats

MOST_USERS = 64
"""Attachments of one region at a time."""

_BUSY, _PAUSED = 2, 3


class SharedStats(NamedTuple):
    """The slots of one group, as all processes use them."""

    capacity: int
    created: int
    mine: int
    used: int
    held: int
    keyed: int
    evictions: int
    recoveries: int


class RegionLayout(NamedTuple):
    """Where in a region what is."""

    pages_at: tuple[int, ...]
    """Where the pages of each group begin."""
    total_bytes: int

    @property
    def tables_bytes(self) -> int:
        """Before the pages: bookkeeping of all groups."""
        return self.pages_at[0]


def region_layout(slots: Sequence[int], page_bytes: Sequence[int]) -> RegionLayout:
    """Of a region with so many slots of each group."""
    ffi, lib = native.load()
    at, total = ffi.new("int64_t[]", len(slots)), ffi.new("int64_t*")
    native.call(lib.kvc_shared_layout, len(slots), *_sizes(slots, page_bytes), at, total)
    return RegionLayout(tuple(at), int(total[0]))


def format_region(
    address: int,
    size_bytes: int,
    slots: Sequence[int],
    page_bytes: Sequence[int],
    *,
    layout: bytes,
    seed: int,
) -> None:
    """Tables in memory that is all zeros and that nobody else uses yet."""
    ffi, lib = native.load()
    native.call(
        lib.kvc_shared_format,
        ffi.cast("uint8_t*", address),
        size_bytes,
        len(slots),
        *_sizes(slots, page_bytes),
        layout,
        seed,
    )


def _sizes(slots: Sequence[int], page_bytes: Sequence[int]) -> tuple[Any, Any]:
    ffi, _ = native.load()
    return ffi.new("int64_t[]", list(slots)), ffi.new("int64_t[]", list(page_bytes))


class SharedTables:
    """One user of a region: its pools, and its copies.

    `pools` and what they do is for one thread; `store`, `load` and `forget` for one other.

    Raises:
        ConfigError: the region was made for something else; the message says for what.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        slots: Sequence[int],
        page_bytes: Sequence[int],
        *,
        layout: bytes,
        user: int,
    ) -> None:
        self._ffi, self._lib = native.load()
        out = self._ffi.new("kvc_shared**")
        native.call(
            self._lib.kvc_shared_new,
            self._ffi.cast("uint8_t*", address),
            size_bytes,
            len(slots),
            *_sizes(slots, page_bytes),
            layout,
            user,
            out,
        )
        self._native = self._ffi.gc(out[0], self._lib.kvc_shared_free)
        self.user = user
        self.busy = 0
        """Calls that did not get the lock in time."""
        self._using = threading.Lock()
        self.pools = [SharedPool(self, group, n) for group, n in enumerate(slots)]

    # ---- for the pools -------------------------------------------------------------------------

    def call(self, function: Any, *args: Any) -> int:
        """The status, zero or above: that of a call that did not get the lock in time is counted."""
        with self._using:
            status = native.call(function, self._native, *args)
        self.busy += status in {_BUSY, _PAUSED}
        return status

    # ---- for the copying thread ----------------------------------------------------------------

    def store(
        self,
        group: int,
        addresses: NDArray[np.uint64],
        slots: NDArray[np.int32],
        names: NDArray[np.uint8],
        *,
        threads: int = 1,
    ) -> None:
        """Pages at these addresses into slots that are held, each with its checksum."""
        native.call(
            self._lib.kvc_shared_store,
            self._native,
            group,
            *self._copy(addresses, slots, names),
            threads,
        )

    def load(
        self,
        group: int,
        addresses: NDArray[np.uint64],
        slots: NDArray[np.int32],
        names: NDArray[np.uint8],
        *,
        threads: int = 1,
    ) -> NDArray[np.uint8]:
        """Slots that are held to pages at these addresses; 1 where the right bytes have arrived."""
        ok = np.zeros(len(slots), np.uint8)
        native.call(
            self._lib.kvc_shared_load,
            self._native,
            group,
            *self._copy(addresses, slots, names),
            threads,
            self._ffi.from_buffer("uint8_t[]", ok),
        )
        return ok

    def _copy(
        self,
        addresses: NDArray[np.uint64],
        slots: NDArray[np.int32],
        names: NDArray[np.uint8],
    ) -> tuple[Any, ...]:
        pages = arrays.flat(addresses, np.uint64, "addresses")
        held = arrays.flat(slots, np.int32, "slots")
        rows = np.ascontiguousarray(names, np.uint8)
        if len(pages) != len(held) or rows.shape != (len(held), 64):
            raise ConfigError(
                f"{len(pages)} pages, {len(held)} slots, names {rows.shape}: one each"
            )
        return (
            self._ffi.from_buffer("uint64_t[]", pages),
            self._ffi.from_buffer("int32_t[]", held),
            self._ffi.from_buffer("uint8_t[]", rows),
            len(held),
        )

    def detach(self) -> None:
        """The region will be unmapped: from now on nothing is found, and nobody looks there."""
        with self._using:
            native.call(self._lib.kvc_shared_detach, self._native)

    def abandon(self) -> None:
        """As `detach`, in a forked child: another thread may have been in a call at that time."""
        self._using = threading.Lock()
        with suppress(MisuseError):
            self.detach()

    def users(self) -> int:
        """A bit for each user that came and was not forgotten since."""
        out = self._ffi.new("uint64_t*")
        native.call(self._lib.kvc_shared_users, self._native, out)
        return int(out[0])

    def forget(self, user: int) -> bool:
        """A user that is dead, or this one at its end, holds nothing any more. False: not now."""
        return native.call(self._lib.kvc_shared_forget, self._native, user) != _BUSY


class SharedPool(Pool):
    """The slots of one group, which others use too. Keeps no events."""

    def __init__(self, tables: SharedTables, group: int, capacity: int) -> None:
        self._ffi, self._lib = native.load()
        self.capacity = capacity
        self._tables = tables
        self._group = group
        self._stats = SharedStats(capacity, 0, 0, 0, 0, 0, 0, 0)

    @property
    def version(self) -> int:
        """Changes whenever a key appears or goes, whoever does it; 0 at the end. Takes no lock."""
        out = self._ffi.new("uint64_t*")
        self._call(self._lib.kvc_shared_version, out)
        return int(out[0])

    def present(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As `Pool.present`; raises `PoolBusyError`."""
        rows, out = _rows(digests), np.zeros(len(digests), np.uint8)
        self._ask(
            self._lib.kvc_shared_present,
            *self._keys(namespace, rows),
            self._ffi.from_buffer("uint8_t[]", out),
        )
        return out

    def acquire(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.int32]:
        """As `Pool.acquire`; raises `PoolBusyError`. What is held here nobody evicts."""
        rows, out = _rows(digests), np.full(len(digests), -1, np.int32)
        self._ask(
            self._lib.kvc_shared_acquire,
            *self._keys(namespace, rows),
            self._ffi.from_buffer("int32_t[]", out),
        )
        return out

    def acquire_held(
        self, namespace: int, digests: NDArray[np.uint8], pages: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """As `acquire`, of pages that are held here: takes no lock.

        O(digests + pages) where both are in one order; -1 also where they are not.
        """
        rows, out = _rows(digests), np.full(len(digests), -1, np.int32)
        held = arrays.flat(pages, np.int32, "pages")
        self._call(
            self._lib.kvc_shared_acquire_held,
            *self._keys(namespace, rows),
            self._ffi.from_buffer("int32_t[]", held),
            len(held),
            self._ffi.from_buffer("int32_t[]", out),
        )
        return out

    def take(self, count: int) -> NDArray[np.int32]:
        """As `Pool.take`; what anybody holds is not taken."""
        out = np.empty(max(0, min(count, self.capacity)), np.int32)
        taken = self._ffi.new("int64_t*")
        buffer = self._ffi.from_buffer("int32_t[]", out)
        self._call(self._lib.kvc_shared_take, len(out), buffer, taken)
        return out[: taken[0]]

    def publish(
        self, namespace: int, digests: NDArray[np.uint8], pages: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        """As `Pool.publish`: 0 also where another process was first."""
        rows = np.ascontiguousarray(_rows(digests))
        held = arrays.flat(pages, np.int32, "pages")
        if len(rows) != len(held):
            raise ConfigError(f"{len(rows)} keys for {len(held)} pages: one each")
        out = np.zeros(len(rows), np.uint8)
        self._call(
            self._lib.kvc_shared_publish,
            _space(namespace),
            self._ffi.from_buffer("uint8_t[]", rows),
            self._ffi.from_buffer("int32_t[]", held),
            len(rows),
            self._ffi.from_buffer("uint8_t[]", out),
        )
        return out

    def unpublish(self, page: int) -> None:
        """As `Pool.unpublish`."""
        self._call(self._lib.kvc_shared_unpublish, page)

    def release(self, pages: NDArray[np.int32]) -> None:
        """As `Pool.release`; for this user alone."""
        held = arrays.flat(pages, np.int32, "pages")
        self._call(
            self._lib.kvc_shared_release, self._ffi.from_buffer("int32_t[]", held), len(held)
        )

    def _keys(self, namespace: int, rows: NDArray[np.uint8]) -> tuple[Any, ...]:
        first = self._ffi.cast("uint8_t*", rows.ctypes.data)
        return _space(namespace), first, max(rows.strides[0], 32), len(rows)

    def _call(self, function: Any, *args: Any) -> int:
        return self._tables.call(function, self._group, *args)

    def _ask(self, function: Any, *args: Any) -> None:
        status = self._call(function, *args)
        if status:
            raise PoolBusyError(soon=status == _BUSY)

    def take_events(self) -> NDArray[np.void]:
        """None are kept."""
        return np.empty(0, POOL_EVENT_DTYPE)

    def shared_stats(self) -> SharedStats:
        """What could be read last; `mine` and `evictions` are those of now."""
        out = self._ffi.new("kvc_shared_stats*")
        busy = self._call(self._lib.kvc_shared_get_stats, out)
        now = SharedStats(*(getattr(out, name) for name in SharedStats._fields))
        if busy:
            now = self._stats._replace(mine=now.mine, evictions=now.evictions)
        self._stats = now
        return now

    def stats(self) -> PoolStats:
        """`held` is what this user holds; what others hold counts as cached."""
        s = self.shared_stats()
        free = s.created - s.used
        return PoolStats(s.capacity, s.created, free, s.used - s.mine, s.mine, s.keyed, s.evictions)

    def check(self) -> None:
        """Raise `InvariantError` if the tables disagree. O(slots), under the lock."""
        self._call(self._lib.kvc_shared_check)


def _space(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _rows(digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = arrays.keys(digests, "digests")
    if len(rows) and (rows.strides[1] != 1 or rows.strides[0] < 32):
        return np.ascontiguousarray(rows)
    return rows
