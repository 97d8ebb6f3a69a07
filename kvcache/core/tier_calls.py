"""The manager as tiers see it: loads, pages that got a key, pins; and copies within the arena."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.core import arrays, native
from kvcache.core.batch_calls import BatchCalls
from kvcache.core.errors import MisuseError
from kvcache.core.layout import Geometry
from kvcache.core.records import KEYED_DTYPE, MOVE_DTYPE
from kvcache.core.values import whole

_NO_MOVES = np.empty(0, MOVE_DTYPE)


class TierCalls(BatchCalls):
    """Everything that moves bytes: what to copy where, and what may be read meanwhile."""

    def __init__(self, geometry: Geometry, slabs: int, *, journal: int, **settings: int) -> None:
        super().__init__(geometry, slabs, journal=journal, **settings)
        self._journal = bool(journal)

    @property
    def keeps_journal(self) -> bool:
        """Whether it was made with `journal=True`."""
        return self._journal

    def load_items(self, load: int) -> NDArray[np.void]:
        """Pages that a load must fill, with their keys: `[n]` of `KEYED_DTYPE`."""
        return self._read(KEYED_DTYPE, self._lib.kvc_load_items, load)

    def end_load(self, load: int, ok: NDArray[np.uint8]) -> None:
        """The load is over; `ok[i]` tells whether item i holds the right bytes.

        All good: the request runs on from its hit. Otherwise it waits again without pages; a new
        lookup finds the good part on the device.
        """
        flags = arrays.flat(ok, np.uint8, "ok")
        self._call(self._lib.kvc_end_load, load, self._buffer("uint8_t", flags), len(flags))

    def abandon_load(self, load: int) -> None:
        """The load is late: its request waits again, its pages stay out of use until `end_load`."""
        self._call(self._lib.kvc_abandon_load, load)

    def take_keyed(self) -> NDArray[np.void]:
        """Pages that got their key since the last call, `[n]` of `KEYED_DTYPE`.

        `ns` is the number of a namespace now: resolve it by `Manager.namespaces` before the next
        `open`, which may give an unused number to another one.

        Raises:
            MisuseError: the manager was made with `journal=False`.
        """
        if not self._journal:
            raise MisuseError("this manager keeps no journal: make it with Manager(journal=True)")
        return self._read(KEYED_DTYPE, self._lib.kvc_take_keyed)

    def next_evicted(self, ahead_bytes: int | None) -> NDArray[np.void]:
        """What the arena evicts next, in this order: `[n]` of `KEYED_DTYPE`, handles 0.

        Args:
            ahead_bytes: of the arena, free ones included; None: all that is cached.

        O(result). Pages that somebody holds are not in it.
        """
        most = (
            2**62 if ahead_bytes is None else whole(ahead_bytes, "ahead_bytes", least=0, most=2**62)
        )
        slabs = -(-most // self.geometry.slab_bytes)
        return self._read(KEYED_DTYPE, self._lib.kvc_next_evicted, slabs)

    def pin(self, items: NDArray[np.void]) -> NDArray[np.int32]:
        """One reference on each page that has one of the given keys now.

        Returns the page of each item, for `unpin`; -1 where the key is gone, or while the oldest
        request waits for space (`stats().frozen`): nothing new is pinned then.
        """
        rows = arrays.flat(items, KEYED_DTYPE, "items").copy()
        flags = np.zeros(len(rows), np.uint8)
        pointer = self._ffi.cast("kvc_keyed*", self._ffi.from_buffer(rows))
        self._call(self._lib.kvc_pin, pointer, len(rows), self._buffer("uint8_t", flags))
        return np.where(flags == 1, rows["page"], np.int32(-1)).astype(np.int32)

    def unpin(self, group: int, pages: NDArray[np.int32]) -> None:
        """End references that `pin` gave. All or nothing."""
        rows = arrays.flat(pages, np.int32, "pages")
        self._call(self._lib.kvc_unpin, group, self._buffer("int32_t", rows), len(rows))

    def take_moves(self) -> NDArray[np.void]:
        """Cached pages that changed their place since the last call: `[n]` of `MOVE_DTYPE`.

        Copy page `from` to page `to` of the size class, in this order, before anything that
        `allocate` gave out since is read or written (by a step, a load, a store). May be called
        always: a manager that is not `movable` moves nothing.
        """
        n = self._ffi.new("int64_t*")
        native.check(self._lib.kvc_take_moves(self._native, self._ffi.NULL, 0, n))
        if not n[0]:
            return _NO_MOVES
        return self._read(MOVE_DTYPE, self._lib.kvc_take_moves, room=int(n[0]))
