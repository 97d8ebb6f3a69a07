"""Fault injection: a worker that wraps a real one and spoils its results, the same way each time.

The wrapped worker moves real bytes; what happens to a transfer follows from the seed, the transfer's
id, and how many were submitted before it, never from timing.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.connectors.base import (
    Connector,
    Direction,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
)

SETTLE_SECONDS = 30.0
SCRIBBLE = 0xEE


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities, each per transfer, `fail_item` per item."""

    fail_item: float = 0.0
    """The item is reported as failed. What a load's page has then is unknown: here the right bytes."""
    corrupt: float = 0.0
    """As that, for each item of a load, and its page is overwritten: a torn copy, or damaged bytes."""
    late: float = 0.0
    """A late result comes before the final one."""
    duplicate: float = 0.0
    """The final result comes twice."""
    drop: float = 0.0
    """No result comes until `recover`."""
    refuse: float = 0.0
    """`submit` says that the queue is full."""
    refuse_by_raising: float = 0.0
    """`submit` raises."""
    reorder: bool = False
    """Results come in random order."""
    hang_after: int | None = None
    """After so many transfers nothing more is heard, until `recover`; what it takes is bounded."""
    die_after: int | None = None
    """After so many transfers `submit` raises, and what was in flight never ends."""


FAULT_KINDS: Mapping[str, Faults] = {
    "delay": Faults(late=0.5),
    "drop": Faults(drop=0.3),
    "duplicate": Faults(duplicate=0.5),
    "reorder": Faults(reorder=True),
    "corrupt": Faults(corrupt=0.3),
    "partial": Faults(fail_item=0.3),
    "full": Faults(refuse=0.4),
    "hang": Faults(hang_after=20),
    "death": Faults(die_after=20),
}
"""One fault each, often enough that some hundred operations meet it many times."""


class FaultyWorker(TierWorker):
    """Wraps a worker.

    Args:
        hold: results are kept until `deliver`; otherwise `poll` gives them as they come.
    """

    def __init__(
        self, inner: TierWorker, faults: Faults, *, seed: int = 0, hold: bool = False
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._seed = seed
        self._hold = hold
        self._regions: Sequence[PageRegion] = ()
        self._open: dict[int, Transfer] = {}
        self._waiting: list[TransferResult] = []
        self._ready: list[TransferResult] = []
        self.dropped: list[TransferResult] = []
        self._taken = 0
        self._recovered = False

    @property
    def dead(self) -> bool:
        """Nothing is heard any more, ever."""
        return self._faults.die_after is not None and self._taken >= self._faults.die_after

    @property
    def _silent(self) -> bool:
        after = self._faults.hang_after
        return self.dead or (after is not None and self._taken >= after and not self._recovered)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Passed on; kept, to spoil pages of failed loads."""
        self._regions = regions
        self._inner.register(regions)

    def submit(self, transfer: Transfer) -> bool:
        """May refuse or raise; nothing is taken then."""
        chance = self._chance(transfer.id, "submit")
        if self.dead:
            raise ConnectionError(f"injected: nobody is there to take transfer {transfer.id}")
        if chance.random() < self._faults.refuse_by_raising:
            raise OSError(f"injected: transfer {transfer.id} was not taken")
        if chance.random() < self._faults.refuse:
            return False
        return self._note(transfer, taken=self._inner.submit(transfer))

    def slots_ready(self, transfer: Transfer) -> bool:
        """Passed on."""
        return self._inner.slots_ready(transfer)

    def make_ready(self, transfer: Transfer) -> bool:
        """Passed on."""
        return self._note(transfer, taken=self._inner.make_ready(transfer))

    def _note(self, transfer: Transfer, *, taken: bool) -> bool:
        if taken:
            self._taken += 1
            self._open[transfer.id] = transfer
        return taken

    def poll(self) -> list[TransferResult]:
        """Spoiled results; in `hold` mode those that `deliver` let through."""
        if not self._hold:
            self._pull()
            self._ready += self._waiting
            self._waiting.clear()
        out, self._ready = self._ready, []
        return out

    def wait(self, timeout_seconds: float) -> bool:
        """True if `poll` has something."""
        if self._silent:
            return False
        if self._hold or self._ready or self._waiting:
            return bool(self._ready or (self._waiting and not self._hold))
        return self._inner.wait(timeout_seconds)

    @property
    def slot_regions(self) -> Sequence[PageRegion] | None:
        """Passed on."""
        return self._inner.slot_regions

    def lend_slots(self) -> Callable[[], None]:
        """Passed on."""
        return self._inner.lend_slots()

    def at_end(self, call: Callable[[], None]) -> bool:
        """Passed on."""
        return self._inner.at_end(call)

    def flush(self, timeout_seconds: float) -> bool:
        """Passed on."""
        return self._inner.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Passed on."""
        return self._inner.close(timeout_seconds)

    # ---- the test's side -----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the wrapped worker has ended every transfer that it took."""
        self._pull()
        while self._open and not self._silent:
            if not self._inner.wait(SETTLE_SECONDS):
                raise TimeoutError(f"transfers {sorted(self._open)} did not end")
            self._pull()

    def deliver(self, count: int | None = None) -> int:
        """Settle, then let `count` held results through, all by default, by age of the transfer."""
        if self._silent:
            return 0
        self.settle()
        self._waiting.sort(key=lambda result: result.id)  # the thread's order depends on timing
        if self._faults.reorder:
            order = {r.id: self._chance(r.id, "order").random() for r in self._waiting}
            self._waiting.sort(key=lambda result: order[result.id])
        chosen = self._waiting[:count]
        del self._waiting[: len(chosen)]
        self._ready += chosen
        return len(chosen)

    def recover(self) -> None:
        """Let results through that were dropped; who hangs goes on. The dead stay dead."""
        self._recovered = True
        self._ready += self.dropped
        self.dropped.clear()

    # ---- spoiling ------------------------------------------------------------------------------

    def _chance(self, transfer_id: int, what: str) -> random.Random:
        return random.Random(f"{self._seed}/{transfer_id}/{what}")

    def _pull(self) -> None:
        if self._silent:
            return
        for result in self._inner.poll():
            if result.late or result.id not in self._open:
                self._waiting.append(result)
                continue
            transfer = self._open.pop(result.id)
            chance = self._chance(result.id, "result")
            events = []
            if chance.random() < self._faults.late:
                none_ok = np.zeros_like(result.ok)
                events.append(replace(result, ok=none_ok, late=True, error="Injected: late"))
            events += [self._spoil(transfer, result, chance)]
            if chance.random() < self._faults.duplicate:
                events.append(events[-1])
            if chance.random() < self._faults.drop:
                self.dropped += events
            else:
                self._waiting += events

    def _spoil(
        self, transfer: Transfer, result: TransferResult, chance: random.Random
    ) -> TransferResult:
        items = range(len(result.ok))
        failing = [i for i in items if chance.random() < self._faults.fail_item]
        torn = [i for i in items if chance.random() < self._faults.corrupt]
        if transfer.direction is Direction.STORE:
            torn = []
        if not (failing or torn):
            return result
        ok = result.ok.copy()
        ok[failing] = ok[torn] = 0
        for i in torn:
            region = self._regions[transfer.groups[i]]
            offset = int(transfer.pages[i]) * region.step_bytes
            for address in (a for copies in region.places for a in copies):
                ctypes.memset(address + offset, SCRIBBLE, region.part_bytes)
        return replace(result, ok=ok, error=f"Injected: {int((ok == 0).sum())} items failed")


def with_faults(
    connector: Connector, faults: Faults, *, seed: int = 0, hold: bool = False
) -> tuple[Connector, FaultyWorker]:
    """The connector with its worker wrapped, and the wrapper."""
    worker = FaultyWorker(connector.worker, faults, seed=seed, hold=hold)
    wrapped = Connector(connector.name, connector.scheduler, worker, connector.medium)
    return wrapped, worker
