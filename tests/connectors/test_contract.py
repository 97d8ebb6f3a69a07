"""The CPU connector keeps the contract; and the suite notices a connector that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiers.pieces import Trusting

from kvcache.connectors import testing
from kvcache.connectors.base import (
    Connector,
    Direction,
    PageRegion,
    RequestKeys,
    TierWorker,
    Transfer,
    TransferResult,
)
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.key_events import KeysRemoved, KeysStored
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import CONTRACT, ContractError, Factory, Setup
from kvcache.core.errors import ConfigError, KVCacheError, MisuseError
from kvcache.core.hashing import NATIVE_NAMESPACE


def cpu(setup: Setup) -> Connector:
    def copy(*args: Any) -> None:
        setup.before_copy()
        native_copy(*args)

    return CpuConnector(
        setup.geometry,
        pages=setup.pages,
        queue_depth=setup.queue_depth,
        deadline_seconds=setup.deadline_seconds,
        events=setup.events,
        copy=copy,
    )


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_the_cpu_connector_keeps_the_contract(rule: Callable[[Factory], None]) -> None:
    rule(cpu)


# ---- connectors with one fault each --------------------------------------------------------------


class EarlyIndex(PoolScheduler):
    """Publishes a store when it is planned."""

    def plan_store(self, pages: Any) -> Any:
        plan = super().plan_store(pages)
        if plan is not None:
            for group, slot, digest in zip(
                plan[0].groups, plan[0].slots, pages.items["digest"][plan[1]], strict=True
            ):
                self._pools[group].publish(0, digest[None], np.array([slot], np.int32))
        return plan


class Unpinned(PoolScheduler):
    """Promises without holding."""

    def lookup(self, keys: RequestKeys) -> Any:
        flags = super().lookup(keys)
        self.release(keys.request)
        return flags


class Forgetful(PoolScheduler):
    """Never ends the pins of a lookup."""

    def release(self, request: int) -> None:
        self._promises.take(request)


class Clinging(PoolScheduler):
    """Keeps the pins of what is not wanted any more."""

    def narrow(self, keys: RequestKeys) -> None:
        """Does nothing."""


class Versionless(PoolScheduler):
    """Has the same version for ever."""

    version = 1


class Grasping(PoolScheduler):
    """Holds what it is asked about."""

    def holds(self, keys: RequestKeys) -> Any:
        return self.lookup(keys)


class OneNamespace(PoolScheduler):
    """Takes all namespaces for one."""

    def lookup(self, keys: RequestKeys) -> Any:
        return super().lookup(keys._replace(namespace=b"\x01" * 32))


class Credulous(PoolScheduler):
    """Takes every store for good."""

    def complete(self, result: TransferResult) -> None:
        super().complete(replace(result, ok=np.ones_like(result.ok)))


class Hasty(PoolScheduler):
    """Takes a late result for the final one."""

    def complete(self, result: TransferResult) -> None:
        super().complete(replace(result, late=False))


class Repeating(PoolScheduler):
    """Stores keys again that are on their way."""

    def _unstored(self, items: Any, part: Any) -> Any:
        self._storing.clear()
        return super()._unstored(items, part)


class Hopeful(PoolScheduler):
    """Tells stores when they are planned."""

    def plan_store(self, pages: Any) -> Any:
        plan = super().plan_store(pages)
        if plan is not None:
            digests = np.ascontiguousarray(pages.items["digest"][plan[1]])
            self.planned = KeysStored(0, NATIVE_NAMESPACE, digests)
        return plan

    def take_events(self) -> Any:
        planned = [self.planned] if hasattr(self, "planned") else []
        return planned + [e for e in super().take_events() if not isinstance(e, KeysStored)]


class Keeping(PoolScheduler):
    """Tells no eviction."""

    def take_events(self) -> Any:
        return [e for e in super().take_events() if not isinstance(e, KeysRemoved)]


class Grouped(PoolScheduler):
    """Tells all keys as those of one group."""

    def take_events(self) -> Any:
        return [e._replace(group=0) for e in super().take_events()]  # type: ignore[union-attr]


class Wrapped(TierWorker):
    """Passes on; subclasses change one thing."""

    def __init__(self, inner: TierWorker) -> None:
        self.inner = inner

    def register(self, regions: Any) -> None:
        self.inner.register(regions)

    def submit(self, transfer: Transfer) -> bool:
        return self.inner.submit(transfer)

    def poll(self) -> list[TransferResult]:
        return self.inner.poll()

    def wait(self, timeout_seconds: float) -> bool:
        return self.inner.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        return self.inner.close(timeout_seconds)


class Boastful(Wrapped):
    """Reports every item as good."""

    def poll(self) -> list[TransferResult]:
        return [replace(r, ok=np.ones_like(r.ok)) for r in super().poll()]


class Shifted(Wrapped):
    """Loads the neighbour's slot."""

    def submit(self, transfer: Transfer) -> bool:
        if transfer.direction is Direction.LOAD and len(transfer.slots) > 1:
            transfer = replace(transfer, slots=np.roll(transfer.slots, 1))
        return super().submit(transfer)


class Timeless(Wrapped):
    """Knows no deadlines."""

    def submit(self, transfer: Transfer) -> bool:
        return super().submit(replace(transfer, deadline_seconds=1e6))


class Silent(Wrapped):
    """Loses results with an error."""

    def poll(self) -> list[TransferResult]:
        return [r for r in super().poll() if not r.error]


class Lenient(Wrapped):
    """Takes whatever regions it gets, and the last ones."""

    def register(self, regions: Any) -> None:
        with suppress(KVCacheError):
            super().register(regions)


class Eager(Wrapped):
    """Takes transfers before it knows of any page."""

    def submit(self, transfer: Transfer) -> bool:
        try:
            return super().submit(transfer)
        except MisuseError:
            return True


class Unfair(Wrapped):
    """Ends a late store only when no load is left."""

    def __init__(self, inner: TierWorker) -> None:
        super().__init__(inner)
        self.loads: set[int] = set()
        self.late: set[int] = set()
        self.kept: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> bool:
        if transfer.direction is Direction.LOAD:
            self.loads.add(transfer.id)
        return super().submit(transfer)

    def poll(self) -> list[TransferResult]:
        results = self.kept + super().poll()
        self.loads -= {r.id for r in results if not r.late}
        self.kept = [r for r in results if self.loads and not r.late and r.id in self.late]
        self.late |= {r.id for r in results if r.late}
        return [r for r in results if r not in self.kept]


class LoadsOnly(Wrapped):
    """Tells of stores only when no load is left."""

    def __init__(self, inner: TierWorker) -> None:
        super().__init__(inner)
        self.loads: set[int] = set()
        self.kept: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> bool:
        if transfer.direction is Direction.LOAD:
            self.loads.add(transfer.id)
        return super().submit(transfer)

    def poll(self) -> list[TransferResult]:
        results = self.kept + super().poll()
        self.loads -= {r.id for r in results}
        self.kept = [r for r in results if self.loads and r.direction is Direction.STORE]
        return [r for r in results if r not in self.kept]


class Cheerful(Wrapped):
    """Says that all is over while a copy runs."""

    def close(self, timeout_seconds: float = 5.0) -> bool:
        super().close(timeout_seconds)
        return True


class Endless(Wrapped):
    """Never says that the queue is full."""

    def submit(self, transfer: Transfer) -> bool:
        super().submit(transfer)
        return True


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (EarlyIndex, {"a_store_is_visible_only_after_complete": "page 0 has a key already"}),
        (
            Unpinned,
            {
                "a_promise_survives_pressure": "a promised key is gone",
                "lookup_is_idempotent": "three lookups pin 0 pages, not 2",
            },
        ),
        (
            Forgetful,
            {
                "lookup_is_idempotent": "pins are left after release",
                "a_new_lookup_replaces_the_old": "pins are left after release",
            },
        ),
        (Clinging, {"what_is_not_wanted_any_more_is_let_go": "two pages are wanted, 4 pinned"}),
        (Versionless, {"a_version_tells_when_lookups_would_find_more": "the version is the same"}),
        (Grasping, {"what_is_held_is_told_without_a_promise": "a question pins: 2 pages"}),
        (OneNamespace, {"namespaces_never_mix": "a key is visible in another namespace"}),
        (
            Credulous,
            {
                "a_failed_store_leaves_no_key": "not exactly the good items are visible",
                "a_copy_that_raises_fails_its_transfer_only": "a failed store is visible",
            },
        ),
        (
            Hasty,
            {
                "a_late_transfer_keeps_its_slots_until_the_final_result": (
                    "a slot of a late store was given away"
                )
            },
        ),
        (Repeating, {"a_key_is_stored_once": "a key in flight was planned again"}),
        (Hopeful, {"events_tell_a_key_when_it_is_visible": "a planned store was told"}),
        (
            Keeping,
            {
                "events_tell_what_was_evicted": "do not give the keys that a lookup finds",
                "ten_thousand_random_operations": r"events told \d+ keys, there are \d+",
            },
        ),
        (
            Grouped,
            {
                "events_tell_a_key_when_it_is_visible": "a key was told twice",
                "events_tell_what_was_evicted": "a key was told twice",
            },
        ),
        (Trusting, {"unknown_results_are_counted_and_ignored": "^1$"}),
        (Boastful, {"an_unknown_key_fails_its_item_alone": "wrong bytes were loaded"}),
        (Shifted, {"bytes_come_back_in_every_group": "wrong bytes were loaded"}),
        (Timeless, {"a_queued_transfer_ends_at_its_deadline": "no result came"}),
        (Silent, {"a_copy_that_raises_fails_its_transfer_only": "no final result came"}),
        (Endless, {"a_full_queue_refuses_and_loses_nothing": "accepted by a blocked worker"}),
        (Lenient, {"device_pages_are_named_once_and_first": "not refused by ConfigError"}),
        (Eager, {"device_pages_are_named_once_and_first": "not refused by MisuseError"}),
        (
            Unfair,
            {
                "a_late_store_ends_while_loads_keep_coming": (
                    "a late store has no final result while loads keep coming"
                )
            },
        ),
        (
            LoadsOnly,
            {"a_queued_store_ends_at_its_deadline_behind_loads": "no final result came"},
        ),
        (Cheerful, {"close_ends_every_transfer": "close says that all is over"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_connector_with_one_fault_breaks_a_rule(
    fault: type[Any], rules: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(setup: Setup) -> Connector:
        connector = cpu(setup)
        if issubclass(fault, PoolScheduler):
            sizes = [g.page_bytes for g in setup.geometry.groups]
            scheduler = fault(
                sizes,
                setup.pages,
                deadline_seconds=setup.deadline_seconds,
                events=setup.events,
            )
            return Connector("broken", scheduler, connector.worker)
        return Connector("broken", connector.scheduler, fault(connector.worker))

    monkeypatch.setattr(
        "kvcache.connectors.testing.harness.PATIENCE_SECONDS", 0.5
    )  # for what never comes
    by_name = {rule.__name__: rule for rule in CONTRACT}
    for name, message in rules.items():
        with pytest.raises((ContractError, KVCacheError, KeyError), match=message):
            by_name[name](factory)


def test_the_kit_needs_no_test_runner() -> None:
    assert not hasattr(testing, "pytest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": True}, "PageRegion.parts is True"),
        ({"parts": ((1.5,),)}, "an address of PageRegion.parts is 1.5"),
        ({"parts": ((True,),)}, "an address of PageRegion.parts is True"),
        ({"parts": ((2**64,),)}, "an address of PageRegion.parts is 18446744073709551616"),
        ({"parts": (None,)}, "a part of it is None"),
        ({"pages": 2**31}, "PageRegion.pages is 2147483648"),
        ({"page_bytes": "x" * 100_000}, "PageRegion.page_bytes is 'x"),
    ],
)
def test_a_region_that_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PageRegion(**{"address": 0, "page_bytes": 64, "pages": 4, **change})
    assert len(str(caught.value)) < 300


def test_a_transfer_has_one_of_each_for_each_item() -> None:
    def made(groups: int, pages: int, slots: int, seconds: float) -> Transfer:
        arrays = [np.zeros(n, t) for n, t in ((groups, "i4"), (pages, "i4"), (slots, "i8"))]
        return Transfer(7, Direction.LOAD, *arrays, deadline_seconds=seconds)

    assert len(made(2, 2, 2, 1.0).pages) == 2
    with pytest.raises(ConfigError, match="transfer 7 has 2 groups, 1 pages and 2 slots"):
        made(2, 1, 2, 1.0)
    with pytest.raises(ConfigError, match=r"Transfer\.deadline_seconds is nan"):
        made(1, 1, 1, float("nan"))
