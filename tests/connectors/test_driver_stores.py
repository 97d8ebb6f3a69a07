"""Which pages are stored, and what happens to those that are not."""

from __future__ import annotations

from typing import Any

import pytest
from tiers.stamp_engine import (
    PATIENCE,
    engine,
    text,
)

from kvcache.connectors import offload_stores
from kvcache.connectors.base import Transfer
from kvcache.connectors.cpu import native_copy
from kvcache.connectors.testing import Gate


def test_pages_wait_for_their_turn_unheld_and_are_counted_when_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    monkeypatch.setattr(offload_stores, "STORE_BYTES", 100)
    monkeypatch.setattr(offload_stores, "MAX_STORES", 2)
    with engine(copy=copy) as e:
        gate.shut()
        for seed in range(3):
            handle = e.open(text(seed, 41))
            while handle in e.requests:
                e.step()
        assert 0 < e.manager.stats().pinned <= 4
        gate.open()
        assert e.offload.drain(PATIENCE)
        stats = e.offload.stats()
        assert stats.dropped_store_pages > 0
        assert stats.stored_pages + stats.dropped_store_pages == 3 * (10 + 10)
        e.assert_idle()


def test_stores_go_on_without_steps_as_results_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_stores, "STORE_BYTES", 1)
    monkeypatch.setattr(offload_stores, "MAX_STORES", 1)
    with engine() as e:
        handle = e.open(text(0, 21))
        while handle in e.requests:
            e.step()
        while e.offload.stats().stored_pages < 10:
            assert e.offload._worker.wait(PATIENCE)
            assert e.offload.poll() == []
        assert e.offload.stats().dropped_store_pages == 0


def test_a_tier_smaller_than_the_prompt_stores_what_fits() -> None:
    with engine(tier=(4, 2)) as e:
        e.serve(text(0, 41))
        e.serve(text(0, 41))
        e.assert_idle()
        assert e.offload.stats().used_bytes <= e.offload.stats().capacity_bytes


def test_pages_that_the_tier_has_already_are_let_go_at_once() -> None:
    """One store covers only what is new; nothing of the rest stays pinned."""
    with engine() as e:
        e.serve(text(0, 21))
        stored = e.offload.stats().stored_pages
        e.manager.clear()
        step = e.manager.begin_step()
        handle = e.open([*text(0, 21), *text(1, 8)])
        e.manager.lookup(handle)  # without the tier: all is computed again
        grant = e.manager.allocate(handle, 29)
        assert grant is not None
        e.compute(handle, e.requests[handle], grant)
        e.manager.end_step(step)
        e.offload.end_of_step()
        e.check()
        e.close(handle, "abort")
        e.settle()
        assert e.offload.stats().stored_pages - stored == 2 + 2
        e.assert_idle()


def test_drain_says_so_when_the_time_is_over() -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy) as e:
        gate.shut()
        handle = e.open(text(0, 9))
        while handle in e.requests:
            e.step()
        assert not e.offload.drain(0.01)
        assert e.manager.stats().pinned > 0
        gate.open()
        assert e.offload.drain(PATIENCE)
        e.assert_idle()


def test_a_full_queue_delays_stores_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page a store, two stores at a time: the others wait for their turn."""
    monkeypatch.setattr(offload_stores, "STORE_BYTES", 1)
    with engine(slabs=16, queue_depth=2) as e:
        handle = e.open(text(0, 101))
        while handle in e.requests:
            e.step(chunk=101)
        assert e.offload.drain(PATIENCE)
        stats = e.offload.stats()
        assert stats.errors["QueueFull"] > 0
        assert stats.dropped_store_pages == 0
        assert stats.stored_pages == e.manager.group_stats(0).keyed + e.manager.group_stats(1).keyed
        e.assert_idle()


def test_a_store_that_is_refused_by_an_idle_worker_is_offered_again() -> None:
    with engine() as e:
        submit, refusals = e.offload._worker.submit, iter(range(9))

        def busy(transfer: Transfer) -> bool:
            return next(refusals, None) is None and submit(transfer)

        e.offload._worker.submit = busy  # type: ignore[method-assign]
        handle = e.open(text(0, 9))
        while handle in e.requests:
            e.step()
        assert e.offload.drain(PATIENCE)
        assert e.offload.stats().errors == {"QueueFull": 9}
        assert e.offload.stats().stored_pages == 2 + 2


def test_pages_that_close_finds_waiting_are_counted_as_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_stores, "MAX_STORES", 1)
    monkeypatch.setattr(offload_stores, "STORE_BYTES", 1)
    with engine() as e:
        handle = e.open(text(0, 9))
        while handle in e.requests:
            e.step(chunk=9)
        waiting = e.offload._stores.waiting
        assert waiting > 0
        assert e.offload.close(PATIENCE)
        assert e.offload.stats().dropped_store_pages == waiting


def test_drain_does_not_wait_for_stores_that_cannot_begin() -> None:
    """The oldest request waits for space, pages wait for their turn: only a step helps."""
    with engine(slabs=7) as e:
        submit = e.offload._worker.submit
        e.offload._worker.submit = lambda _: False  # type: ignore[method-assign]
        handles = [e.open(text(seed, 33), output=12) for seed in range(3)]
        for _ in range(60):
            e.step()
            if e.manager.stats().frozen:
                break
        assert e.manager.stats().frozen
        assert e.offload._stores.waiting
        assert not e.offload.drain(1e5)
        e.offload._worker.submit = submit  # type: ignore[method-assign]
        for handle in handles[1:]:
            if handle in e.requests:
                e.close(handle, "abort")
        e.run(handles[0])
        assert e.offload.drain(PATIENCE)
        e.assert_idle()
