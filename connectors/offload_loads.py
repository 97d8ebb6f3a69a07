"""Loads of one `Offload`: submitted once, ended by their results, given up where none comes."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    QUEUE_FULL,
    KeyedPages,
    LoadBytes,
    TierScheduler,
    Transfer,
    TransferResult,
)
from kvcache.connectors.offload_records import Faults, Load, Timing, due_of, silence
from kvcache.core.errors import HandleError, MisuseError
from kvcache.core.manager import Manager

MAX_TIMINGS = 64
"""Of loads that ended: as many are kept for `take_timings`, the newest."""


class Loads:
    """Loads in flight, and what of each request could not be loaded.

    Args:
        submit: gives a transfer to the worker; empty, or why it was not taken.
    """

    def __init__(
        self, manager: Manager, scheduler: TierScheduler, submit: Callable[[Transfer], str]
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._submit = submit
        self._loads: dict[int, Load] = {}
        self._dropped: list[int] = []
        """Loads of grants that were never started, of requests that were released since."""
        self._ended: list[tuple[int, bool]] = []
        self._page_bytes = np.array([g.page_bytes for g in manager.geometry.groups], np.int64)
        self._timings: deque[Timing] = deque(maxlen=MAX_TIMINGS)
        self.faults: dict[int, Faults] = {}
        """Of each request, until it is forgotten."""

    def __len__(self) -> int:
        """Loads that have not come to their end, with those that never began."""
        return len(self._loads) + len(self._dropped)

    @property
    def in_flight(self) -> bool:
        """Whether a result is to be expected."""
        return bool(self._loads)

    @property
    def due(self) -> float:
        """When the next one that says nothing is given up."""
        return min((it.due for it in self._loads.values() if not it.given_up), default=math.inf)

    def knows(self, load: int) -> bool:
        """Whether the manager's load was started, or is to be ended unstarted."""
        return load in self._dropped or any(it.load == load for it in self._loads.values())

    def start(self, handle: int, load: int) -> bool:
        """Plan and submit the manager's load of a request. False: it was not taken.

        Raises:
            MisuseError: it was started before.
        """
        if any(it.load == load for it in self._loads.values()):
            raise MisuseError(f"load {load} was started already: once for each grant")
        items = self._manager.load_items(load)
        pages = KeyedPages(items, self._manager.namespaces)
        transfer = self._scheduler.plan_load(handle, pages)
        if load in self._dropped:
            self._dropped.remove(load)
        error = self._submit(transfer)
        if error:
            self._manager.end_load(load, np.zeros(len(items), np.uint8))
            if not error.startswith(QUEUE_FULL):
                self._note_fault(handle, items)
            return False
        due = due_of(transfer)
        self._loads[transfer.id] = Load(handle, load, items, transfer, due)
        return True

    def drop(self, load: int) -> None:
        """A load that was granted and never started: it ends by the next `end_dropped`."""
        self._dropped.append(load)

    def leave(self, handle: int) -> None:
        """The result of a load for this request is not reported any more."""
        for load in self._loads.values():
            if load.handle == handle:
                load.wanted = False

    def end_dropped(self) -> None:
        """Those that were never started are over, with nothing loaded."""
        while self._dropped:
            dropped = self._dropped.pop()
            with contextlib.suppress(HandleError):  # the engine has ended it
                count = len(self._manager.load_items(dropped))
                self._manager.end_load(dropped, np.zeros(count, np.uint8))

    def silent(self) -> list[TransferResult]:
        """A late result for each whose time, and grace, is over."""
        now = time.monotonic()
        return [
            silence(load.transfer)
            for load in self._loads.values()
            if not load.given_up and load.due <= now
        ]

    def end(self, result: TransferResult) -> None:
        """A late or final result. Unknown ids are ignored here."""
        load = self._loads.get(result.id)
        if load is None:
            return
        if not load.given_up and (result.late or (len(result.ok) and result.ok.all())):
            self._note_timing(load, result)
        waits = load.wanted and load.is_awaited(self._manager)
        ok = result.ok == 1
        if len(ok) != len(load.items) or result.late:
            ok = np.zeros(len(load.items), np.bool_)
        if waits and not ok.all():
            self._note_fault(load.handle, load.items[~ok])
        if result.late:  # a twin must not wait for it, though its own request may have left
            if not load.given_up:
                self._manager.abandon_load(load.load)
            load.given_up = True
        else:
            del self._loads[result.id]
            self._manager.end_load(load.load, ok.astype(np.uint8))
        if waits:
            self._ended.append((load.handle, bool(ok.all())))
        load.wanted = False

    @property
    def loading_bytes(self) -> LoadBytes:
        """Of loads in flight that were not given up."""
        each = [self._bytes(load) for load in self._loads.values() if not load.given_up]
        return LoadBytes(sum(one.near for one in each), sum(one.far for one in each))

    def _bytes(self, load: Load) -> LoadBytes:
        sizes = self._page_bytes[load.items["group"]]
        far = int(sizes[load.transfer.far_rows].sum())
        return LoadBytes(int(sizes.sum()) - far, far)

    def _note_timing(self, load: Load, result: TransferResult) -> None:
        size = self._bytes(load)
        if result.late:  # that of the slower
            waited = load.transfer.deadline_seconds
            self._timings.append(Timing(size.far or size.near, waited, far=size.far > 0))
            return
        if size.near:
            self._timings.append(Timing(size.near, result.seconds - result.far_seconds, far=False))
        if size.far:
            self._timings.append(Timing(size.far, result.far_seconds, far=True))

    def take_timings(self) -> list[Timing]:
        """Of loads that ended since the last call, late ones as long as they waited."""
        timings = list(self._timings)
        self._timings.clear()
        return timings

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something."""
        return bool(self._ended)

    def take_ended(self) -> list[tuple[int, bool]]:
        """Requests whose load ended since the last call, and whether all of it is there."""
        ended, self._ended = self._ended, []
        return ended

    def _note_fault(self, handle: int, items: NDArray[np.void]) -> None:
        faults = self.faults.setdefault(handle, Faults())
        faults.note(items, self._manager.geometry.block_tokens)
