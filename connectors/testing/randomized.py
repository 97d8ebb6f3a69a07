"""Random operations on a connector, compared with a naive oracle after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcache.connectors.base import (
    QUEUE_FULL,
    Connector,
    Direction,
    TierWorker,
    Transfer,
    failed,
)
from kvcache.connectors.testing.events import Follower
from kvcache.connectors.testing.faults import FAULT_KINDS, Faults, with_faults
from kvcache.connectors.testing.harness import Factory, Key, Rig, Setup, chain, expect
from kvcache.connectors.testing.oracle import OracleTier
from kvcache.core.hashing import NATIVE_NAMESPACE

OPERATIONS = 10_000
REQUESTS = 4
FAULT_OPERATIONS = 1_000
MIXED = Faults(
    fail_item=0.05, corrupt=0.05, late=0.1, duplicate=0.1, drop=0.05, refuse=0.1, reorder=True
)
ENOUGH_PAGES = 24
"""Device pages that one operation may need, of each group."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer without final result."""

    keys: list[Key]
    transfer: Transfer
    held: list[list[Key]]
    """For each group what the oracle holds for it."""


class RandomRun:
    """Lookups, loads, stores, releases and results in random order.

    The worker moves real bytes; `FaultyWorker` spoils its results and keeps them until the run
    asks for them, so that the same seed gives the same run.

    Args:
        faults: those that it injects; by default a little of most.
        around: what a connector puts around the worker of another one: the faults come from inside.
    """

    def __init__(
        self,
        factory: Factory,
        seed: int,
        faults: Faults = MIXED,
        around: Callable[[TierWorker], TierWorker] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        setup = Setup(queue_depth=8, events=True)
        connector, self.worker = with_faults(factory(setup), faults, seed=seed, hold=True)
        if around is not None:
            outer = around(self.worker)
            connector = Connector(connector.name, connector.scheduler, outer, connector.medium)

        def ready(_: Setup) -> Connector:
            return connector

        self.rig = Rig(ready, setup)
        self.oracle: OracleTier[Key] = OracleTier(setup.pages)
        self.follower = Follower()
        self.flights: dict[int, _Flight] = {}
        self._given_up: set[int] = set()
        self.asked: dict[int, list[Key]] = {}
        self.chains = [
            [chain(name, 12, group, space) for group in range(2)]
            for space in (NATIVE_NAMESPACE, b"\x07" * 32)
            for name in ("a", "b")
        ]

    def step(self) -> None:
        """One operation, then every invariant."""
        operations = (self.look_up, self.load, self.store, self.release, self.deliver)
        operation = self.random.choices(operations, weights=(4, 3, 4, 1, 3))[0]
        if self.scarce:
            self.worker.recover()
            operation = self.deliver
        operation()
        self.rig.scheduler.check()
        pinned = sum(map(len, self.oracle.held)) + sum(map(len, self.oracle.storing))
        expect(self.rig.pinned() == pinned, f"{self.rig.pinned()} pages are pinned, not {pinned}")
        if self.rig.scheduler.reports_events and self.random.random() < 0.5:
            self.follow()

    @property
    def scarce(self) -> bool:
        """Whether one more operation may need device pages that there are not: all wait for results."""
        return min(len(free) for free in self.rig.device.free) < ENOUGH_PAGES

    def follow(self) -> None:
        """The events so far lead to the keys that the oracle has."""
        self.follower.apply(self.rig.scheduler.take_events())
        rows = [
            [*cached, *held]
            for cached, held in zip(self.oracle.cached, self.oracle.held, strict=True)
        ]
        expect(all(self.follower.knows(key) for row in rows for key in row), "a key was not told")
        told, there = len(self.follower.keys), sum(map(len, rows))
        expect(told == there, f"events told {told} keys, there are {there}")

    def finish(self) -> None:
        """Everything that is in flight ends; nothing stays pinned but for what the dead had taken."""
        while self.flights and not self.worker.dead:
            self.worker.recover()
            self.deliver()
        for request in list(self.oracle.promises):
            self._release(request)
        lost = sum(map(len, self.oracle.held)) + sum(map(len, self.oracle.storing))
        expect(not lost or self.flights, "the run lost count of its own transfers")
        expect(self.rig.pinned() == lost, "pages are pinned though nothing is in flight")
        self.rig.scheduler.check()
        self.rig.worker.close()

    def _pick(self) -> list[Key]:
        """A prefix of attention keys and some states of one chain."""
        attention, states = self.random.choice(self.chains)
        count = self.random.randint(0, len(attention))
        return attention[:count] + [key for key in states if self.random.random() < 0.3]

    def _by_group(self, keys: Sequence[Key]) -> list[list[Key]]:
        return [[key for key in keys if key.group == g] for g in range(len(self.oracle.capacities))]

    def look_up(self) -> None:
        """Of a new or a known request, with new keys or with the same ones again."""
        request, keys = self.random.randrange(REQUESTS), self._pick()
        if self.random.random() < 0.4:
            keys = self.asked.get(request, keys)
        self.asked[request] = keys
        seen = self.rig.lookup(request, keys)
        wanted = [flag for row in self.oracle.lookup(request, self._by_group(keys)) for flag in row]
        expect(seen == wanted, f"lookup reports {seen}, not {wanted}")

    def release(self) -> None:
        """Of a request that may have no pins."""
        self._release(self.random.randrange(REQUESTS))

    def _release(self, request: int) -> None:
        self.rig.scheduler.release(request)
        self.oracle.release(request)

    def load(self) -> None:
        """Some of what was promised, and now and then a key that was not."""
        if not self.oracle.promises:
            return
        request = self.random.choice(sorted(self.oracle.promises))
        promised = [key for row in self.oracle.promises[request] for key in row]
        keys = [key for key in promised if self.random.random() < 0.7]
        if self.random.random() < 0.2:
            keys = [Key("nobody"), *keys]
        held = self._by_group([key for key in keys if self.oracle.visible(key.group, key)])
        transfer = self.rig.plan_load(request, keys)
        self.oracle.plan_load(request, held)
        self._submit(_Flight(keys, transfer, held))

    def store(self) -> None:
        """Pages of one chain, some of them stored or travelling already."""
        keys = self._pick()
        plan = self.rig.plan_store(keys)
        wanted = self.oracle.plan_store(self._by_group(keys))
        covered = [] if plan is None else plan[1]
        expect(self._by_group(covered) == wanted, f"a store covers {covered}, not {wanted}")
        if plan is not None:
            self._submit(_Flight(covered, plan[0], wanted))

    def _submit(self, flight: _Flight) -> None:
        transfer = flight.transfer
        self.flights[transfer.id] = flight
        try:
            error = "" if self.rig.worker.submit(transfer) else f"{QUEUE_FULL}: refused"
        except OSError as fault:
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self.rig.scheduler.complete(failed(transfer, error))
            self._end(transfer.id, [0] * len(flight.keys))
        if self.worker.dead:
            self._give_up()

    def _give_up(self) -> None:
        """What nothing is heard of is late, for ever."""
        for number, flight in self.flights.items():
            if number not in self._given_up:
                self._given_up.add(number)
                result = failed(flight.transfer, "Silent: nothing is heard of it")
                self.rig.scheduler.complete(replace(result, late=True))

    def deliver(self) -> None:
        """Some of the results that are there."""
        self.worker.deliver(self.random.randint(1, 6))
        for result in self.rig.worker.poll():
            self.rig.scheduler.complete(result)
            if not result.late:
                self._end(result.id, result.ok.tolist())

    def _end(self, transfer_id: int, ok: list[int]) -> None:
        flight = self.flights.pop(transfer_id, None)
        if flight is None:  # a duplicate
            return
        for key, page, good in zip(flight.keys, flight.transfer.pages.tolist(), ok, strict=True):
            if good:
                expect(self.rig.device.holds(key, page), f"wrong bytes in the page of {key}")
            self.rig.device.give(key, page)
        if flight.transfer.direction is Direction.LOAD:
            self.oracle.end_load(flight.held)
        else:
            good_keys = [key for key, good in zip(flight.keys, ok, strict=True) if good]
            self.oracle.end_store(flight.held, self._by_group(good_keys))


def ten_thousand_random_operations(factory: Factory, seed: int = 0) -> None:
    """The tier answers as the oracle does, and every byte loaded is right."""
    _run(RandomRun(factory, seed), OPERATIONS)


def under_fault(
    factory: Factory,
    kind: str,
    seed: int = 0,
    *,
    around: Callable[[TierWorker], TierWorker] | None = None,
    operations: int = FAULT_OPERATIONS,
) -> None:
    """The same with one fault alone, many times.

    Args:
        factory: makes the connector.
        kind: a key of `FAULT_KINDS`.
        seed: another one, another run.
        around: as for `RandomRun`.
        operations: so many.

    Raises:
        ContractError: an answer that is not the oracle's, wrong bytes, pages held for nobody.
    """
    _run(RandomRun(factory, seed, FAULT_KINDS[kind], around), operations)


def _rule(kind: str) -> Callable[[Factory], None]:
    def rule(factory: Factory) -> None:
        under_fault(factory, kind)

    rule.__name__ = f"{kind}_is_survived"
    rule.__doc__ = f"A thousand random operations under `FAULT_KINDS[{kind!r}]`."
    return rule


FAULT_RULES = tuple(map(_rule, FAULT_KINDS))


def _run(run: RandomRun, operations: int) -> None:
    for _ in range(operations):
        if run.worker.dead and run.scarce:
            break
        run.step()
    run.finish()
