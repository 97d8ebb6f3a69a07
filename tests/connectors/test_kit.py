"""Each fault of the kit leaves a connector as it should be, and breaks one that never thought of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiers.pieces import Trusting, cpu

from kvcache.connectors.base import (
    QUEUE_FULL,
    Connector,
    RequestKeys,
    TierWorker,
    Transfer,
    TransferResult,
)
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import (
    FAULT_KINDS,
    ContractError,
    Factory,
    Faults,
    FaultyWorker,
    RandomRun,
    Setup,
    under_fault,
)
from kvcache.core.errors import KVCacheError

LONG_AGO = 60
"""Transfers: none is in flight for longer unless something is wrong."""


# ---- connectors whose author thought of no fault ---------------------------------------------------


class LateIsFailed(PoolScheduler):
    """Takes a late result for the last one."""

    def complete(self, result: TransferResult) -> None:
        super().complete(replace(result, late=False))


class Impatient(PoolScheduler):
    """Gives slots back when a transfer seems to be lost."""

    def _start(self, *args: Any) -> Transfer:
        transfer = super()._start(*args)
        for number in [n for n in self._plans if n < transfer.id - LONG_AGO]:
            self.drop(replace(transfer, id=number))
        return transfer


class InOrder(PoolScheduler):
    """Takes each result for that of the oldest transfer."""

    def complete(self, result: TransferResult) -> None:
        mine = [n for n, plan in self._plans.items() if plan.direction is result.direction]
        super().complete(replace(result, id=mine[0]) if mine else result)


class AllOrNothing(PoolScheduler):
    """Reads the first item alone."""

    def complete(self, result: TransferResult) -> None:
        super().complete(replace(result, ok=np.full_like(result.ok, result.ok[:1].all())))


class Forgetting(PoolScheduler):
    """What the worker did not take was nothing."""

    def complete(self, result: TransferResult) -> None:
        if not result.error.startswith(QUEUE_FULL):
            super().complete(result)


class Patient(PoolScheduler):
    """Has no answer while it waits for something."""

    newest = 0

    def lookup(self, keys: RequestKeys) -> Any:
        oldest = min(self._plans, default=self.newest)
        return None if oldest < self.newest - LONG_AGO else super().lookup(keys)

    def _start(self, *args: Any) -> Transfer:
        transfer = super()._start(*args)
        self.newest = transfer.id
        return transfer


class Knowing(PoolScheduler):
    """Knows all errors that there are."""

    def complete(self, result: TransferResult) -> None:
        _ = {"": 0, "QueueFull": 1, "Injected": 2, "BadItem": 3}[result.error.partition(":")[0]]
        super().complete(result)


class Optimist(FaultyWorker):
    """A worker around another one, which takes what has ended for what is done."""

    def __init__(self, inner: TierWorker) -> None:
        super().__init__(inner, Faults())

    def poll(self) -> list[TransferResult]:
        return [
            r if "BadItem" in r.error else replace(r, ok=np.ones_like(r.ok)) for r in super().poll()
        ]


NAIVE: dict[str, type[PoolScheduler | TierWorker]] = {
    "delay": LateIsFailed,
    "drop": Impatient,
    "duplicate": Trusting,
    "reorder": InOrder,
    "corrupt": Optimist,
    "partial": AllOrNothing,
    "full": Forgetting,
    "hang": Patient,
    "death": Knowing,
}


def naive(scheduler: type[PoolScheduler]) -> Factory:
    def factory(setup: Setup) -> Connector:
        sound = cpu(setup)
        sizes = [group.page_bytes for group in setup.geometry.groups]
        broken = scheduler(
            sizes, setup.pages, deadline_seconds=setup.deadline_seconds, events=setup.events
        )
        return Connector("naive", broken, sound.worker, sound.medium)

    return factory


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_each_fault_breaks_a_connector_that_never_thought_of_it(kind: str) -> None:
    bug = NAIVE[kind]
    factory = naive(bug) if issubclass(bug, PoolScheduler) else cpu
    around = Optimist if bug is Optimist else None
    sound = RandomRun(factory, 0, Faults(), around)
    for _ in range(1_000):
        sound.step()  # without the fault nothing is wrong
    sound.finish()
    with pytest.raises((ContractError, KVCacheError, KeyError)):
        under_fault(factory, kind, around=around)
