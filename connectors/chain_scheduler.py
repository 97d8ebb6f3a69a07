"""The deciding side of a chain: one lookup over two tiers, loads that rise, stores that sink.

                lookup            load                       store
    device                        <---------+----------+     |
    upper       found here?       upper ----+          |     v
    lower       else here?        lower --> upper -----+     upper --(later)--> lower

The slots of the upper tier are the pages of the lower one, so every copy is a plain load or store
of one of them. What is on its way up has a slot reserved, as for a store; what is on its way down
is held, as for a load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    Connector,
    Direction,
    KeyedPages,
    OpenWork,
    RequestKeys,
    TierScheduler,
    TierStats,
    Transfer,
    TransferResult,
)
from kvcache.connectors.chain_descents import Descents
from kvcache.connectors.chain_records import (
    Ascent,
    ChainPlan,
    ChainPromise,
    ChainTransfer,
    lasting,
    require_same,
)
from kvcache.connectors.key_events import KeyEvent, KeysLost
from kvcache.connectors.pool_records import signature_of
from kvcache.connectors.slots_aside import NO_SPACE
from kvcache.connectors.tier_counts import count_result
from kvcache.connectors.tier_stats import GroupFill


class ChainScheduler(TierScheduler):
    """Two tiers as one.

    Args:
        upper, lower: the tiers; nobody else uses them.
        page_bytes: of each group.
        behind: whether what is stored is written to the lower tier, in the background.
        most_behind: keys that may wait for that.
    """

    def __init__(
        self,
        upper: Connector,
        lower: Connector,
        *,
        page_bytes: Sequence[int],
        behind: bool,
        most_behind: int,
    ) -> None:
        self.tiers = (upper, lower)
        """Each with its own counters: `tiers[1].scheduler.stats()`."""
        self.reports_events = upper.scheduler.reports_events and lower.scheduler.reports_events
        self._upper, self._lower = upper.scheduler, lower.scheduler
        self._page_bytes = np.array(page_bytes, np.int64)
        self._behind = behind
        self._promises: dict[int, ChainPromise] = {}
        self._plans: dict[int, ChainPlan] = {}
        self._ids = count(1)
        self._own = count(-1, -1)
        """Numbers of requests that the tiers are asked under, other than those of the caller."""
        self.descents = Descents(
            self._upper, self._lower, self._page_bytes, most_behind=most_behind, own=self._own
        )
        """What sinks, in the background."""
        self._counts = TierStats()

    # ---- lookup --------------------------------------------------------------------------------

    def lookup(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """What either tier has. What the upper one has is not pinned in the lower one."""
        promise = self._promises.get(keys.request)
        found = self._upper.lookup(keys)
        if found is None:
            return None
        if (
            promise is None
            or promise.signature != signature_of(keys)
            or any(old is not new for old, new in zip(promise.upper, found, strict=True))
        ):
            promise = self._ask(keys, found, promise)
        if promise.below is None:
            return list(promise.present)
        lower = self._lower.lookup(promise.below)
        if lower is None:
            return None
        promise.take(lower)
        return list(promise.present)

    def _ask(
        self, keys: RequestKeys, found: list[NDArray[np.uint8]], before: ChainPromise | None
    ) -> ChainPromise:
        """A new promise; the lower tier is to be asked for what the upper one does not have."""
        missing = [d[flags == 0] for d, flags in zip(keys.digests, found, strict=True)]
        below = None
        if any(map(len, missing)):
            below = RequestKeys(next(self._own), keys.namespace, missing)
        promise = ChainPromise(signature_of(keys), found, below, None, found)
        self._promises[keys.request] = promise
        if before is not None:
            self._release_lower(before)
        return promise

    def narrow(self, keys: RequestKeys) -> None:
        """In both tiers, where neither has changed since the last lookup."""
        self._upper.narrow(keys)
        promise, found = self._promises.get(keys.request), self._upper.lookup(keys)
        if promise is not None and found is not None:
            before = [flags[: len(new)] for flags, new in zip(promise.upper, found, strict=True)]
            if all(map(np.array_equal, before, found)):
                if promise.below is not None:
                    digests = [
                        below[: len(flags) - int(flags.sum())]
                        for below, flags in zip(promise.below.digests, found, strict=True)
                    ]
                    promise.below = promise.below._replace(digests=digests)
                    self._lower.narrow(promise.below)
                promise.signature, promise.upper = signature_of(keys), found
                promise.lower, promise.far, promise.present = None, None, found
        self.lookup(keys)

    @property
    def version(self) -> Hashable:
        """Of both tiers."""
        versions = self._upper.version, self._lower.version
        return None if None in versions else versions

    def far(self, request: int) -> list[NDArray[np.uint8]] | None:
        """What only the lower tier has. O(1)."""
        promise = self._promises.get(request)
        return None if promise is None else promise.far

    def holds(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """What either tier has; None where one of them cannot tell."""
        upper, lower = self._upper.holds(keys), self._lower.holds(keys)
        if upper is None or lower is None:
            return None
        return [up | low for up, low in zip(upper, lower, strict=True)]

    def release(self, request: int) -> None:
        """Drop the request's pins, in both tiers."""
        promise = self._promises.pop(request, None)
        self._upper.release(request)  # it may have been asked without an answer
        if promise is None:
            self._counts.unknown_ids += 1
        else:
            self._release_lower(promise)

    def _release_lower(self, promise: ChainPromise) -> None:
        if promise.below is not None:
            self._lower.release(promise.below.request)

    # ---- plans ---------------------------------------------------------------------------------

    def plan_load(self, request: int, wanted: KeyedPages) -> ChainTransfer:
        """What the upper tier does not hold rises through slots of it, or fails where it has none."""
        promise = self._promises.pop(request, None)
        upper = self._upper.plan_load(request, wanted)
        here = np.flatnonzero(upper.slots >= 0)
        below = self._below(promise, wanted, np.flatnonzero(upper.slots < 0))
        ascent = self._plan_ascent(promise, wanted, below)
        if promise is not None and ascent is None:
            self._release_lower(promise)
        slots, seconds = upper.slots.copy(), upper.deadline_seconds
        groups, pages = upper.groups, upper.pages
        if len(here) < len(slots):  # the upper tier is not asked for what it does not have
            held = KeyedPages(wanted.items[here], wanted.namespaces)
            whole, upper = upper, self._upper.plan_load(next(self._own), held)
            self._upper.drop(whole)
        if ascent is not None:
            slots[ascent.rows] = ascent.reserved.slots
            seconds = max(seconds, ascent.read.deadline_seconds)
        self._touch_below(wanted, here)
        transfer = ChainTransfer(
            id=next(self._ids),
            direction=Direction.LOAD,
            groups=groups,
            pages=pages,
            slots=slots,
            deadline_seconds=seconds,
            upper_rows=here,
        )
        if ascent is not None:
            transfer = replace(transfer, lower_rows=ascent.rows, lower=ascent.read)
        missing = int((slots < 0).sum())
        if missing:
            crowded = len(below) - (len(ascent.rows) if ascent is not None else 0)
            why = (
                f"{NO_SPACE}: {crowded} of {len(slots)} pages have no slot in the tier above: all are"
                " held, or on their way there"
                if crowded
                else f"BadItem: {missing} of {len(slots)} items are in no tier"
            )
            transfer = replace(transfer, error=why)
        self._plans[transfer.id] = ChainPlan(len(slots), upper, here, ascent, None)
        return transfer

    def _plan_ascent(
        self, promise: ChainPromise | None, wanted: KeyedPages, rows: NDArray[np.intp]
    ) -> Ascent | None:
        """Slots of the upper tier for these items, and a load of the lower one into them."""
        if not len(rows):
            return None
        assert promise is not None
        assert promise.below is not None  # it has the rows
        items = wanted.items[rows]
        reserved = self._upper.plan_store(KeyedPages(items, wanted.namespaces))
        if reserved is None:
            return None
        store, chosen = reserved
        items = items[chosen].copy()
        items["page"] = store.slots
        read = self._lower.plan_load(promise.below.request, KeyedPages(items, wanted.namespaces))
        return Ascent(rows[chosen], read, store)

    def _below(
        self, promise: ChainPromise | None, wanted: KeyedPages, rows: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Those of the rows that the lower tier has: for others no page of the upper one is to go."""
        if promise is None or promise.below is None or promise.lower is None or not len(rows):
            return rows[:0]
        items, namespace = wanted.items[rows], promise.below.namespace
        ours = np.array([name == namespace for name in wanted.namespaces])[items["ns"]]
        groups = range(len(self._page_bytes))
        digests = [
            np.ascontiguousarray(items["digest"][ours & (items["group"] == g)]) for g in groups
        ]
        flags = self._lower.holds(RequestKeys(next(self._own), namespace, digests))
        if flags is not None:
            for g in groups:
                ours[ours & (items["group"] == g)] = flags[g] == 1
        below: NDArray[np.intp] = rows[ours]
        return below

    def _touch_below(self, wanted: KeyedPages, rows: NDArray[np.intp]) -> None:
        """What is in use above must not be the oldest below, and go from there first."""
        items = wanted.items[rows]
        for number in np.unique(items["ns"]).tolist():
            ours = items[items["ns"] == number]
            groups = range(len(self._page_bytes))
            digests = [np.ascontiguousarray(ours["digest"][ours["group"] == g]) for g in groups]
            keys = RequestKeys(next(self._own), wanted.namespaces[number], digests)
            self._lower.lookup(keys)
            self._lower.release(keys.request)  # also where it does not know yet

    def plan_store(self, pages: KeyedPages) -> tuple[ChainTransfer, NDArray[np.int64]] | None:
        """Into the upper tier. Does not look below: what is there alone may come up this way too."""
        plan = self._upper.plan_store(pages)
        if plan is None:
            return None
        store, chosen = plan
        transfer = ChainTransfer(
            id=next(self._ids),
            direction=Direction.STORE,
            groups=store.groups,
            pages=store.pages,
            slots=store.slots,
            deadline_seconds=store.deadline_seconds,
            upper_rows=np.arange(len(chosen)),
        )
        keys = lasting(KeyedPages(pages.items[chosen], pages.namespaces))
        rows = transfer.upper_rows
        self._plans[transfer.id] = ChainPlan(len(rows), store, rows, None, keys)
        return transfer, chosen

    # ---- results -------------------------------------------------------------------------------

    def complete(self, result: TransferResult) -> None:
        """Each tier learns what became of its part. What was stored waits to be written below."""
        counts, plan = self._counts, self._plans.get(result.id)
        if (
            plan is None
            or plan.upper.direction is not result.direction
            or (result.late and plan.late)
        ):
            counts.unknown_ids += 1
            return
        if result.late:
            plan.late = True
            counts.late_transfers += 1
            return
        del self._plans[result.id]
        ok, error = result.ok, result.error
        if len(ok) != plan.items:
            error = f"Malformed: a result of {len(ok)} items for {plan.items}"
            ok = np.zeros(plan.items, np.uint8)
        good = int((ok == 1).sum())
        self._complete_parts(plan, replace(result, ok=ok, error=error))
        count_result(counts, replace(result, error=error), good, plan.items)
        if plan.keys is not None and self._behind and good:
            keys = plan.keys._replace(items=plan.keys.items[ok == 1])
            self.descents.add(keys)

    def _complete_parts(self, plan: ChainPlan, result: TransferResult) -> None:
        """Each tier is told of its own items alone."""
        if plan.ascent is not None:
            rows, read, reserved = plan.ascent
            part, gone = self._part(result, read, rows), result.gone
            gone = gone[rows] if gone is not None and len(gone) == len(result.ok) else None
            self._lower.complete(replace(part, seconds=result.far_seconds, gone=gone))
            part = replace(part, id=reserved.id, direction=Direction.STORE)
            self._upper.complete(part)
        part = self._part(result, plan.upper, plan.here)
        self._upper.complete(replace(part, seconds=result.seconds - result.far_seconds))

    def _part(
        self, result: TransferResult, tiers: Transfer, rows: NDArray[np.intp]
    ) -> TransferResult:
        """What became of these items, as the result of the transfer that a tier planned."""
        ok = result.ok[rows]
        return replace(
            result,
            id=tiers.id,
            ok=ok,
            error="" if ok.all() else result.error,
            bytes=int(self._page_bytes[tiers.groups[ok == 1]].sum()),
            seconds=0.0,
            gone=None,
        )

    # ---- events, counts and invariants ---------------------------------------------------------

    def take_events(self) -> list[KeyEvent]:
        """Those of the upper tier, then those of the lower one, each with its medium."""
        events: list[KeyEvent] = []
        for tier in self.tiers:
            for event in tier.scheduler.take_events():
                if isinstance(event, KeysLost):
                    events.append(event)
                else:
                    events.append(event._replace(medium=event.medium or tier.medium))
        lost = [event for event in events if isinstance(event, KeysLost)]
        return [*lost[:1], *(event for event in events if not isinstance(event, KeysLost))]

    def stats(self) -> TierStats:
        """What the chain was asked for; fill and evictions of both tiers together.

        What is held for the background is not counted as pinned; its writes that failed are counted
        as failed, and what was not written for want of a slot or of time as dropped.
        """
        upper, lower, failures = self._upper.stats(), self._lower.stats(), self.descents.failures
        return replace(
            self._counts,
            errors=dict(Counter(self._counts.errors) + Counter(failures.errors)),
            failed_pages=self._counts.failed_pages + failures.failed_pages,
            late_transfers=self._counts.late_transfers + failures.late_transfers,
            capacity_bytes=upper.capacity_bytes + lower.capacity_bytes,
            used_bytes=upper.used_bytes + lower.used_bytes,
            pinned_pages=upper.pinned_pages + lower.pinned_pages - self.descents.held_pages,
            evicted_pages=upper.evicted_pages + lower.evicted_pages,
            groups=_sums(upper.groups, lower.groups),
            ready_bytes=upper.ready_bytes + lower.ready_bytes,
            not_ready=upper.not_ready or lower.not_ready,
            busy_calls=upper.busy_calls + lower.busy_calls,
            repairs=upper.repairs + lower.repairs,
            gone_pages=upper.gone_pages + lower.gone_pages,
            dropped_store_pages=upper.dropped_store_pages
            + lower.dropped_store_pages
            + self.descents.dropped_pages,
        )

    def open_work(self) -> OpenWork:
        """Without what sinks: the background goes on by itself."""
        return OpenWork(set(self._promises), set(self._plans))

    def check(self) -> None:
        """Both tiers hold together, and each holds what is promised and on its way here, no more."""
        self._upper.check()
        self._lower.check()
        plans = self._plans.values()
        ascents = [plan.ascent for plan in plans if plan.ascent is not None]
        asked = [p.below.request for p in self._promises.values() if p.below is not None]
        above = [plan.upper.id for plan in plans]
        held, written = self.descents.transfers
        above += [it.reserved.id for it in ascents] + held
        below = [it.read.id for it in ascents] + written
        require_same("upper", self._upper.open_work(), list(self._promises), above)
        require_same("lower", self._lower.open_work(), asked, below)


def _sums(upper: Sequence[GroupFill], lower: Sequence[GroupFill]) -> tuple[GroupFill, ...]:
    """Of each group in both tiers; nothing where one of them does not tell."""
    return tuple(a + b for a, b in zip(upper, lower, strict=True)) if upper and lower else ()
