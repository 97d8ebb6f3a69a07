"""Whatever a tier does, a request ends, and reads no wrong byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiers.late import pass_deadlines
from tiers.pieces import transfer
from tiers.stamp_engine import (
    ATTENTION,
    GEOMETRY,
    PATIENCE,
    STATE,
    Engine,
    engine,
    refuse_loads,
    text,
)

from kvcache.connectors import offload_loads, offload_records, offload_stores
from kvcache.connectors.base import (
    KEYED_DTYPE,
    Direction,
    KeyedPages,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
)
from kvcache.connectors.cpu import native_copy
from kvcache.connectors.driver import MAX_FAILED_LOADS
from kvcache.connectors.testing import Faults, Gate


def test_a_failed_item_shortens_the_prefix_exactly() -> None:
    """The good part is a device hit at once; the next best state comes from the tier."""
    bad: list[int] = []

    def copy(source: PageRegion, target: PageRegion, *ids: Any) -> None:
        if bad and target.address == memory.ctypes.data and bad.pop() == 0:
            raise OSError("lost")
        native_copy(source, target, *ids)

    with engine(copy=copy) as e:
        memory = e.memory[ATTENTION]
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        bad[:] = [0, 1, 1, 1, 1, 1]  # the sixth block of the load fails, and what follows it
        again = e.serve(prompt)
        assert [h.hit_tokens for h in again.hits] == [40, 20]
        assert [h.device_tokens for h in again.hits] == [0, 0]
        assert e.offload.stats().errors == {"OSError": 1}
        e.assert_idle()


def test_a_tier_that_always_fails_costs_a_retry_and_no_request() -> None:
    def copy(source: PageRegion, *rest: Any) -> None:
        if source.address not in device:
            raise OSError("no")
        native_copy(source, *rest)

    with engine(copy=copy) as e:
        device = {m.ctypes.data for m in e.memory}
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        again = e.serve(prompt)
        assert [h.hit_tokens for h in again.hits] == [40, 0]
        assert e.offload.stats().loaded_pages == 0
        e.assert_idle()


def test_after_some_failed_loads_a_request_does_without_the_tier() -> None:
    """Each load loses one block only: the request is not sent round and round."""
    fails = 0

    def copy(source: PageRegion, target: PageRegion, *ids: Any) -> None:
        nonlocal fails
        if target.address == arena and target.page_bytes == GEOMETRY.groups[STATE].page_bytes:
            fails += 1
            raise OSError("a bad state")
        native_copy(source, target, *ids)

    with engine(copy=copy) as e:
        arena = e.arena.ctypes.data
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        again = e.serve(prompt)
        assert [h.hit_tokens for h in again.hits] == [40, 36, 32, 0]
        assert fails == MAX_FAILED_LOADS
        e.assert_idle()


def test_a_worker_that_raises_on_submit_is_a_miss() -> None:
    with engine(faults=Faults(refuse_by_raising=1.0)) as e:
        prompt = text(0, 41)
        e.serve(prompt)
        assert e.offload.stats().errors["OSError"] > 0
        assert e.offload.stats().stored_pages == 0
        assert e.manager.stats().pinned == 0


def test_a_load_that_cannot_be_submitted_is_not_tried_for_ever() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        refuse_loads(e)
        assert [h.hit_tokens for h in e.serve(prompt).hits] == [40, 0]
        e.assert_idle()


def test_a_full_queue_makes_the_request_wait_again() -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy, queue_depth=1) as e:
        prompts = [text(i, 21) for i in range(2)]
        for prompt in prompts:
            e.serve(prompt)
        e.manager.clear()
        gate.shut()
        first, second = (e.open(prompt) for prompt in prompts)
        e.step()
        gate.wait_reached()
        states = [e.requests[h].state for h in (first, second)]
        assert states == ["loading", "waiting"]
        assert e.offload.stats().errors == {"QueueFull": 1}
        gate.open()
        e.settle()
        assert [h.hit_tokens for h in e.run(second).hits] == [20, 20]


def test_a_late_load_gives_the_request_back_and_keeps_its_pages_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy) as e:
        prompt = text(0, 21)
        e.serve(prompt)
        e.manager.clear()
        gate.shut()
        handle = e.open(prompt)
        e.step()
        gate.wait_reached()
        pass_deadlines(monkeypatch)
        assert e.offload._worker.wait(PATIENCE)
        assert e.poll() == [(handle, False)]
        assert e.manager.stats().open_loads == 1
        assert e.manager.arena_stats().classes[1].held == 5  # in quarantine
        assert e.offload.stats().pinned_pages == 6
        while handle in e.requests:  # meanwhile it is computed
            e.step()
        e.check()
        gate.open()
        e.settle()
        assert e.offload.stats().late_transfers == 1
        e.assert_idle()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("how", ["abort", "preempt", "finish"])
def test_a_request_that_ends_during_its_load_is_not_reported(how: str, told: bool) -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy) as e:
        prompt = text(0, 21)
        e.serve(prompt)
        e.manager.clear()
        gate.shut()
        handle = e.open(prompt, output=1)
        e.step()
        gate.wait_reached()
        e.close(handle, how, told=told)
        assert e.manager.stats().open_loads == 1
        gate.open()
        assert e.offload.drain(PATIENCE)
        assert e.offload.poll() == []
        assert e.manager.stats().open_loads == 0
        if how == "preempt":
            assert e.run(handle).hits[-1].device_tokens == 20  # the load was not in vain
        e.assert_idle()


def test_close_in_the_middle_of_a_load_gives_the_request_back() -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy) as e:
        e.serve(text(0, 21))
        e.serve(text(1, 21))
        e.manager.clear()
        gate.shut()
        running, queued = e.open(text(0, 21)), e.open(text(1, 21))
        e.step()
        gate.wait_reached()
        e.offload.close(0.01)
        assert e.poll() == [(queued, False)]
        gate.open()
        e.offload.close(PATIENCE)
        assert e.poll() == [(running, False)]
        while e.requests:  # without the tier
            e.step()
            e.poll()
        e.assert_idle()


def test_a_preemption_does_not_make_a_bad_tier_good_again() -> None:
    """What failed stays masked; only the end of a request forgets it."""

    def copy(source: PageRegion, *rest: Any) -> None:
        if source.address not in device:
            raise OSError("no")
        native_copy(source, *rest)

    with engine(copy=copy) as e:
        device = {m.ctypes.data for m in e.memory}
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        handle = e.open(prompt, output=20)
        for _ in range(3):
            while e.requests[handle].state != "running":
                e.step()
                e.settle()
            e.close(handle, "preempt")
            e.manager.clear()
        assert e.offload.stats().errors == {"OSError": 1}
        e.close(handle, "abort")
        assert not e.offload._loads.faults
        e.assert_idle()


class Silent(TierWorker):
    """Takes transfers, and says nothing of those of one direction until asked to."""

    def __init__(self, inner: TierWorker, direction: Direction = Direction.LOAD) -> None:
        self.inner = inner
        self.direction = direction
        self.lost: list[TransferResult] = []
        self.longest = 0.0
        self._poll = inner.poll

    def register(self, regions: Sequence[PageRegion]) -> None:
        self.inner.register(regions)

    def submit(self, transfer: Transfer) -> bool:
        return self.inner.submit(transfer)

    def poll(self) -> list[TransferResult]:
        results = self._poll()
        self.lost += [r for r in results if r.direction is self.direction]
        return [r for r in results if r.direction is not self.direction]

    def everything(self, count: int) -> list[TransferResult]:
        """After all: so many results that were kept back, and what came beside them."""
        told: list[TransferResult] = []
        while len(self.lost) < count:
            assert self.inner.wait(PATIENCE)
            told += self.poll()
        return [*told, *self.lost]

    def wait(self, timeout_seconds: float) -> bool:
        self.longest = max(self.longest, timeout_seconds)
        return self.inner.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        return self.inner.close(timeout_seconds)


def soon(_: Transfer) -> float:
    """When the driver waits no longer, long before the worker's own deadline."""
    return time.monotonic() + 0.02


@contextmanager
def silent_load(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Engine, Silent, list[int], int]]:
    """A request whose load nobody tells the end of; in the end its result comes after all."""
    monkeypatch.setattr(offload_loads, "due_of", soon)
    with engine() as e:
        prompt = text(0, 21)
        e.serve(prompt)
        e.manager.clear()
        silent = Silent(e.offload._worker)
        e.offload._worker = silent
        handle = e.open(prompt)
        e.step()
        assert e.requests[handle].state == "loading"
        yield e, silent, prompt, handle
        e.offload._worker = silent.inner
        monkeypatch.setattr(silent.inner, "poll", lambda: silent.everything(1))
        assert e.offload.poll() == []
        monkeypatch.undo()
        e.settle()
        e.assert_idle()


def test_a_worker_that_says_nothing_costs_a_deadline_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with silent_load(monkeypatch) as (e, silent, _, handle):
        ended: list[tuple[int, bool]] = []
        for _ in range(9):  # what the worker keeps back wakes, too
            if not ended:
                assert e.offload.wait(PATIENCE)
                ended += e.poll()
        assert ended == [(handle, False)]
        assert silent.longest < 1  # it never wakes again by itself
        assert e.manager.stats().open_loads == 1
        assert e.manager.arena_stats().classes[1].held == 5  # in quarantine
        assert e.offload.stats().pinned_pages == 6
        assert e.offload.stats().late_transfers == 1
        assert not e.offload.drain(0.01)
        while handle in e.requests:  # meanwhile it is computed
            e.step()
        assert e.poll() == []
        e.check()


def test_a_load_whose_request_has_left_keeps_no_other_waiting_past_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with silent_load(monkeypatch) as (e, _, prompt, handle):
        e.close(handle, "abort")
        twin = e.manager.open(prompt)
        assert e.manager.lookup(twin).pending_tokens == 20
        for _ in range(9):
            if e.manager.lookup(twin).pending_tokens:
                assert e.offload.wait(PATIENCE)
                assert e.offload.poll() == []
        assert e.manager.lookup(twin).pending_tokens == 0
        assert e.manager.stats().open_loads == 1  # its pages are kept
        e.manager.abort(twin)


def test_a_store_that_nobody_tells_the_end_of_is_late_and_keeps_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may still be read. As many are held as may be in flight, however long it lasts."""
    monkeypatch.setattr(offload_stores, "due_of", soon)
    monkeypatch.setattr(offload_stores, "MAX_STORES", 2)
    monkeypatch.setattr(offload_stores, "STORE_BYTES", 1)  # one page each
    with engine() as e:
        silent = Silent(e.offload._worker, Direction.STORE)
        e.offload._worker = silent

        def serve(seed: int) -> None:
            handle = e.open(text(seed, 9))
            while handle in e.requests:
                e.step()

        serve(0)
        assert e.manager.stats().pinned == 2
        for _ in range(9):  # what the worker keeps back wakes, too
            if e.offload.stats().late_transfers < 2:
                assert e.offload.wait(PATIENCE)
                assert e.offload.poll() == []
        assert silent.longest < 1  # it never wakes again by itself
        serve(1)
        assert not e.offload.drain(0.01)
        assert e.offload.stats().late_transfers == 2  # once for each
        assert e.manager.stats().pinned == e.offload.stats().pinned_pages == 2
        e.check()
        e.offload._worker = silent.inner
        monkeypatch.setattr(silent.inner, "poll", lambda: silent.everything(2))
        assert e.offload.poll() == []
        monkeypatch.undo()
        e.settle()
        assert e.offload.stats().stored_pages > 0
        e.assert_idle()


def test_waiting_ends_at_once_where_poll_has_something() -> None:
    with engine() as e:
        prompt = text(0, 21)
        e.serve(prompt)
        e.manager.clear()
        handle = e.open(prompt)
        e.step()
        assert e.offload.drain(PATIENCE)  # its result stays for poll
        assert e.offload.wait(0.0)
        assert e.poll() == [(handle, True)]
        assert not e.offload.wait(0.0)


def test_a_transfer_is_waited_for_until_its_deadline_and_a_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(offload_records, "time", clock)
    due = offload_records.due_of(transfer(1, Direction.LOAD, [0], [0], deadline=7.0))
    assert due == 107.0 + offload_records.GRACE_SECONDS
    with engine(deadline_seconds=3.5) as e:
        e.serve(text(0, 21))
        plan = e.offload._scheduler.plan_load(1, KeyedPages(np.zeros(0, KEYED_DTYPE), []))
        assert plan.deadline_seconds == 3.5
        e.offload._scheduler.drop(plan)
