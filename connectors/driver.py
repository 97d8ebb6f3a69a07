"""Glue between one manager and one connector, for the step loop of any engine.

    offload = Offload(manager, connector, regions)
    while serving:
        for handle, ok in offload.poll():            # loads that ended
            ...                                      # ok: it runs on; else look it up again
        for each waiting request:
            hit = offload.lookup(handle)             # None: the tier does not know yet
            grant = manager.allocate(handle, n)      # None: no space now
            offload.start_load(handle, grant)        # always; submits if the grant names a load
        step = manager.begin_step()
        ...                                          # commit, compute
        manager.end_step(step)
        offload.end_of_step()                        # stores what got a key
        ...                                          # offload.release(h), then finish/abort/preempt

What the two sides of the connector owe each other (pins, deadlines, results that come late or
twice) is settled here; the engine only ever sees a request that runs or one that waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    KEYED_DTYPE,
    QUEUE_FULL,
    Connector,
    Direction,
    KeyedPages,
    PageRegion,
    RequestKeys,
    TierStats,
    Transfer,
    TransferResult,
    failed,
)
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit

STORE_BYTES = 64 << 20
"""Most bytes of one store: its device pages are held until all of it is done."""

MAX_STORES = 8
"""Stores in flight; further pages wait unheld, and are skipped if they are evicted meanwhile."""

MAX_FAILED_LOADS = 3
"""After so many a request is computed without the tier, so that it ends whatever the tier does."""


@dataclass(slots=True)
class _Load:
    """A load in flight."""

    handle: int
    load: int
    items: NDArray[np.void]
    wanted: bool = True
    """The request still waits for it."""


@dataclass(slots=True)
class _Faults:
    """What a request could not load: masked in its next lookups."""

    loads: int = 0
    lost: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    """(group, index of block or grid point)."""


class Offload:
    """Loads what a lookup finds in the tier, stores what the manager gives a key.

    Args:
        manager: decides about device pages; used by the same thread.
        connector: the tier. `close` closes it.
        regions: memory of the device pages, for each group; must outlive `close`.

    Not thread-safe. No call but `wait`, `drain` and `close` waits.
    """

    def __init__(
        self, manager: Manager, connector: Connector, regions: Sequence[PageRegion]
    ) -> None:
        groups = manager.geometry.groups
        if len(regions) != len(groups):
            raise ConfigError(f"{len(regions)} regions for {len(groups)} groups: give one each")
        for group, (spec, region) in enumerate(zip(groups, regions, strict=True)):
            pages = manager.pool_stats(group).capacity
            if region.pages < pages:
                raise ConfigError(
                    f"the region of group {spec.name!r} has {region.pages} pages, its pool may"
                    f" use {pages}: make the region larger, or lower the manager's pages"
                )
        self._manager = manager
        self._scheduler = connector.scheduler
        self._worker = connector.worker
        self._worker.register(regions)
        self._page_bytes = np.array([g.page_bytes for g in groups], np.int64)
        self._held: set[int] = set()
        """Requests for which the tier holds something since their lookup."""
        self._faults: dict[int, _Faults] = {}
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, NDArray[np.void]] = {}
        self._backlog = np.empty(0, KEYED_DTYPE)
        self._ended: list[tuple[int, bool]] = []
        self._gone_pages = 0

    # ---- loads ---------------------------------------------------------------------------------

    def lookup(self, handle: int) -> Hit | None:
        """The longest prefix that device and tier serve together; None: ask again next step.

        May be repeated every step: the tier answers from memory if nothing changed. It keeps what
        it promised until `start_load` or `release`.
        """
        manager, faults = self._manager, self._faults.get(handle)
        if faults is not None and faults.loads >= MAX_FAILED_LOADS:
            return manager.lookup(handle)
        namespace = manager.info(handle).namespace
        keys = RequestKeys(handle, namespace, manager.group_digests(handle))
        present = self._scheduler.lookup(keys)
        self._held.add(handle)
        if present is None:
            return None
        if faults is not None:
            present = [flags.copy() for flags in present]
            for group, index in faults.lost:
                present[group][index[index < len(present[group])]] = 0
        return manager.lookup(handle, present)

    def start_load(self, handle: int, grant: Grant) -> bool:
        """Submit the load that a request's first grant names; without one, end the tier's pins.

        False: the tier could not take it (queue full). The request waits again, without pages;
        look it up in a later step.
        """
        if not grant.load:
            self._unhold(handle)
            return True
        items = self._manager.load_items(grant.load)
        pages = KeyedPages(items, self._manager.namespaces)
        transfer = self._scheduler.plan_load(handle, pages)
        self._held.discard(handle)
        error = self._submit(transfer)
        if error:
            self._manager.end_load(grant.load, np.zeros(len(items), np.uint8))
            if not error.startswith(QUEUE_FULL):
                self._note_fault(handle, items)
            return False
        self._loads[transfer.id] = _Load(handle, grant.load, items)
        return True

    def release(self, handle: int) -> None:
        """Forget a request: before its finish, abort or preempt, or to drop its lookup.

        The result of a load in flight for it is not reported any more.
        """
        self._unhold(handle)
        self._faults.pop(handle, None)
        for load in self._loads.values():
            if load.handle == handle:
                load.wanted = False

    def _unhold(self, handle: int) -> None:
        if handle in self._held:
            self._held.remove(handle)
            self._scheduler.release(handle)

    def _submit(self, transfer: Transfer) -> str:
        """Empty if the worker took it; else why not, and the scheduler side knows."""
        try:
            error = "" if self._worker.submit(transfer) else f"{QUEUE_FULL}: the worker is busy"
        except Exception as fault:  # noqa: BLE001  (a tier's fault is a miss, never the engine's)
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self._scheduler.complete(failed(transfer, error))
        return error

    def _note_fault(self, handle: int, items: NDArray[np.void]) -> None:
        faults = self._faults.setdefault(handle, _Faults())
        faults.loads += 1
        for group, block_tokens in enumerate(self._manager.geometry.block_tokens):
            ends = items["end"][items["group"] == group]
            if len(ends):
                faults.lost.append((group, ends // block_tokens - 1))

    # ---- stores --------------------------------------------------------------------------------

    def end_of_step(self) -> None:
        """Store pages that got a key: after `end_step`, `finish` or `preempt` of the manager.

        What cannot be stored now is skipped and counted, never waited for.
        """
        while len(self._stores) < MAX_STORES:
            if not len(self._backlog):
                self._backlog = self._manager.take_keyed()
                if not len(self._backlog):
                    return
            sizes = np.cumsum(self._page_bytes[self._backlog["group"]])
            count = max(1, int(np.searchsorted(sizes, STORE_BYTES, side="right")))
            chunk, self._backlog = self._backlog[:count], self._backlog[count:]
            self._store(chunk)

    def _store(self, items: NDArray[np.void]) -> None:
        """Pins what still has its key, stores what the tier wants of it, unpins the rest."""
        pinned = self._manager.pin(items) == 1
        self._gone_pages += int(len(items) - pinned.sum())
        items = items[pinned]
        if not len(items):
            return
        plan = self._scheduler.plan_store(KeyedPages(items, self._manager.namespaces))
        if plan is None:
            self._unpin(items)
            return
        transfer, chosen = plan
        rest = np.ones(len(items), np.bool_)
        rest[chosen] = False
        self._unpin(items[rest])
        if self._submit(transfer):
            self._unpin(items[chosen])
        else:
            self._stores[transfer.id] = items[chosen]

    def _unpin(self, items: NDArray[np.void]) -> None:
        for group in np.unique(items["group"]).tolist():
            pages = items["page"][items["group"] == group]
            self._manager.unpin(group, pages[::-1])  # the tail of a prefix is evicted first

    # ---- results -------------------------------------------------------------------------------

    def poll(self) -> list[tuple[int, bool]]:
        """Requests whose load ended since the last call, and whether all of it is there.

        True: the request runs on from its hit. False: it waits again without pages; look it up:
        the good part is a device hit now, and what failed is not asked of the tier again.
        """
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def _collect(self) -> None:
        stores = len(self._stores)
        for result in self._worker.poll():
            self._scheduler.complete(result)
            if result.direction is Direction.LOAD:
                self._end_load(result)
            elif not result.late and result.id in self._stores:
                self._unpin(self._stores.pop(result.id))
        if len(self._stores) < stores:
            self.end_of_step()  # there is room for what waited

    def _end_load(self, result: TransferResult) -> None:
        load = self._loads.get(result.id)
        if load is None:
            return
        ok = result.ok == 1
        if len(ok) != len(load.items) or result.late:
            ok = np.zeros(len(load.items), np.bool_)
        if load.wanted and not ok.all():
            self._note_fault(load.handle, load.items[~ok])
        if result.late:
            if load.wanted:
                self._manager.abandon_load(load.load)
        else:
            del self._loads[result.id]
            self._manager.end_load(load.load, ok.astype(np.uint8))
        if load.wanted:
            self._ended.append((load.handle, bool(ok.all())))
        load.wanted = False

    def wait(self, timeout_seconds: float) -> bool:
        """Block until `poll` has something to do, or the time is over. For idle engines."""
        return self._worker.wait(timeout_seconds)

    def drain(self, timeout_seconds: float) -> bool:
        """Store what has a key and wait until nothing is in flight. False: the time was over.

        Results of loads stay for the next `poll`.
        """
        end = time.monotonic() + timeout_seconds
        self.end_of_step()
        while self._loads or self._stores or len(self._backlog):
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            self._worker.wait(remaining)
            self._collect()
        return True

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End every transfer and close the connector's worker. Idempotent.

        Pages of a copy that did not end in time stay pinned.
        """
        self._backlog = self._backlog[:0]
        self._worker.close(timeout_seconds)
        self._collect()

    # ---- counts and invariants -----------------------------------------------------------------

    def stats(self) -> TierStats:
        """The tier's counters; pages evicted before their turn count as dropped stores too."""
        stats = self._scheduler.stats()
        gone = self._gone_pages + self._manager.stats().keyed_dropped
        return replace(stats, dropped_store_pages=stats.dropped_store_pages + gone)

    def check(self) -> None:
        """Raise `InvariantError` if pins and transfers disagree. O(pages)."""
        self._scheduler.check()
        pinned, expected = self._manager.stats().pinned, sum(map(len, self._stores.values()))
        if pinned != expected:
            raise InvariantError(f"{pinned} device pages are pinned, stores know of {expected}")
