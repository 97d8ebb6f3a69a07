"""The deciding side of a tier of files: a slot is the right to one file, its key says which.

    take a slot      its old key's file is removed before a new one is written: the space is bounded
    publish a key    the file is there
    start            files are found by their names, oldest first, and take slots
    news             what other processes store takes a slot here too, what they remove frees one

The index is what this process believes; the folder is what is so. Where they differ a load finds no
file, and the key goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    KeyedPages,
    RequestKeys,
    Transfer,
    TransferResult,
)
from kvcache.connectors.disk_board import Change
from kvcache.connectors.disk_news import DiskNews
from kvcache.connectors.disk_scan import FoundPages
from kvcache.connectors.pool_records import Part, named, names_of
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.core.errors import InvariantError
from kvcache.core.hashing import NATIVE_NAMESPACE

_SLOT_DTYPE = np.dtype([("keyed", "?"), ("name", "u1", 64)])


class DiskScheduler(PoolScheduler):
    """`PoolScheduler` whose transfers name files.

    Args:
        slot_bytes, slots, deadline_seconds, events, seed: as for `PoolScheduler`.
        found: files that are there, of each group.
        news: where both sides meet.
    """

    def __init__(
        self,
        slot_bytes: Sequence[int],
        slots: Sequence[int],
        *,
        found: Sequence[FoundPages],
        news: DiskNews,
        deadline_seconds: float,
        events: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            slot_bytes, slots, deadline_seconds=deadline_seconds, events=events, seed=seed
        )
        self._news = news
        self._slots = [np.zeros(n, _SLOT_DTYPE) for n in slots]
        """The key of each slot that has one: what to remove when it is taken."""
        for group, pages in enumerate(found):
            self._counts.gone_pages += pages.damaged
            self._adopt(group, pages.names)

    # ---- what is asked -------------------------------------------------------------------------

    def lookup(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """As `PoolScheduler.lookup`, with what was heard since."""
        self._hear()
        return super().lookup(keys)

    @property
    def version(self) -> Hashable:
        """As `PoolScheduler.version`, with what was heard since."""
        self._hear()
        return super().version

    def holds(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """As `PoolScheduler.holds`, with what was heard since."""
        self._hear()
        return super().holds(keys)

    def plan_store(self, pages: KeyedPages) -> tuple[Transfer, NDArray[np.int64]] | None:
        """As `PoolScheduler.plan_store`; files that make room are gone before it is done."""
        self._hear()
        return super().plan_store(pages)

    def _names(self, items: NDArray[np.void], parts: list[Part]) -> NDArray[np.uint8]:
        return names_of(items, parts)

    def complete(self, result: TransferResult) -> None:
        """As `PoolScheduler.complete`."""
        self._hear()  # what was told before these files were written is about others of their names
        super().complete(result)

    # ---- slots and their files -----------------------------------------------------------------

    def _take(self, group: int, count: int) -> NDArray[np.int32]:
        taken = super()._take(group, count)
        slots = self._slots[group]
        evicted = taken[slots["keyed"][taken]]
        if len(evicted):
            self._news.discard(group, slots["name"][evicted])
            slots["keyed"][evicted] = False
        return taken

    def _publish(
        self, group: int, namespace: bytes, digests: NDArray[np.uint8], slots: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        published = super()._publish(group, namespace, digests, slots)
        mine = published == 1
        self._slots[group]["name"][slots[mine]] = named(namespace, digests[mine])
        self._slots[group]["keyed"][slots[mine]] = True
        return published

    def _unpublish(self, group: int, slots: NDArray[np.int32]) -> None:
        super()._unpublish(group, slots)
        self._slots[group]["keyed"][slots] = False

    # ---- other processes, and this one before --------------------------------------------------

    def _hear(self) -> None:
        for change, group, names in self._news.heard():
            if not 0 <= group < len(self._pools):
                continue
            known, slots = self._find(group, names)
            if change is Change.REMOVED:
                self._unpublish(group, slots)
            self._pools[group].release(slots[::-1])
            if change is Change.STORED:
                self._adopt(group, names[~known])

    def _find(
        self, group: int, names: NDArray[np.uint8]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Which of the keys have slots, and these, held once more. They are the youngest then."""
        slots = np.full(len(names), -1, np.int32)
        for namespace, rows in _by_namespace(names):
            number = self._numbers.get(namespace)
            if number is not None:
                slots[rows] = self._pools[group].acquire(number, names[rows, 32:])
        return slots >= 0, slots[slots >= 0]

    def _adopt(self, group: int, names: NDArray[np.uint8]) -> None:
        """Files that are there get slots, the last of them the youngest.

        What is old makes room, with its file: two processes that store at the same time may each
        have taken the last slot, or both have removed the same file for it. Files for which all slots
        are held stay unknown; who stored them knows them.
        """
        excess = max(len(names) - self._pools[group].capacity, 0)
        self._news.discard(group, names[:excess])
        names = names[excess:]
        slots = self._take(group, len(names))
        names = names[len(names) - len(slots) :]
        for namespace, rows in _by_namespace(names):
            self._publish(group, namespace, names[rows, 32:], slots[rows])
        self._pools[group].release(slots)

    # ---- invariants ----------------------------------------------------------------------------

    def check(self) -> None:
        """As `PoolScheduler.check`; and each key has the name of its file."""
        super().check()
        for group, (pool, slots) in enumerate(zip(self._pools, self._slots, strict=True)):
            keyed, files = pool.stats().keyed, int(slots["keyed"].sum())
            if keyed != files:
                raise InvariantError(f"group {group}: {keyed} keys, and the files of {files}")


def _by_namespace(names: NDArray[np.uint8]) -> list[tuple[bytes, NDArray[np.intp]]]:
    """Rows of each namespace, in order."""
    if not len(names):
        return []
    if not names[:, :32].any():
        return [(NATIVE_NAMESPACE, np.arange(len(names)))]
    spaces = np.ascontiguousarray(names[:, :32]).view("V32")[:, 0]
    return [(space.tobytes(), np.flatnonzero(spaces == space)) for space in np.unique(spaces)]
