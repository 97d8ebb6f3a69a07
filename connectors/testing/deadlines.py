"""The part of the contract suite that is about deadlines and closing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcache.connectors.base import Transfer, TransferResult
from kvcache.connectors.testing import harness
from kvcache.connectors.testing.harness import Factory, Gate, Key, Rig, Setup, chain, expect, rig

SHORT_SECONDS = 0.1
"""A deadline that passes at once, while the copy before it is held by a gate."""

PATIENCE_SHARES = (0.1, 0.3)
"""Of the patience: deadlines after `SHORT_SECONDS`, where a copy had not begun in that time."""

ROUNDS = 16
"""So many copies of loads may end before a store whose deadline has passed."""


def a_late_transfer_keeps_its_slots_until_the_final_result(factory: Factory) -> None:
    """One late result, nothing good; then one final result, which counts."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        keys = chain("a", r.setup.pages[0])
        transfer, late = _late_while_running(r, gate, keys)
        before = r.scheduler.stats().late_transfers
        expect(not late.ok.any(), "an item of a late result is good")
        r.scheduler.complete(late)
        r.scheduler.complete(late)
        expect(not r.worker.poll(), "a second result came while the copy still ran")
        expect(r.plan_store(chain("b", 1)) is None, "a slot of a late store was given away")
        gate.open()
        final = r.next_result()
        expect(final.id == transfer.id and not final.late, "no final result followed a late one")
        r.scheduler.complete(final)
        expect(r.visible(keys) == final.ok.tolist(), "not exactly the good items are visible")
        expect(r.pinned() == 0, "slots of an ended transfer are held")
        stats = r.scheduler.stats()
        expect(stats.late_transfers == before + 1, "the late transfer was not counted once")
        expect(stats.unknown_ids == 1, "the second late result was not counted as unknown")


def a_queued_transfer_ends_at_its_deadline(factory: Factory) -> None:
    """Nobody touches its pages yet, so its end is final, while the worker is still busy."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        first, second = r.planned(chain("a", 2)), r.planned(chain("b", 2))
        gate.shut()
        r.submit(first)
        gate.wait_reached()
        r.submit(replace(second, deadline_seconds=SHORT_SECONDS))
        result = r.next_result()
        gate.open()
        expect(result.id == second.id and not result.late, "a queued transfer did not end")
        expect(not result.ok.any(), "an item is good that was never copied")
        r.scheduler.complete(result)
        r.scheduler.complete(r.next_result())
        expect(r.pinned() == 0, "slots of an ended transfer are held")


def a_queued_store_ends_at_its_deadline_behind_loads(factory: Factory) -> None:
    """And so does a load behind another one: neither waits for its turn to be told."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        keys = chain("a", 2)
        r.store(keys)
        gate.shut()
        running, queued = _planned_load(r, 1, keys), _planned_load(r, 2, keys)
        store = r.planned(chain("b", 2))
        r.submit(running)
        gate.wait_reached()
        for transfer in (queued, store):
            r.submit(replace(transfer, deadline_seconds=SHORT_SECONDS))
        got = r.results(queued.id, store.id)
        expect(running.id not in got, "a load ended though its copy is held")
        for results in (got[queued.id], got[store.id]):
            expect(len(results) == 1, "a queued transfer did not end at once")
            expect(not results[0].ok.any(), "an item is good that was never copied")
            r.scheduler.complete(results[0])
        gate.open()
        r.scheduler.complete(r.next_result())
        expect(r.pinned() == 0, "slots of an ended transfer are held")


def a_late_store_ends_while_loads_keep_coming(factory: Factory) -> None:
    """Loads go first, but what is overdue and not being copied needs no turn to end."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        keys = chain("a", 2)
        r.store(keys)
        # Two groups, so that there is more to copy when the first copy returns.
        store, late = _late_while_running(r, gate, chain("b", 2) + chain("b", 2, 1))
        r.scheduler.complete(late)
        ended = _end_under_loads(r, gate, keys, store.id)
        expect(ended, "a late store has no final result while loads keep coming")
        expect(not ended[0].late, "a second late result came")
        r.scheduler.complete(ended[0])
        expect(r.pinned() == 0, "slots of an ended transfer are held")


def _late_while_running(r: Rig, gate: Gate, keys: list[Key]) -> tuple[Transfer, TransferResult]:
    """A store of the keys whose deadline passes while its copy is held, and what is said then.

    On a busy machine it may pass before the copy begins; then that is a final end, and right.
    """
    gate.shut()
    for seconds in (SHORT_SECONDS, *(harness.PATIENCE_SECONDS * s for s in PATIENCE_SHARES)):
        transfer = replace(r.planned(keys), deadline_seconds=seconds)
        r.submit(transfer)
        result = r.next_result()
        expect(result.id == transfer.id, "a result of another transfer came")
        for _ in range(int(harness.PATIENCE_SECONDS / 0.01)):
            # It may be late just before its copy begins: then it ends without one.
            if not result.late or gate.reached or r.worker.wait(0.01):
                break
        if gate.reached:
            break
        if result.late:
            r.scheduler.complete(result)
            result = r.next_result()
        expect(not result.ok.any(), "an item is good that was never copied")
        r.scheduler.complete(result)
    expect(result.late, "a running transfer did not become late")
    return transfer, result


def _planned_load(r: Rig, request: int, keys: list[Key]) -> Transfer:
    expect(all(r.lookup(request, keys)), "stored keys are not visible")
    return r.plan_load(request, keys)


def _end_under_loads(r: Rig, gate: Gate, keys: list[Key], wanted: int) -> list[TransferResult]:
    """Results of a transfer that came while there was always a load to copy. Opens the gate."""
    loads: dict[int, Transfer] = {}
    found: list[TransferResult] = []

    def take(results: list[TransferResult]) -> None:
        for result in results:
            if result.id == wanted:
                found.append(result)
                continue
            r.scheduler.complete(result)
            r.verify(keys, loads.pop(result.id), result.ok)

    for request in range(ROUNDS):
        while len(loads) < 2:
            transfer = _planned_load(r, request, keys)
            r.submit(transfer)
            loads[transfer.id] = transfer
        gate.let_one()
        take(r.worker.poll())
        if found:
            break
    early = list(found)
    gate.open()
    for results in r.results(*loads).values():
        take(results)
    return early


def close_ends_every_transfer(factory: Factory) -> None:
    """Queued ones at once, the running one when its copy returns; nothing starts afterwards."""
    gate = Gate()
    with rig(factory, Setup(before_copy=gate)) as r:
        running, queued = r.planned(chain("a", 2)), r.planned(chain("b", 2))
        gate.shut()
        r.submit(running)
        gate.wait_reached()
        r.submit(queued)
        expect(not r.worker.close(SHORT_SECONDS), "close says that all is over, a copy runs")
        result = r.next_result()
        expect(result.id == queued.id and not result.ok.any(), "close did not end what was queued")
        r.scheduler.complete(result)
        gate.open()
        r.scheduler.complete(r.next_result())
        expect(r.worker.close(), "close says that something runs, nothing does")
        after = r.planned(chain("c", 1))
        expect(not r.run(after).ok.any(), "a transfer ran after close")
        expect(r.pinned() == 0, "slots of an ended transfer are held")


DEADLINE_RULES: tuple[Callable[[Factory], None], ...] = (
    a_late_transfer_keeps_its_slots_until_the_final_result,
    a_queued_transfer_ends_at_its_deadline,
    a_queued_store_ends_at_its_deadline_behind_loads,
    a_late_store_ends_while_loads_keep_coming,
    close_ends_every_transfer,
)
