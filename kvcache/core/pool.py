"""A pool of numbered pages with an index from key to page: what a tier keeps its slots in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.errors import ConfigError
from kvcache.core.records import PoolStats
from kvcache.core.values import index_seed, whole

__all__ = [
    "POOL_EVENT_DTYPE",
    "POOL_LOST",
    "POOL_REMOVED",
    "POOL_STORED",
    "PagePool",
    "Pool",
    "PoolStats",
]

POOL_EVENT_DTYPE = np.dtype([("kind", "<i4"), ("ns", "<u4"), ("digest", ("u1", 32))])
"""A key that became findable or went, as `kvc_pool_event` of the C header has it."""

POOL_STORED, POOL_REMOVED, POOL_LOST = 1, 2, 3
"""Kinds of `POOL_EVENT_DTYPE`. Lost: comes first, in place of all that waited for too long."""


class PoolBusyError(Exception):
    """Another process has the lock of a pool: nothing was done, and nothing is known.

    Args:
        soon: whether it is worth asking again at once; False: it was not to be had several times in
            a row.
    """

    def __init__(self, *, soon: bool) -> None:
        super().__init__("another process has the lock of the pool")
        self.soon = soon


class Pool(ABC):
    """What a tier keeps its slots in, of one process or of several."""

    capacity: int

    @property
    @abstractmethod
    def version(self) -> int:
        """Changes whenever a key appears or goes: equal version, equal answers."""

    @abstractmethod
    def present(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """For each digest 1 where it is indexed. Changes nothing. O(n)."""

    @abstractmethod
    def acquire(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The page of each digest with one more reference, which the caller releases; or -1."""

    @abstractmethod
    def take(self, count: int) -> NDArray[np.int32]:
        """Up to `count` pages without a key, one reference each; evicts cached pages, LRU first."""

    @abstractmethod
    def publish(
        self, namespace: int, digests: NDArray[np.uint8], pages: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        """Give each held page its key; 0 where the key is on another page: that page gets none."""

    @abstractmethod
    def unpublish(self, page: int) -> None:
        """Drop the key of a page, if it has one: it will not be found again."""

    @abstractmethod
    def release(self, pages: NDArray[np.int32]) -> None:
        """Drop one reference of each page, all or none; the first becomes the first LRU victim."""

    @abstractmethod
    def take_events(self) -> NDArray[np.void]:
        """Keys that became findable or went since the last call, `[n]` of `POOL_EVENT_DTYPE`."""

    @abstractmethod
    def stats(self) -> PoolStats:
        """Pages by state. O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantError` if lists, index and references disagree. O(pages)."""


class PagePool(Pool):
    """Pages that are free, held (references) or cached (a key, no reference: evictable, LRU).

    A key is a namespace number and a 32-byte digest. Digests come as `[n, 32]` arrays of bytes
    whose rows may lie apart (a column of a record array, every second link of a chain): they are
    read in place. One thread at a time; two at once raise `MisuseError`.

    Args:
        capacity: pages that may exist.
        seed: of the index's hash function; None: a random one, as in `Manager`.
        journal: events that may wait for `take_events`, 40 bytes each; 0: none are kept.
    """

    def __init__(self, capacity: int, *, seed: int | None = None, journal: int = 0) -> None:
        self._ffi, self._lib = native.load()
        self.capacity = whole(capacity, "PagePool.capacity")
        out = self._ffi.new("kvc_pool**")
        native.call(self._lib.kvc_pool_new, self.capacity, index_seed(seed, "PagePool.seed"), out)
        self._native = self._ffi.gc(out[0], self._lib.kvc_pool_free)
        native.call(self._lib.kvc_pool_journal, self._native, whole(journal, "PagePool.journal"))

    @property
    def version(self) -> int:
        """As `Pool.version`."""
        version = int(self._lib.kvc_pool_version(self._native))
        if not version:
            native.fail(-3)
        return version

    def present(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As `Pool.present`."""
        rows = _rows(digests)
        out = np.zeros(len(rows), np.uint8)
        native.call(
            self._lib.kvc_pool_present,
            self._native,
            namespace,
            self._ffi.cast("uint8_t*", rows.ctypes.data),
            _stride(rows),
            len(rows),
            self._ffi.from_buffer("uint8_t[]", out),
        )
        return out

    def acquire(self, namespace: int, digests: NDArray[np.uint8]) -> NDArray[np.int32]:
        """As `Pool.acquire`."""
        rows = _rows(digests)
        out = np.full(len(rows), -1, np.int32)
        native.call(
            self._lib.kvc_pool_acquire,
            self._native,
            namespace,
            self._ffi.cast("uint8_t*", rows.ctypes.data),
            _stride(rows),
            len(rows),
            self._ffi.from_buffer("int32_t[]", out),
        )
        return out

    def take(self, count: int) -> NDArray[np.int32]:
        """As `Pool.take`."""
        count = whole(count, "the count of pages to take")
        out = np.empty(max(0, min(count, self.capacity)), np.int32)
        taken = self._ffi.new("int64_t*")
        native.call(
            self._lib.kvc_pool_take,
            self._native,
            count,
            self._ffi.from_buffer("int32_t[]", out),
            taken,
        )
        return out[: taken[0]]

    def publish(
        self, namespace: int, digests: NDArray[np.uint8], pages: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        """As `Pool.publish`."""
        rows = np.ascontiguousarray(_rows(digests))
        held = arrays.flat(pages, np.int32, "pages")
        if len(rows) != len(held):
            raise ConfigError(f"{len(rows)} keys for {len(held)} pages: one each")
        out = np.zeros(len(rows), np.uint8)
        native.call(
            self._lib.kvc_pool_publish,
            self._native,
            namespace,
            self._ffi.from_buffer("uint8_t[]", rows),
            self._ffi.from_buffer("int32_t[]", held),
            len(rows),
            self._ffi.from_buffer("uint8_t[]", out),
        )
        return out

    def unpublish(self, page: int) -> None:
        """As `Pool.unpublish`."""
        native.call(self._lib.kvc_pool_unpublish, self._native, page)

    def release(self, pages: NDArray[np.int32]) -> None:
        """As `Pool.release`."""
        rows = arrays.flat(pages, np.int32, "pages")
        native.call(
            self._lib.kvc_pool_release,
            self._native,
            self._ffi.from_buffer("int32_t[]", rows),
            len(rows),
        )

    def take_events(self) -> NDArray[np.void]:
        """Keys that became findable or went since the last call, `[n]` of `POOL_EVENT_DTYPE`.

        In order. One `POOL_LOST` first where more waited than `journal`: what follows it is right
        and complete, what was before is not told any more.
        """
        n = self._ffi.new("int64_t*")
        native.call(self._lib.kvc_pool_take_events, self._native, self._ffi.NULL, 0, n)
        out = np.empty(n[0], POOL_EVENT_DTYPE)
        events = self._ffi.cast("kvc_pool_event*", out.ctypes.data)
        native.call(self._lib.kvc_pool_take_events, self._native, events, len(out), n)
        return out

    def namespaces(self) -> NDArray[np.uint32]:
        """Numbers of namespaces that a key has, or an event that waits: ascending, once. O(pages)."""
        n = self._ffi.new("int64_t*")
        native.call(self._lib.kvc_pool_spaces, self._native, self._ffi.NULL, 0, n)
        out = np.empty(n[0], np.uint32)
        buffer = self._ffi.from_buffer("uint32_t[]", out)
        native.call(self._lib.kvc_pool_spaces, self._native, buffer, len(out), n)
        return out

    def stats(self) -> PoolStats:
        """As `Pool.stats`."""
        out: Any = self._ffi.new("kvc_pool_stats*")
        native.call(self._lib.kvc_pool_get_stats, self._native, out)
        return PoolStats(
            out.capacity, out.created, out.free, out.cached, out.held, out.keyed, out.evictions
        )

    def check(self) -> None:
        """As `Pool.check`."""
        native.call(self._lib.kvc_pool_check, self._native)


def _rows(digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = arrays.keys(digests, "digests")
    if len(rows) and (rows.strides[1] != 1 or rows.strides[0] < 32):
        return np.ascontiguousarray(rows)
    return rows


def _stride(rows: NDArray[np.uint8]) -> int:
    return max(rows.strides[0], 32)
