"""The deciding side of a tier whose slots are numbered and whose index lives in this process.

Each group has its own slots and its own index (`Pool`), so keys of two groups never meet. A
slot is held by lookups that promised it and by transfers that use it; a slot that a store fills
has no key until its bytes are known to be complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    Direction,
    KeyedPages,
    OpenWork,
    RequestKeys,
    TierScheduler,
    TierStats,
    Transfer,
    TransferResult,
)
from kvcache.connectors.in_flight import KeysInFlight
from kvcache.connectors.key_events import KeyEvent, KeysLost
from kvcache.connectors.pool_chunks import PoolChunks
from kvcache.connectors.pool_events import pool_events
from kvcache.connectors.pool_promises import Promises
from kvcache.connectors.pool_records import Part, Plan, parts_of
from kvcache.connectors.pool_spaces import PoolSpaces
from kvcache.connectors.slots_aside import NO_SPACE, SlotsAside
from kvcache.connectors.tier_counts import count_result
from kvcache.connectors.tier_stats import GroupFill
from kvcache.core.errors import InvariantError
from kvcache.core.pool import PagePool, Pool, PoolBusyError
from kvcache.core.values import index_seed

MAX_WAITING_EVENTS = 1 << 20
"""Keys of one group that wait for `take_events`, 40 bytes each, before they are lost."""


class PoolScheduler(TierScheduler):
    """Lookup, pins, reservation and LRU over one `Pool` for each group.

    Args:
        slot_bytes: bytes of one slot, for each group.
        slots: number of slots, for each group.
        deadline_seconds: how long a transfer may take.
        events: whether `take_events` will be read.
        seed: of the pools' indexes; None: a random one.
        pools, spaces: the slots and the index of each group, and how these know namespaces; None:
            new ones.
        chunks: as for `SlotsAside`.

    A store that finds no slot (all held) is dropped and counted, never waited for. One that finds no
    room behind its slots sets the free ones aside for a while (`SlotsAside`).
    """

    def __init__(
        self,
        slot_bytes: Sequence[int],
        slots: Sequence[int],
        *,
        deadline_seconds: float,
        events: bool = False,
        seed: int | None = None,
        pools: Sequence[Pool] | None = None,
        spaces: PoolSpaces | None = None,
        chunks: PoolChunks | None = None,
    ) -> None:
        self._slot_bytes = tuple(slot_bytes)
        self.reports_events = events
        journal = MAX_WAITING_EVENTS if events else 0
        first = index_seed(seed, "PoolScheduler.seed")
        if pools is None or spaces is None:
            seeds = [(first + g) % 2**64 for g in range(len(slots))]
            own = [PagePool(n, seed=s, journal=journal) for n, s in zip(slots, seeds, strict=True)]
            pools, spaces = own, PoolSpaces(own)
        self._pools, self._numbers = pools, spaces
        self._aside = SlotsAside(self._pools, chunks)
        self._chunks = chunks
        self._deadline_seconds = deadline_seconds
        self._promises = Promises(self._pools, self._numbers)
        self._plans: dict[int, Plan] = {}
        self._storing: defaultdict[tuple[int, bytes], KeysInFlight] = defaultdict(KeysInFlight)
        """Of stores, by group and namespace."""
        self._ids = count(1)
        self._counts = TierStats(
            capacity_bytes=sum(b * n for b, n in zip(slot_bytes, slots, strict=True))
        )

    # ---- lookup --------------------------------------------------------------------------------

    def lookup(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """None only where another process has the lock of a pool; the arrays are read-only.

        O(1) when nothing was stored or evicted since the request's last lookup, O(keys from the
        first missing one on) otherwise.
        """
        return self._promises.lookup(keys)

    def narrow(self, keys: RequestKeys) -> None:
        """O(keys that are not wanted any more), without the index."""
        self._promises.narrow(keys)

    @property
    def version(self) -> Hashable:
        """Of the pools."""
        return tuple(pool.version for pool in self._pools)

    def holds(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """None only where another process has the lock of a pool. O(keys)."""
        return self._promises.holds(keys)

    def release(self, request: int) -> None:
        """Drop the request's pins."""
        if not self._promises.release(request):
            self._counts.unknown_ids += 1

    # ---- plans ---------------------------------------------------------------------------------

    def plan_load(self, request: int, wanted: KeyedPages) -> Transfer:
        """Holds the wanted slots for the transfer, then ends the request's promise."""
        items = wanted.items
        slots = np.full(len(items), -1, np.int64)
        parts = list(parts_of(wanted))
        promised = self._promises.take(request)
        for part in parts:
            number = self._numbers.get(part.namespace)
            if number is not None:
                held = promised[part.group] if promised else np.zeros(0, np.int32)
                digests = items["digest"][part.rows]
                slots[part.rows] = self._acquire(part.group, number, digests, held[held >= 0])
        self._promises.unhold(promised)
        return self._start(Direction.LOAD, items, slots, parts)

    def _acquire(
        self,
        group: int,
        number: int,
        digests: NDArray[np.uint8],
        held: NDArray[np.int32],  # noqa: ARG002
    ) -> NDArray[np.int32]:
        """The slots of the keys, held once more. `held`: what is promised, in the order of its keys."""
        return self._pools[group].acquire(number, digests)

    def plan_store(self, pages: KeyedPages) -> tuple[Transfer, NDArray[np.int64]] | None:
        """Reserves a slot for each page that is neither stored nor on its way."""
        self._aside.give_back_in_time()
        items = pages.items
        slots = np.full(len(items), -1, np.int64)
        parts = []
        for part in parts_of(pages):
            rows = self._unstored(items, part)
            taken = self._take(part.group, len(rows))
            if len(taken) < len(rows) and self._aside.give_back_for_want_of_others():
                more = self._take(part.group, len(rows) - len(taken))
                taken = np.concatenate([taken, more])
            self._counts.dropped_store_pages += len(rows) - len(taken)
            rows = rows[: len(taken)]
            if len(rows):
                slots[rows] = taken
                mark = self._storing[part.key].add(items["digest"][rows])
                parts.append(part._replace(rows=rows, mark=mark))
        chosen = np.flatnonzero(slots >= 0)
        if not len(chosen):
            return None
        place = np.cumsum(slots >= 0) - 1  # of a row among the chosen ones
        parts = [part._replace(rows=place[part.rows]) for part in parts]
        return self._start(Direction.STORE, items[chosen], slots[chosen], parts), chosen

    def _take(self, group: int, count: int) -> NDArray[np.int32]:
        """Up to `count` slots, held, whose keys are gone."""
        return self._pools[group].take(count)

    def _unstored(self, items: NDArray[np.void], part: Part) -> NDArray[np.intp]:
        """Rows of the part that are not stored, not being stored, and not repeated."""
        number = self._numbers.get(part.namespace)
        digests = items["digest"][part.rows]
        absent = np.ones(len(digests), np.bool_)
        if number is not None:
            with suppress(PoolBusyError):  # then no slot is to be had either
                absent = self._pools[part.group].present(number, digests) == 0
        new = self._storing.get(part.key, KeysInFlight()).new(digests[absent])
        rows: NDArray[np.intp] = part.rows[absent][new]
        return rows

    def _start(
        self,
        direction: Direction,
        items: NDArray[np.void],
        slots: NDArray[np.int64],
        parts: list[Part],
    ) -> Transfer:
        transfer = Transfer(
            id=next(self._ids),
            direction=direction,
            groups=np.ascontiguousarray(items["group"]),
            pages=np.ascontiguousarray(items["page"]),
            slots=slots,
            deadline_seconds=self._deadline_seconds,
            names=self._names(items, parts),
        )
        self._plans[transfer.id] = Plan(direction, items, slots, parts)
        return transfer

    def _names(
        self,
        items: NDArray[np.void],  # noqa: ARG002
        parts: list[Part],  # noqa: ARG002
    ) -> NDArray[np.uint8] | None:
        """What the worker knows the items by, where slots do not tell it."""
        return None

    # ---- results -------------------------------------------------------------------------------

    def complete(self, result: TransferResult) -> None:
        """Good stores get their keys; slots of a late transfer stay held until its final result."""
        counts, plan = self._counts, self._plans.get(result.id)
        if plan is None or plan.direction is not result.direction or (result.late and plan.late):
            counts.unknown_ids += 1
            return
        if result.late:
            plan.late = True
            counts.late_transfers += 1
            return
        del self._plans[result.id]
        ok, error = result.ok, result.error
        if len(ok) != len(plan.slots):
            error = f"Malformed: a result of {len(ok)} items for {len(plan.slots)}"
            ok = np.zeros(len(plan.slots), np.uint8)
        good = (ok == 1) & (plan.slots >= 0)
        gone = np.zeros(len(good), np.bool_)
        if result.gone is not None and len(result.gone) == len(good):
            gone = (result.gone == 1) & ~good & (plan.slots >= 0)
        for part in plan.parts:
            self._finish(plan, part, good[part.rows], gone[part.rows])
        count_result(counts, replace(result, error=error), int(good.sum()), len(good))
        stored = plan.direction is Direction.STORE
        if stored and not good.all() and f"{NO_SPACE}:" in error:  # maybe not the first of several
            self._aside.take()

    def drop(self, transfer: Transfer) -> None:
        """Its slots are let go; no counter moves."""
        plan = self._plans.pop(transfer.id)
        for part in plan.parts:
            none = np.zeros(len(part.rows), np.bool_)
            self._finish(plan, part, none, none)

    def open_work(self) -> OpenWork:
        """Never None."""
        return OpenWork(self._promises.requests, set(self._plans))

    def _finish(
        self, plan: Plan, part: Part, good: NDArray[np.bool_], gone: NDArray[np.bool_]
    ) -> None:
        slots = plan.slots[part.rows].astype(np.int32)
        if plan.direction is Direction.STORE:
            digests = plan.items["digest"][part.rows]
            if good.any():
                self._publish(part.group, part.namespace, digests[good], slots[good])
            storing = self._storing[part.key]
            storing.remove(part.mark)
            if not storing:
                del self._storing[part.key]
        elif gone.any():
            self._unpublish(part.group, slots[gone])
            self._counts.gone_pages += int(gone.sum())
        self._pools[part.group].release(slots[slots >= 0][::-1])

    def _publish(
        self, group: int, namespace: bytes, digests: NDArray[np.uint8], slots: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        """Held slots get their keys; 0 where another slot has it."""
        return self._pools[group].publish(self._numbers.give(namespace), digests, slots)

    def _unpublish(self, group: int, slots: NDArray[np.int32]) -> None:
        """Held slots lose their keys."""
        for slot in slots.tolist():
            self._pools[group].unpublish(slot)

    # ---- events, counts and invariants ---------------------------------------------------------

    def take_events(self) -> list[KeyEvent]:
        """Group after group. Empty unless made with `events`."""
        told: list[KeyEvent] = []
        lost = False
        for group, pool in enumerate(self._pools):
            for event in pool_events(group, pool.take_events(), self._numbers.names):
                if isinstance(event, KeysLost):
                    lost = True
                else:
                    told.append(event)
        return [KeysLost(), *told] if lost else told

    def stats(self) -> TierStats:
        """A copy of the counters, with the present fill."""
        out = replace(self._counts, errors=dict(self._counts.errors))
        for pool, aside, slot_bytes in zip(
            self._pools, self._aside.slots, self._slot_bytes, strict=True
        ):
            fill = pool.stats()
            held = fill.held - len(aside)  # those hold nothing
            used = max(0, fill.cached + held)  # those of a busy shared pool are not of one moment
            out.groups += (GroupFill(pool.capacity, used, fill.evictions),)
            out.used_bytes += used * slot_bytes
            out.pinned_pages += held
            out.evicted_pages += fill.evictions
        if self._chunks is not None:
            out.ready_bytes, out.not_ready = self._chunks.ready_bytes, self._chunks.error
        return out

    def check(self) -> None:
        """Every held slot has a holder, every holder holds, every store in flight is known."""
        holders = self._holders()
        for group, (pool, held) in enumerate(zip(self._pools, holders, strict=True)):
            pool.check()
            if pool.stats().held != len(held):
                raise InvariantError(
                    f"group {group}: {pool.stats().held} slots are held, lookups and transfers"
                    f" know of {len(held)}"
                )
        storing = sum(
            len(plan.slots) for plan in self._plans.values() if plan.direction is Direction.STORE
        )
        marked = sum(map(len, self._storing.values()))
        if storing != marked:
            raise InvariantError(
                f"{marked} keys are marked as being stored, transfers know of {storing}"
            )

    def _holders(self) -> list[Counter[int]]:
        """For each group how often each slot is held."""
        holders: list[Counter[int]] = [Counter() for _ in self._pools]
        for group, slots in self._promises.held():
            holders[group].update(slots.tolist())
        for plan in self._plans.values():
            for group, slot in zip(plan.items["group"].tolist(), plan.slots.tolist(), strict=True):
                if slot >= 0:
                    holders[group][slot] += 1
        for held, slots in zip(holders, self._aside.slots, strict=True):
            held.update(slots.tolist())
        return holders
