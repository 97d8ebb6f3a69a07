"""The moving side of a chain: parts of a load side by side, then what came up goes on to the device.

    submit --> upper: its items -----------------------------------+
          +--> lower: into slots of the upper --> upper: these ----+--> one result

Slots of the upper tier are made ready by its own worker before the lower one writes them.

The workers of the tiers move the bytes, on threads of their own. Here their results are joined,
whenever `poll` or `wait` is called; and the background is kept going.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    QUEUE_FULL,
    Connector,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
    failed,
)
from kvcache.connectors.chain_records import ChainTransfer
from kvcache.connectors.chain_scheduler import ChainScheduler
from kvcache.connectors.copy_thread import describe
from kvcache.connectors.memory_users import Users
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.values import wait_seconds

SLICE_SECONDS = 0.005
"""How often a worker is asked that does not say when it has a result."""

CLOSE_SECONDS = 5.0


class _Kind(Enum):
    """What a part does."""

    READY = "makes slots of the upper tier ready; the lower one goes on with them"
    RISE = "the lower tier reads into slots of the upper one; that goes on with what is good"
    MOVE = "between the upper tier and the device"


@dataclass(slots=True, eq=False)
class _Part:
    """A transfer of one tier that is a part of a chain's."""

    worker: TierWorker
    transfer: Transfer
    rows: NDArray[np.intp]
    """Its items among those of the chain's."""
    kind: _Kind
    far: bool = False
    """Of what the lower tier has."""
    open: bool = False
    """The worker took it, and has not told its end."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A transfer of the chain without its final result."""

    transfer: Transfer
    due: float
    ok: NDArray[np.uint8]
    gone: NDArray[np.uint8]
    parts: list[_Part] = field(default_factory=list)
    """Those that have not ended."""
    error: str = ""
    seconds: float = 0.0
    far_seconds: float = 0.0
    bytes: int = 0
    late: bool = False
    ended: bool = False

    def result(self) -> TransferResult:
        return TransferResult(
            self.transfer.id,
            self.transfer.direction,
            self.ok,
            error=self.error or self._missing(),
            seconds=self.seconds,
            far_seconds=self.far_seconds,
            bytes=self.bytes,
            gone=self.gone if self.gone.any() else None,
        )

    def _missing(self) -> str:
        """What is wrong with items that have no part."""
        if isinstance(self.transfer, ChainTransfer):
            return self.transfer.error
        missing, n = int((self.transfer.slots < 0).sum()), len(self.transfer.slots)
        return f"BadItem: {missing} of {n} items are in no tier" if missing else ""


class ChainWorker(TierWorker):
    """Joins the workers of two tiers.

    Args:
        scheduler: the chain's, in the same process and called by the same thread: it is asked what
            is to be written to the lower tier.
    """

    def __init__(self, upper: Connector, lower: Connector, scheduler: ChainScheduler) -> None:
        self._upper, self._lower = upper.worker, lower.worker
        self._scheduler = scheduler
        self._flights: list[_Flight] = []
        self._parts: dict[tuple[TierWorker, int], tuple[_Flight, _Part]] = {}
        self._descents: dict[int, Transfer] = {}
        """Writes to the lower tier in the background, by the number its worker has them under."""
        self._results: list[TransferResult] = []
        self._ids = count(1)
        self._came = threading.Event()
        self._registered = self._closed = False
        self._give_back = self._upper.lend_slots()
        self._lower.at_end(self._give_back)
        told = [worker.notify(self._came.set) for worker in (self._upper, self._lower)]
        self._tells = all(told)

    def at_end(self, call: Callable[[], None]) -> bool:
        """Told by both tiers, if they tell."""
        tiers = Users(call)
        told = [(worker, tiers.add()) for worker in (self._upper, self._lower)]
        return all(worker.at_end(leave) for worker, leave in told)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Device pages for the upper tier; its slots are the pages of the lower one."""
        self._upper.register(regions)
        slots = self._upper.slot_regions
        if slots is None:
            raise ConfigError("the upper tier of a chain keeps its pages in no host memory")
        self._lower.register(slots)
        self._registered = True

    # ---- submit --------------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> bool:
        """False where a tier that is needed at once refuses. What only has to go on later, waits.

        Where a tier raises its part fails: another part may be on its way.
        """
        if not self._registered:
            raise MisuseError("submit was called before register named the device pages")
        n = len(transfer.pages)
        due = time.monotonic() + transfer.deadline_seconds
        flight = _Flight(transfer, due, np.zeros(n, np.uint8), np.zeros(n, np.uint8))
        parts = self._first_parts(transfer)
        if not parts:
            self._settle(flight)
        flight.parts += parts  # all of them: the end of one must not look like that of the last
        for part in parts:
            if not self._try(flight, part) and part is parts[0]:
                return False
        if not flight.ended:
            self._flights.append(flight)
        return True

    def _first_parts(self, transfer: Transfer) -> list[_Part]:
        """One for each tier that has something to move at once."""
        rows = np.flatnonzero(transfer.slots >= 0)
        parts = []
        if isinstance(transfer, ChainTransfer):
            rows = transfer.upper_rows
            if transfer.lower is not None:
                parts.append(self._rising(transfer, transfer.lower))
        if len(rows):
            parts.append(_Part(self._upper, _some(transfer, rows), rows, _Kind.MOVE))
        return parts

    def _rising(self, transfer: ChainTransfer, read: Transfer) -> _Part:
        """The first part of a read: its slots, where they are not ready; else the read itself."""
        slots = _some(transfer, transfer.lower_rows)
        if self._upper.slots_ready(slots):
            return _Part(self._lower, read, transfer.lower_rows, _Kind.RISE, far=True)
        return _Part(self._upper, slots, transfer.lower_rows, _Kind.READY)

    def _try(self, flight: _Flight, part: _Part) -> bool:
        """Hand it to its worker, or end it where that cannot be; False: its queue is full."""
        seconds = flight.due - time.monotonic()
        if seconds <= 0:
            self._end(flight, part, failed(part.transfer, _overdue(flight)))
            return True
        number = next(self._ids)
        own = replace(part.transfer, id=number, deadline_seconds=seconds)
        error = _offered(part.worker, own, moves=part.kind is not _Kind.READY)
        if error.startswith(QUEUE_FULL):
            return False
        if error:
            self._end(flight, part, failed(part.transfer, error))
            return True
        part.open = True
        self._parts[part.worker, number] = flight, part
        return True

    # ---- results -------------------------------------------------------------------------------

    def poll(self) -> list[TransferResult]:
        """Results since the last call."""
        self._pump()
        results, self._results = self._results, []
        return results

    def _pump(self) -> None:
        for worker in (self._lower, self._upper):
            for result in worker.poll():
                self._take(worker, result)
        for flight in [f for f in self._flights if any(not part.open for part in f.parts)]:
            for part in [part for part in flight.parts if not part.open]:
                self._try(flight, part)
        if not self._closed:
            self._descend()

    def _take(self, worker: TierWorker, result: TransferResult) -> None:
        if worker is self._lower and result.id in self._descents:
            self._end_descent(result)
            return
        found = self._parts.get((worker, result.id))
        if found is None:
            return
        flight, part = found
        if result.late:
            if not flight.late:
                flight.late = True
                late = failed(flight.transfer, result.error)
                self._results.append(replace(late, late=True))
            return
        del self._parts[worker, result.id]
        self._end(flight, part, result)

    def _end(self, flight: _Flight, part: _Part, result: TransferResult) -> None:
        """A part is over; the flight too, if it was the last and nothing has to go on."""
        flight.parts.remove(part)
        flight.error = flight.error or result.error
        if part.kind is not _Kind.READY:  # once for each slot: no measure of what loads take
            flight.seconds += result.seconds
            flight.far_seconds += result.seconds * part.far
        if part.kind is _Kind.MOVE:
            flight.ok[part.rows] = result.ok
            flight.bytes += result.bytes
        elif result.gone is not None:
            flight.gone[part.rows] = result.gone
        onward = self._onward(flight.transfer, part, result.ok == 1)
        if onward is not None:
            flight.parts.append(onward)
            self._try(flight, onward)
        self._settle(flight)

    def _onward(self, transfer: Transfer, part: _Part, good: NDArray[np.bool_]) -> _Part | None:
        """What comes after a part of which these items are good."""
        if part.kind is _Kind.MOVE or not good.any():
            return None
        rows = part.rows[good]
        if part.kind is _Kind.RISE:
            return _Part(self._upper, _some(transfer, rows), rows, _Kind.MOVE, far=True)
        assert isinstance(transfer, ChainTransfer)
        assert transfer.lower is not None
        read = transfer.lower  # an item without a page fails alone
        read = replace(read, pages=np.where(good, read.pages, np.int32(-1)))
        return _Part(self._lower, read, part.rows, _Kind.RISE, far=True)

    def _settle(self, flight: _Flight) -> None:
        """Its result, once, where no part is left."""
        if flight.parts or flight.ended:
            return
        flight.ended = True
        self._results.append(flight.result())
        if flight in self._flights:
            self._flights.remove(flight)

    def wait(self, timeout_seconds: float) -> bool:
        """Until there is a result, or the time is over. Keeps the background going meanwhile."""
        end = time.monotonic() + wait_seconds(timeout_seconds, "timeout_seconds")
        while True:
            self._came.clear()
            self._pump()
            now = time.monotonic()
            if self._results or now >= end:
                return bool(self._results)
            # A tier that does not say of itself what is late is waited for no less patiently.
            dues = [it.due for it in self._flights if not it.late and it.due > now]
            seconds = min([end, *dues]) - now
            self._came.wait(seconds if self._tells else min(seconds, SLICE_SECONDS))

    # ---- the background ------------------------------------------------------------------------

    def _descend(self) -> None:
        while (transfer := self._scheduler.descents.plan()) is not None:
            number = next(self._ids)
            error = _offered(self._lower, replace(transfer, id=number))
            if not error:
                self._descents[number] = transfer
                continue
            self._scheduler.descents.complete(failed(transfer, error))
            if error.startswith(QUEUE_FULL):
                return

    def _end_descent(self, result: TransferResult) -> None:
        transfer = self._descents[result.id] if result.late else self._descents.pop(result.id)
        self._scheduler.descents.complete(replace(result, id=transfer.id))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was stored lies in the lower tier, or could not be written there.

        What could not is counted (`TierStats.failed_pages`, `dropped_store_pages`, `errors`).
        """
        end = time.monotonic() + timeout_seconds
        while True:
            self._came.clear()
            self._pump()
            now = time.monotonic()
            if not len(self._scheduler.descents):
                return self._lower.flush(max(end - now, 0.0))
            if now >= end or self._closed:
                return False
            self._came.wait(min(end - now, math.inf if self._tells else SLICE_SECONDS))

    def stop(self) -> None:
        """Ends what is queued, in both tiers."""
        self._closed = True
        self._upper.stop()
        self._lower.stop()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """The lower tier first, as it reads and writes memory of the upper one.

        What is queued ends in both, also where the lower one takes its time. The memory goes when
        both have ended, also where nobody calls this; that of a lower tier that does not say so
        (`at_end`) only here.
        """
        end = time.monotonic() + timeout_seconds
        self.stop()
        closed = self._lower.close(timeout_seconds)
        if closed:
            self._give_back()
            closed = self._upper.close(max(end - time.monotonic(), 0.0))
        self._pump()
        return closed


def _offered(worker: TierWorker, transfer: Transfer, *, moves: bool = True) -> str:
    """Empty if it was taken; else why not."""
    try:
        taken = worker.submit(transfer) if moves else worker.make_ready(transfer)
    except Exception as fault:  # noqa: BLE001  (of one part; the others go on)
        return describe(fault)
    return "" if taken else f"{QUEUE_FULL}: the worker is busy"


def _some(transfer: Transfer, rows: NDArray[np.intp]) -> Transfer:
    """Some items of a chain's transfer, as one of the upper tier."""
    return Transfer(
        transfer.id,
        transfer.direction,
        transfer.groups[rows],
        transfer.pages[rows],
        transfer.slots[rows],
        transfer.deadline_seconds,
    )


def _overdue(flight: _Flight) -> str:
    return f"Deadline: {flight.transfer.deadline_seconds} s passed between two tiers"
