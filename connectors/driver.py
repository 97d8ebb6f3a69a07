"""Glue between one manager and one connector, for the step loop of any engine.

    offload = Offload(manager, connector, regions)
    while serving:
        for handle, ok in offload.poll():            # loads that ended
            ...                                      # ok: it runs on; else look it up again
        step = manager.begin_step()
        for each request, the oldest first:
            hit = offload.lookup(handle)             # if it waits; None: the tier does not know yet
            grant = manager.allocate(handle, n)      # None: no space now
            offload.start_load(handle, grant)        # after a first grant; submits if it names a load
            manager.commit(handle, grant.end)        # unless it loads
        ...                                          # compute
        manager.end_step(step)
        offload.end_of_step()                        # stores what got a key
        publisher.publish(offload.take_events())     # if anybody wants to know
        ...                                          # offload.forget(h), then finish or abort;
                                                     # offload.release(h), then preempt

A movable arena: the copies of `manager.take_moves` come before each `start_load`, and before the
step computes.

What the two sides of the connector owe each other (pins, deadlines, results that come late or
twice) is settled here; the engine only ever sees a request that runs or one that waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    QUEUE_FULL,
    Connector,
    Direction,
    LoadBytes,
    PageRegion,
    RequestKeys,
    TierStats,
    Transfer,
    TransferResult,
    failed,
)
from kvcache.connectors.event_stream import TierStream
from kvcache.connectors.offload_loads import Loads
from kvcache.connectors.offload_reach import Reach, Reaches
from kvcache.connectors.offload_records import (
    Faults,
    Timing,
    hand_back,
    require_alone,
    require_covering,
    require_parts,
    take_over,
)
from kvcache.connectors.offload_stores import Stores
from kvcache.core.errors import ConfigError, HandleError, InvariantError, MisuseError
from kvcache.core.events.records import Event
from kvcache.core.explanation import Explanation
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit
from kvcache.core.values import shown, wait_seconds, whole

MAX_FAILED_LOADS = 3
"""After so many a request is computed without the tier, so that it ends whatever the tier does."""

RETRY_SECONDS = 0.01
"""How often `drain` offers a store again that is refused though none is in flight."""


class Offload:
    """Loads what a lookup finds in the tier, stores what the manager gives a key.

    A transfer whose worker says nothing is late at its deadline (and a grace), and counted: its pages
    stay out of use until a result comes after all. A request whose load it was waits again.

    Args:
        manager: decides about device pages; used by the same thread. Kept as an attribute.
        connector: the tier. `close` closes it.
        regions: memory of the device pages, for each group; must outlive `close`.
        lazy_bytes: store a page only when the device will soon evict it: so many bytes ahead of
            eviction (twice what a step writes or a load brings, or more). None: store it when it
            gets its key.

    Raises:
        ConfigError: a manager without a journal or without a bound, or regions that do not cover it.
        MisuseError: another `Offload` of the manager is open.

    Not thread-safe. No call but `wait`, `drain` and `close` waits.
    """

    def __init__(
        self,
        manager: Manager,
        connector: Connector,
        regions: Sequence[PageRegion],
        *,
        lazy_bytes: int | None = None,
    ) -> None:
        require_parts(manager, connector)
        require_covering(regions, manager.geometry, manager.arena_stats().slabs)
        if lazy_bytes is not None:
            lazy_bytes = whole(lazy_bytes, "Offload.lazy_bytes", least=1)
        require_alone(manager)
        self.manager = manager
        self._scheduler = connector.scheduler
        self._worker = connector.worker
        self._worker.register(regions)
        take_over(manager, self)
        self._stream = TierStream(manager.group_labels(), connector.medium)
        self._reaches = Reaches(self._scheduler, manager.geometry)
        self._held: dict[int, Reach | None] = {}
        """Requests for which the tier holds something since their lookup; None: of all keys."""
        self._loads = Loads(manager, self._scheduler, self._submit)
        self._stores = Stores(manager, self._scheduler, self._submit, ahead_bytes=lazy_bytes)

    # ---- lookups -------------------------------------------------------------------------------

    def lookup(self, handle: int) -> Hit | None:
        """The longest prefix that device and tier serve together; None: ask again next step.

        May be repeated every step: the tier answers from memory if nothing changed. It keeps what
        it promised until `start_load` or `release`.
        """
        manager = self.manager
        namespace, faults = manager.info(handle).namespace, self._loads.faults.get(handle)
        if faults is not None and faults.loads >= MAX_FAILED_LOADS:
            return manager.lookup(handle)
        keys = RequestKeys(handle, namespace, manager.group_digests(handle))
        reach = self._held.setdefault(handle, None)
        if reach is not None and self._reaches.stands(reach, keys):
            digests = [rows[:n] for rows, n in zip(keys.digests, reach.rows, strict=True)]
            hit = self._look_up(keys._replace(digests=digests), faults)[0]
            if hit is None or max(hit.hit_tokens, hit.junction) <= reach.tokens:
                return hit  # else the device has what was the gap
        version = self._scheduler.version
        hit, present = self._look_up(keys, faults)
        if hit is not None:
            self._held[handle] = self._reaches.narrowed(keys, present, hit, version)
        return hit

    def _look_up(
        self, keys: RequestKeys, faults: Faults | None
    ) -> tuple[Hit | None, list[NDArray[np.uint8]]]:
        """The hit, and which of the keys the tier has for it; None: it does not know yet."""
        present = self._scheduler.lookup(keys)
        if present is None:
            return None, []
        if faults is not None:
            present = [flags.copy() for flags in present]
            for group, index in faults.lost:
                present[group][index[index < len(present[group])]] = 0
        return self.manager.lookup(keys.request, present), present

    def explain(self, handle: int) -> Explanation:
        """`Manager.explain`, with what the tier holds now though the last lookup did not find it there.

        Such tokens are lost to `elsewhere`: a load failed, or the tier was not asked, or was told of
        them since. Pins nothing. O(keys).

        Raises:
            MisuseError: the request was not looked up yet.
        """
        manager = self.manager
        keys = RequestKeys(handle, manager.info(handle).namespace, manager.group_digests(handle))
        explanation = manager.explain(handle, elsewhere=self._scheduler.holds(keys))
        faults = self._loads.faults.get(handle)
        if faults is None:
            reason = "the tier holds it now, and did not when it was looked up, or was not asked"
        elif faults.loads < MAX_FAILED_LOADS:
            reason = f"loads of this request failed ({faults.loads}), and their parts are not tried again"
        else:
            reason = f"{faults.loads} loads of this request failed: it is computed without the tier"
        return explanation.with_reason(reason)

    def start_load(self, handle: int, grant: Grant) -> bool:
        """Submit the load that a request's first grant names; without one, end the tier's pins.

        False: the tier could not take it (queue full). The request waits again, without pages;
        look it up in a later step.

        Raises:
            MisuseError: it was started before.
        """
        whole(handle, "handle")
        if not isinstance(grant, Grant):
            raise ConfigError(
                f"grant is {shown(grant)}: give the Grant that Manager.allocate gave; where it gave"
                " None there is nothing to load yet"
            )
        if not grant.load:
            self._unhold(handle)
            return True
        started = self._loads.start(handle, grant.load)
        self._held.pop(handle, None)
        return started

    def release(self, handle: int) -> None:
        """Drop what the tier holds for a request: before its preempt, or to drop its lookup.

        The result of a load in flight for it is not reported any more. One that was granted and
        never started ends by the next `poll`. What could not be loaded for it stays known.
        """
        dropped = self._unstarted(whole(handle, "handle"))
        if dropped:
            self._loads.drop(dropped)
        self._unhold(handle)
        self._loads.leave(handle)

    def forget(self, handle: int) -> None:
        """`release`, and nothing is known of the request: before its finish or abort."""
        self.release(handle)
        self._loads.faults.pop(handle, None)

    def _unstarted(self, handle: int) -> int:
        """The load that was granted to a request after its lookup, and not started; 0: none."""
        if handle not in self._held:
            return 0
        try:
            load = self.manager.info(handle).load
        except HandleError:
            return 0
        return 0 if self._loads.knows(load) else load

    def _unhold(self, handle: int) -> None:
        if handle in self._held:
            del self._held[handle]
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

    # ---- results -------------------------------------------------------------------------------

    def end_of_step(self) -> None:
        """Store pages that got a key, or lazily what goes next: after `end_step`, `finish` or `preempt`.

        What a full queue refuses is offered again when a store has ended; what was evicted until
        then, or finds no room in the tier, is skipped and counted. Never waits. Nothing is stored
        while the oldest request waits for space. The copies of `take_moves` must be done before.
        """
        self._stores.look_ahead()
        self._stores.advance()

    def poll(self) -> list[tuple[int, bool]]:
        """Requests whose load ended since the last call, and whether all of it is there.

        True: the request runs on from its hit. False: it waits again without pages; look it up:
        the good part is a device hit now, and what failed is not asked of the tier again. Stores
        that waited for room go on: the copies of `take_moves` must be done before.
        """
        self._collect()
        return self._loads.take_ended()

    def _collect(self) -> None:
        self._loads.end_dropped()
        ended = self._stores.ended
        for result in self._worker.poll():
            self._take(result)
        for result in (*self._loads.silent(), *self._stores.silent()):
            self._take(result)
        if self._stores.ended > ended or self._stores.waiting:
            self._stores.advance()  # there is room for what waited

    def _take(self, result: TransferResult) -> None:
        self._scheduler.complete(result)
        if result.direction is Direction.LOAD:
            self._loads.end(result)
        else:
            self._stores.end(result)

    @property
    def loading_bytes(self) -> LoadBytes:
        """Of loads in flight that somebody waits for."""
        return self._loads.loading_bytes

    def take_timings(self) -> list[Timing]:
        """Of loads that ended since the last call, late ones as long as they waited."""
        return self._loads.take_timings()

    def far(self, handle: int) -> list[NDArray[np.uint8]] | None:
        """Of each group's keys as of the last `lookup`, 1 where only a tier below has it; None: none."""
        return self._scheduler.far(handle)

    def wait(self, timeout_seconds: float) -> bool:
        """Block until `poll` has something to do, or the time is over. For idle engines."""
        timeout_seconds = wait_seconds(timeout_seconds, "timeout_seconds")
        return self._loads.has_ended or self._wait(timeout_seconds)

    def _wait(self, timeout_seconds: float) -> bool:
        """Until there is a result, or one that should have come is not waited for any longer."""
        due = min(self._loads.due, self._stores.due)
        remaining = max(0.0, min(timeout_seconds, due - time.monotonic()))
        return self._worker.wait(remaining) or due <= time.monotonic()

    def drain(self, timeout_seconds: float) -> bool:
        """Store what has a key and wait until nothing is in flight. False: the time was over.

        Also False, at once when nothing is in flight, where the oldest request waits for space: no
        store begins then, and what waits for its turn would wait for the engine's next step.
        A tier made of several has all of it in the last one then, but for what `stats` counts as
        dropped or failed. Results of loads stay for the next `poll`. The copies of `take_moves` must
        be done before.
        """
        end = time.monotonic() + wait_seconds(timeout_seconds, "timeout_seconds")
        self._stores.everything()
        while len(self._loads) or len(self._stores) or self._stores.waiting:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            if self._stores.blocked and not (len(self._loads) or len(self._stores)):
                return False
            idle = not (self._loads.in_flight or len(self._stores))
            self._wait(min(remaining, RETRY_SECONDS) if idle else remaining)
            self._collect()
        return self._worker.flush(max(end - time.monotonic(), 0.0))

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """End every transfer and close the connector's worker. Idempotent.

        False: a copy did not end in time; its pages stay pinned until its result was polled, and
        the regions must stay until another call says True.
        """
        timeout_seconds = wait_seconds(timeout_seconds, "timeout_seconds")
        self._stores.close()
        closed = self._worker.close(timeout_seconds)
        self._collect()
        if closed:
            hand_back(self.manager, self)
        return closed

    # ---- events, counts and invariants ---------------------------------------------------------

    def take_events(self) -> list[Event]:
        """KV events of device and tier since the last call, in order: in place of the manager's.

        The device's have the medium `GPU`, the tier's the connector's, with tokens and parents
        where the manager tells events too.

        Raises:
            MisuseError: neither manager nor connector was made with `events`.
        """
        if not (self.manager.reports_events or self._scheduler.reports_events):
            raise MisuseError(
                "neither manager nor connector keeps events: make them with events=True"
            )
        device = self.manager.take_events() if self.manager.reports_events else []
        if not self._scheduler.reports_events:
            return device
        return self._stream.join(device, self._scheduler.take_events())

    def stats(self) -> TierStats:
        """The tier's counters; pages evicted before their turn count as dropped stores too."""
        stats = self._scheduler.stats()
        gone = self._stores.gone_pages + self.manager.stats().keyed_dropped
        return replace(stats, dropped_store_pages=stats.dropped_store_pages + gone)

    def check(self) -> None:
        """Raise `InvariantError` if pins, loads and transfers disagree. O(pages)."""
        self._scheduler.check()
        waiting = sum(self._unstarted(handle) > 0 for handle in self._held)
        known = len(self._loads) + waiting
        loads = self.manager.stats().open_loads
        if loads != known:
            raise InvariantError(
                f"{loads} loads are open in the manager, {known} are known here: each grant that"
                " names a load goes to start_load, or its request to release or forget before it is"
                " preempted or closed"
            )
        pinned, expected = self.manager.stats().pinned, self._stores.held_pages
        if pinned != expected:
            raise InvariantError(f"{pinned} device pages are pinned, stores know of {expected}")
