"""Stores of one `Offload`: which pages, when, and the references that they hold meanwhile.

    eager   what got a key, in the order in which it did
    lazy    what the device will evict next, as far as `ahead_bytes` reach

Lazy looks ahead of eviction, and not for a second sighting: the next turn of a session is the first
to ask again for most of what it wants, and what was evicted before it came would be gone by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    KEYED_DTYPE,
    QUEUE_FULL,
    KeyedPages,
    TierScheduler,
    Transfer,
    TransferResult,
)
from kvcache.connectors.offload_records import Store, due_of, silence
from kvcache.core.manager import Manager

STORE_BYTES = 64 << 20
"""Most bytes of one store: its device pages are held until all of it is done."""

MAX_STORES = 8
"""Stores in flight; further pages wait unheld, and are skipped if they are evicted meanwhile."""


class Stores:
    """Stores in flight, and pages that wait for their turn.

    Args:
        submit: gives a transfer to the worker; empty, or why it was not taken.
        ahead_bytes: lazy: the device's next so many bytes are to be found in the tier before they
            are needed. None: eager.
    """

    def __init__(
        self,
        manager: Manager,
        scheduler: TierScheduler,
        submit: Callable[[Transfer], str],
        *,
        ahead_bytes: int | None,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._submit = submit
        self._ahead_bytes = ahead_bytes
        self._page_bytes = np.array([g.page_bytes for g in manager.geometry.groups], np.int64)
        self._stores: dict[int, Store] = {}
        self._backlog = np.empty(0, KEYED_DTYPE)
        self._refused = False
        """A full queue refused a store; it is first in the backlog until one in flight ends."""
        self._closed = False
        self.ended = 0
        """Stores that came to their end."""
        self.gone_pages = 0
        """Pages that lost their key before their turn."""

    def __len__(self) -> int:
        """Stores in flight."""
        return len(self._stores)

    @property
    def waiting(self) -> int:
        """Pages that wait for their turn, unheld."""
        return len(self._backlog)

    @property
    def blocked(self) -> bool:
        """Whether pages wait that cannot be stored now: the oldest request waits for space."""
        return len(self._backlog) > 0 and bool(self._manager.stats().frozen)

    @property
    def held_pages(self) -> int:
        """Device pages that stores in flight hold."""
        return sum(len(store.items) for store in self._stores.values())

    def look_ahead(self) -> None:
        """Lazy: the backlog is what goes next from the device, as of now.

        Once for each change of the device: in a tier that holds less than this looks ahead, keys that
        made room for others would be stored again and again.
        """
        if self._ahead_bytes is not None and not (self._closed or self._manager.stats().frozen):
            self._manager.take_keyed()
            self._backlog = self._manager.next_evicted(self._ahead_bytes)

    def advance(self) -> None:
        """Start stores, as many as may be in flight. Nothing while the oldest request waits for space."""
        if self._closed or self._manager.stats().frozen:
            return
        while len(self._stores) < MAX_STORES and not (self._refused and self._stores):
            if not len(self._backlog) and self._ahead_bytes is None:
                self._backlog = self._manager.take_keyed()
            if not len(self._backlog):
                return
            sizes = np.cumsum(self._page_bytes[self._backlog["group"]])
            count = max(1, int(np.searchsorted(sizes, STORE_BYTES, side="right")))
            chunk, self._backlog = self._backlog[:count], self._backlog[count:]
            refused = self._store(chunk)
            self._refused = len(refused) > 0
            if self._refused:
                self._backlog = np.concatenate([refused, self._backlog])
                return

    def everything(self) -> None:
        """What is cached on the device is to be stored, also where stores are lazy."""
        if self._ahead_bytes is not None:
            self._backlog = self._manager.next_evicted(None)
        self.advance()

    def _store(self, items: NDArray[np.void]) -> NDArray[np.void]:
        """Pins what still has its key, stores what the tier wants of it, unpins the rest.

        Returns what a full queue refused, unpinned.
        """
        nothing = items[:0]
        pages = self._manager.pin(items)
        items, self.gone_pages = items[pages >= 0], self.gone_pages + int((pages < 0).sum())
        items["page"] = pages[pages >= 0]
        plan = self._scheduler.plan_store(KeyedPages(items, self._manager.namespaces))
        if plan is None:
            self._unpin(items)
            return nothing
        transfer, chosen = plan
        rest = np.ones(len(items), np.bool_)
        rest[chosen] = False
        self._unpin(items[rest])
        error = self._submit(transfer)
        if not error:
            due = due_of(transfer)
            self._stores[transfer.id] = Store(items[chosen], transfer, due)
            return nothing
        self._unpin(items[chosen])
        return items[chosen] if error.startswith(QUEUE_FULL) else nothing

    def _unpin(self, items: NDArray[np.void]) -> None:
        for group in np.unique(items["group"]).tolist():
            pages = items["page"][items["group"] == group]
            self._manager.unpin(group, pages[::-1])  # the tail of a prefix is evicted first

    @property
    def due(self) -> float:
        """When the next one that says nothing is late."""
        return min((it.due for it in self._stores.values() if not it.late), default=math.inf)

    def silent(self) -> list[TransferResult]:
        """A late result for each whose time, and grace, is over."""
        now = time.monotonic()
        return [
            silence(store.transfer)
            for store in self._stores.values()
            if not store.late and store.due <= now
        ]

    def end(self, result: TransferResult) -> None:
        """A result of a store: the final one lets its pages go. Unknown ids are ignored here.

        Pages of a late one stay held: they may still be read. So what a worker that says nothing
        takes from the device is bounded, by `MAX_STORES`.
        """
        store = self._stores.get(result.id)
        if store is None:
            return
        if result.late:
            store.late = True
            return
        del self._stores[result.id]
        self.ended += 1
        self._refused = False
        self._unpin(store.items)

    def close(self) -> None:
        """What waits for its turn will not be stored, nor what comes later."""
        self._closed = True
        self.gone_pages += len(self._backlog)
        self._backlog = self._backlog[:0]
