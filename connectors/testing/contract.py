"""The contract suite: what every connector must do, as functions that any test runner can call.

Tiers put together (a chain, several at once) keep all but `POOL_RULES`, which know of one pool of
slots in one order of age.

    from kvcache.connectors.testing import CONTRACT, Setup

    def factory(setup: Setup) -> Connector:
        return MyConnector(setup.geometry, pages=setup.pages, before_copy=setup.before_copy, ...)

    @pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
    def test_contract(rule):
        rule(factory)

A rule raises `ContractError` saying what was expected. Only deadlines wait for time to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from kvcache.connectors.base import QUEUE_FULL, Direction, Transfer, TransferResult, failed
from kvcache.connectors.testing.deadlines import DEADLINE_RULES
from kvcache.connectors.testing.events import EVENT_RULES
from kvcache.connectors.testing.harness import (
    PATIENCE_SECONDS,
    ContractError,
    Device,
    Factory,
    Gate,
    Key,
    Setup,
    chain,
    expect,
    rig,
)
from kvcache.connectors.testing.lookups import LOOKUP_RULES
from kvcache.connectors.testing.randomized import FAULT_RULES, ten_thousand_random_operations
from kvcache.connectors.testing.ranks import RANK_RULES
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.hashing import NATIVE_NAMESPACE

# ---- what is stored comes back -------------------------------------------------------------------


def bytes_come_back_in_every_group(factory: Factory) -> None:
    """Round trip, and the counters of it."""
    with rig(factory) as r:
        keys = chain("a", 5, 0) + chain("a", 4, 1)
        expect(r.store(keys) == keys, "an empty tier did not take all pages")
        expect(all(r.lookup(1, keys)), "stored keys are not visible")
        expect(all(r.load(1, keys)), "a plain load failed")
        stats = r.scheduler.stats()
        sizes = [g.page_bytes for g in r.setup.geometry.groups]
        expect(stats.stored_pages == stats.loaded_pages == 9, "pages were not counted")
        expect(stats.stored_bytes == 5 * sizes[0] + 4 * sizes[1], "stored bytes were not counted")
        expect(stats.pinned_pages == 0, "pins are left after a finished load")


def the_fill_is_what_was_stored(factory: Factory) -> None:
    """In bytes of pages."""
    with rig(factory) as r:
        r.store(chain("a", 5, 0) + chain("a", 4, 1))
        stats = r.scheduler.stats()
        expect(stats.used_bytes == stats.stored_bytes > 0, "the fill is not what was stored")


def a_store_is_visible_only_after_complete(factory: Factory) -> None:
    """Neither planned, nor moved, nor polled is enough."""
    with rig(factory) as r:
        keys = chain("a", 3)
        transfer = r.planned(keys)
        expect(not any(r.visible(keys)), "a planned store is visible")
        r.submit(transfer)
        result = r.results(transfer.id)[transfer.id][-1]
        expect(not any(r.visible(keys)), "a store is visible before complete() saw its result")
        r.scheduler.complete(result)
        expect(all(r.visible(keys)), "a completed store is not visible")


def a_key_is_stored_once(factory: Factory) -> None:
    """Neither stored nor travelling keys are planned again, nor one key twice in a call."""
    with rig(factory) as r:
        keys = chain("a", 3)
        plan = r.plan_store([*keys, keys[0]])
        if plan is None or plan[1] != keys:
            raise ContractError("one key was planned twice in one store, or none at all")
        expect(r.plan_store(keys) is None, "a key in flight was planned again")
        r.run(plan[0])
        expect(r.plan_store(keys) is None, "a stored key was planned again")


def namespaces_never_mix(factory: Factory) -> None:
    """Equal digests in two namespaces are two keys."""
    with rig(factory) as r:
        spaces = [NATIVE_NAMESPACE, b"\x01" * 32, b"\x02" * 32]
        rows = [chain("a", 2, 0, space) for space in spaces]
        r.store(rows[0] + rows[1])
        expect(all(r.visible(rows[1])), "a stored key is not visible in its namespace")
        expect(not any(r.visible(rows[2])), "a key is visible in another namespace")
        for request, row in enumerate(rows[:2]):
            r.lookup(request, row)
            expect(all(r.load(request, row)), "a plain load failed")


def groups_never_mix(factory: Factory) -> None:
    """Equal digests in two groups are two keys."""
    with rig(factory) as r:
        r.store(chain("a", 2, 0))
        expect(not any(r.visible(chain("a", 2, 1))), "a key is visible in another group")
        both = chain("a", 2, 0) + chain("a", 2, 1)
        r.store(both[2:])
        r.lookup(1, both)
        expect(all(r.load(1, both)), "a plain load failed")


# ---- pins ----------------------------------------------------------------------------------------


# ---- a full tier ---------------------------------------------------------------------------------


def the_oldest_is_evicted_first(factory: Factory) -> None:
    """LRU; a lookup makes its keys young; the tail of a prefix goes before its head."""
    with rig(factory) as r:
        capacity = r.setup.pages[0]
        keys = chain("a", capacity)
        for key in keys:
            r.store([key])
        expect(all(r.visible(keys[:2])), "a tier lost keys before it was full")
        r.store(chain("b", capacity - 2))
        expect(r.visible(keys) == [1, 1] + [0] * (capacity - 2), "not the oldest keys were evicted")
        r.store(chain("c", capacity - 2))
        r.store([Key("d")])
        expect(r.visible(keys[:2]) == [1, 0], "a head was evicted before its tail")
        stats = r.scheduler.stats()
        expect(stats.evicted_pages == 2 * capacity - 3, "evictions were not counted")
        gone = sum(group.evicted_pages for group in stats.groups)
        expect(not stats.groups or gone == stats.evicted_pages, "groups evicted more or less")


def a_tier_full_of_pins_drops_stores(factory: Factory) -> None:
    """No error and no waiting: what finds no slot is counted."""
    with rig(factory) as r:
        keys = chain("a", r.setup.pages[0] - 1)
        r.store(keys)
        r.lookup(1, keys)
        expect(r.store(chain("b", 3)) == chain("b", 1), "not the one slot left was used")
        r.lookup(2, chain("b", 1))
        expect(r.plan_store(chain("c", 2)) is None, "a store was planned into pinned slots")
        expect(r.scheduler.stats().dropped_store_pages == 4, "dropped pages were not counted")
        expect(all(r.load(1, keys)), "a promised key could not be loaded")


def a_full_queue_refuses_and_loses_nothing(factory: Factory) -> None:
    """`submit` says False; what was accepted is finished, what was refused ends its pins."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        keys = chain("a", 2)
        r.store(keys)
        gate.shut()
        accepted, refused = {}, 0
        for request in range(4 * r.setup.queue_depth):
            r.lookup(request, keys)
            transfer = r.plan_load(request, keys)
            if r.worker.submit(transfer):
                accepted[transfer.id] = transfer
            else:
                refused += 1
                r.scheduler.complete(failed(transfer, f"{QUEUE_FULL}: refused"))
        gate.open()
        expect(refused > 0, f"{len(accepted)} transfers were accepted by a blocked worker")
        got = r.results(*accepted)
        for transfer in accepted.values():
            result = got[transfer.id][-1]
            r.scheduler.complete(result)
            expect(result.ok.all(), "an accepted load failed")
            r.verify(keys, transfer, result.ok)
        expect(r.pinned() == 0, "pins are left")
        expect(r.scheduler.stats().errors == {QUEUE_FULL: refused}, "refusals were not counted")


# ---- failures ------------------------------------------------------------------------------------


def an_unknown_key_fails_its_item_alone(factory: Factory) -> None:
    """The rest of the load is good."""
    with rig(factory) as r:
        keys = chain("a", 3)
        r.store([keys[0], keys[2]])
        r.lookup(1, keys)
        expect(r.load(1, keys) == [1, 0, 1], "not exactly the unknown key failed")
        expect(r.scheduler.stats().failed_pages == 1, "the failed page was not counted")


def a_failed_store_leaves_no_key(factory: Factory) -> None:
    """Only good items are published; the slots of the others are free again."""
    with rig(factory) as r:
        keys = chain("a", r.setup.pages[0])
        transfer = r.planned(keys)
        r.submit(transfer)
        result = r.results(transfer.id)[transfer.id][-1]
        ok = result.ok.copy()
        ok[1::2] = 0
        r.scheduler.complete(replace(result, ok=ok, error="Injected: every second item"))
        expect(r.visible(keys) == ok.tolist(), "not exactly the good items are visible")
        expect(r.store(keys[1::2]) == keys[1::2], "slots of failed items were lost")
        expect(all(r.visible(keys)), "a key was evicted though slots were free")
        expect(r.scheduler.stats().errors == {"Injected": 1}, "the error was not counted")


def a_copy_that_raises_fails_its_transfer_only(factory: Factory) -> None:
    """The text arrives, the next transfer works."""
    broken = True

    def before_copy() -> None:
        if broken:
            raise OSError("no more bytes")

    with rig(factory, Setup(before_copy=before_copy)) as r:
        keys = chain("a", 2)
        result = r.run(r.planned(keys))
        expect(not result.ok.any(), "an item is good though its copy raised")
        expect(result.error == "OSError: no more bytes", f"the error reads {result.error!r}")
        expect(not any(r.visible(keys)), "a failed store is visible")
        broken = False
        expect(r.store(keys) == keys, "a store after a failed one did not work")
        expect(r.scheduler.stats().errors == {"OSError": 1}, "the error was not counted")


def unknown_results_are_counted_and_ignored(factory: Factory) -> None:
    """Ids never planned, results that come twice, a wrong direction, a release of nobody."""
    with rig(factory) as r:
        keys = chain("a", 2)
        transfer = r.planned(keys)
        result = r.run(transfer)
        load = replace(result, direction=Direction.LOAD)
        ghost = TransferResult(transfer.id + 1000, Direction.STORE, np.ones(2, np.uint8))
        for event in (result, replace(result, late=True), load, ghost):
            r.scheduler.complete(event)
        r.scheduler.release(77)
        expect(r.scheduler.stats().unknown_ids == 5, "unknown ids were not counted")
        expect(all(r.visible(keys)), "an unknown result changed the index")


def a_malformed_result_is_a_failure(factory: Factory) -> None:
    """Flags that do not fit the transfer publish nothing and leave no pin."""
    with rig(factory) as r:
        keys = chain("a", 2)
        transfer = r.planned(keys)
        r.scheduler.complete(TransferResult(transfer.id, Direction.STORE, np.ones(3, np.uint8)))
        expect(not any(r.visible(keys)), "a malformed result published keys")
        expect(r.pinned() == 0, "pins are left")


# ---- registration --------------------------------------------------------------------------------


def device_pages_are_named_once_and_first(factory: Factory) -> None:
    """Wrong regions, a second `register` and a `submit` before it are refused, with no effect."""
    setup = Setup()
    worker = factory(setup).worker
    regions = Device(setup.geometry, 8).regions()
    none = np.zeros(1, np.int32)
    transfer = Transfer(1, Direction.LOAD, none, none, none.astype(np.int64), PATIENCE_SECONDS)
    wrong = (
        regions[:-1],
        [*regions, regions[0]],
        regions[::-1],
        [replace(r, pages=0) for r in regions],
    )
    try:
        _expect_refused(MisuseError, lambda: worker.submit(transfer), "submit before register")
        for some in wrong:
            _expect_refused(ConfigError, partial(worker.register, some), f"regions {some}")
        worker.register(regions)
        _expect_refused(MisuseError, lambda: worker.register(regions), "a second register")
    finally:
        worker.close(PATIENCE_SECONDS)


def _expect_refused(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise ContractError(f"not refused by {kind.__name__}: {what}")


POOL_RULES: tuple[Callable[[Factory], None], ...] = (
    the_fill_is_what_was_stored,
    the_oldest_is_evicted_first,
    ten_thousand_random_operations,
    *FAULT_RULES,
)
"""For one pool of slots in one order of age."""

CONTRACT: tuple[Callable[[Factory], None], ...] = (
    bytes_come_back_in_every_group,
    a_store_is_visible_only_after_complete,
    a_key_is_stored_once,
    namespaces_never_mix,
    groups_never_mix,
    *LOOKUP_RULES,
    a_tier_full_of_pins_drops_stores,
    a_full_queue_refuses_and_loses_nothing,
    an_unknown_key_fails_its_item_alone,
    a_failed_store_leaves_no_key,
    a_copy_that_raises_fails_its_transfer_only,
    unknown_results_are_counted_and_ignored,
    a_malformed_result_is_a_failure,
    device_pages_are_named_once_and_first,
    *RANK_RULES,
    *DEADLINE_RULES,
    *EVENT_RULES,
    *POOL_RULES,
)
"""Every rule takes a factory and raises `ContractError` where the connector breaks it."""
