"""Offload and Manager together, on pages whose bytes are checked at each read.

Every page carries a stamp: a digest of the tokens (and salt) that its content stands for. What a
request reads must carry the stamp of exactly its own prefix, wherever the bytes came from.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvcache.connectors import driver
from kvcache.connectors.base import KEYED_DTYPE, Direction, PageRegion, Transfer
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.driver import MAX_FAILED_LOADS, Offload
from kvcache.connectors.testing import Faults, FaultyWorker, Gate, with_faults
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED, Grant, Hit
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.retention import Dense, Sparse

PATIENCE = 30.0
BLOCK = 4
ATTENTION, STATE = 0, 1
GEOMETRY = Geometry(
    (
        FullAttention(
            name="attention", layers=2, kv_heads=1, head_dim=3, block_tokens=BLOCK, element_bytes=1
        ),
        RecurrentState(name="state", layers=1, state_bytes_per_layer=77),
    )
)


def stamp(group: int, tokens: Sequence[int], salt: str) -> np.ndarray[Any, Any]:
    text = repr((group, list(tokens), salt)).encode()
    size = GEOMETRY.groups[group].page_bytes
    return np.frombuffer(hashlib.shake_256(text).digest(size), np.uint8)


@dataclass
class Request:
    tokens: list[int]
    target: int
    salt: str = ""
    state: str = "waiting"
    hits: list[Hit] = field(default_factory=list)


class Engine:
    """The smallest engine: one request after the other in a step, bytes are stamps."""

    def __init__(
        self,
        *,
        pages: Sequence[int] = (16, 8),
        tier: Sequence[int] = (64, 24),
        retention: Any = None,
        faults: Faults | None = None,
        seed: int = 0,
        copy: Callable[..., None] = native_copy,
        **options: Any,
    ) -> None:
        self.manager = Manager(GEOMETRY, pages=pages, retention=retention or Dense())
        self.memory = [
            np.zeros((n, g.page_bytes), np.uint8)
            for n, g in zip(pages, GEOMETRY.groups, strict=True)
        ]
        connector: Any = CpuConnector(GEOMETRY, pages=tier, copy=copy, batch_bytes=1, **options)
        self.faulty: FaultyWorker | None = None
        if faults is not None:
            connector, self.faulty = with_faults(connector, faults, seed=seed, hold=True)
        self.offload = Offload(self.manager, connector, self.regions())
        self.requests: dict[int, Request] = {}

    def regions(self) -> list[PageRegion]:
        return [PageRegion(m.ctypes.data, m.shape[1], m.shape[0]) for m in self.memory]

    # ---- a request's life ----
    def open(self, tokens: Sequence[int], output: int = 0, salt: str = "") -> int:
        target = len(tokens) + output
        handle = self.manager.open(np.array(tokens, np.int32), max_tokens=target + 1, salt=salt)
        self.requests[handle] = Request(list(tokens), target, salt)
        return handle

    def step(self, chunk: int = 8) -> None:
        step = self.manager.begin_step()
        for handle, request in list(self.requests.items()):
            if request.state != "loading":
                self.advance(handle, request, chunk)
        self.manager.end_step(step)
        self.offload.end_of_step()
        for handle, request in list(self.requests.items()):
            if self.manager.info(handle).computed >= request.target:
                self.close(handle, "finish")
        self.offload.end_of_step()

    def advance(self, handle: int, request: Request, chunk: int) -> None:
        manager = self.manager
        if request.state == "waiting":
            hit = self.offload.lookup(handle)
            assert hit is not None
            request.hits.append(hit)
            grant = manager.allocate(handle, min(chunk, len(request.tokens) - hit.hit_tokens))
            if grant is None:
                return
            request.state = "loading" if grant.load else "running"
            if not self.offload.start_load(handle, grant):
                request.state = "waiting"
            if request.state != "running":
                return
        else:
            committed = manager.info(handle).committed
            grant = manager.allocate(handle, min(chunk, len(request.tokens) - committed))
            if grant is None:
                return
        self.compute(handle, request, grant)

    def compute(self, handle: int, request: Request, grant: Grant) -> None:
        """Reads everything before the grant and checks it; writes what the grant covers."""
        tokens, start, end = request.tokens, grant.start, grant.end
        table = self.manager.block_table(handle, ATTENTION)
        plan = self.manager.state_plan(handle, STATE)
        for i, page in enumerate(table.tolist()):
            upto = min(start, (i + 1) * BLOCK)
            if upto > i * BLOCK:
                self.expect(ATTENTION, page, tokens[:upto], request.salt)
        if start:
            self.expect(STATE, plan.source, tokens[:start], request.salt)
        for i in range(start // BLOCK, -(-end // BLOCK)):
            upto = min(end, (i + 1) * BLOCK)
            self.memory[ATTENTION][table[i]] = stamp(ATTENTION, tokens[:upto], request.salt)
        for position, page in zip(plan.positions.tolist(), plan.pages.tolist(), strict=True):
            self.memory[STATE][page] = stamp(STATE, tokens[:position], request.salt)
        self.manager.commit(handle, end)
        if end == len(tokens) < request.target:
            tokens.append(sum(tokens) % 97)
            self.manager.extend(handle, tokens[-1:])

    def expect(self, group: int, page: int, tokens: Sequence[int], salt: str) -> None:
        wanted = stamp(group, tokens, salt)
        np.testing.assert_array_equal(self.memory[group][page], wanted, f"{group} {page} {tokens}")

    def close(self, handle: int, how: str) -> None:
        self.offload.release(handle)
        getattr(self.manager, how)(handle)
        if how == "preempt":
            self.requests[handle].state = "waiting"
        else:
            del self.requests[handle]

    def may_clear(self) -> bool:
        idle = all(request.state == "waiting" for request in self.requests.values())
        return idle and not self.manager.stats().open_loads

    def poll(self) -> list[tuple[int, bool]]:
        ended = self.offload.poll()
        for handle, ok in ended:
            request = self.requests[handle]
            assert request.state == "loading"
            request.state = "running" if ok else "waiting"
            assert self.manager.info(handle).state == request.state
        return ended

    def settle(self) -> None:
        """Everything in flight ends."""
        while self.faulty is not None and not self.offload.drain(0.0):
            self.faulty.deliver()
            self.faulty.recover()
            self.poll()
        assert self.offload.drain(PATIENCE)
        self.poll()
        self.check()

    def run(self, handle: int, chunk: int = 8) -> Request:
        """Until the request has finished."""
        request = self.requests[handle]
        for _ in range(200):
            if handle not in self.requests:
                return request
            self.step(chunk)
            self.settle()
        raise AssertionError(f"{request} does not end")

    def serve(self, tokens: Sequence[int], output: int = 1, salt: str = "") -> Request:
        return self.run(self.open(tokens, output, salt))

    def check(self) -> None:
        self.manager.check()
        self.offload.check()

    def assert_idle(self) -> None:
        stats = self.manager.stats()
        assert (stats.open_requests, stats.open_loads, stats.pinned) == (0, 0, 0)
        assert self.offload.stats().pinned_pages == 0
        for group in range(2):
            pool = self.manager.pool_stats(group)
            assert pool.held == 0
            assert pool.free + pool.cached == pool.created


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    made = Engine(**options)
    try:
        yield made
        made.check()
    finally:
        made.offload.close(PATIENCE)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()  # type: ignore[no-any-return]


# ---- what the tier is for ------------------------------------------------------------------------


def test_an_evicted_prefix_comes_back_from_the_tier() -> None:
    with engine(tier=(128, 64)) as e:
        prompt = text(0, 41)
        assert e.serve(prompt).hits[0].hit_tokens == 0
        for other in range(1, 5):
            e.serve(text(other, 41))
        again = e.serve(prompt)
        assert again.hits[0].device_tokens == 0
        assert again.hits[0].hit_tokens == 40
        assert e.offload.stats().loaded_pages == 10 + 1  # ten blocks, the one state at their end
        e.assert_idle()


def test_device_and_tier_serve_one_hit_together() -> None:
    """The head is on the device, the tail only below."""
    with engine(pages=(24, 12)) as e:
        prompt = text(0, 61)
        e.serve(prompt)
        e.manager.clear()
        e.serve(prompt[:33])
        loaded = e.offload.stats().loaded_pages
        again = e.serve(prompt)
        assert again.hits[0].device_tokens == 32
        assert again.hits[0].hit_tokens == 60
        assert e.offload.stats().loaded_pages - loaded == 7 + 1


def test_output_is_stored_for_the_next_turn() -> None:
    with engine(retention=Sparse(0)) as e:
        turn = e.serve(text(0, 30), output=20)
        e.manager.clear()
        again = e.serve([*turn.tokens, *text(1, 9)])
        assert again.hits[0].hit_tokens == 48


def test_salts_never_share() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt, salt="a")
        e.manager.clear()
        assert e.serve(prompt, salt="b").hits[0].hit_tokens == 0
        e.manager.clear()
        assert e.serve(prompt, salt="a").hits[0].hit_tokens == 40


def test_foreign_keys_are_found_under_their_namespace() -> None:
    with engine() as e:
        keys = np.random.default_rng(0).integers(0, 256, (6, 32), dtype=np.uint8)

        def play(salt: str) -> int:
            handle = e.manager.open_foreign(keys, prompt_tokens=25, salt=salt)
            hit = e.offload.lookup(handle)
            assert hit is not None
            step = e.manager.begin_step()
            grant = e.manager.allocate(handle, 25 - hit.hit_tokens)
            assert grant is not None
            assert e.offload.start_load(handle, grant)
            if grant.load:
                assert e.offload.drain(PATIENCE)
                assert e.offload.poll() == [(handle, True)]
                grant = e.manager.allocate(handle, 25 - hit.hit_tokens)
                assert grant is not None
            e.manager.commit(handle, 25)
            e.manager.end_step(step)
            e.offload.release(handle)
            e.manager.finish(handle)
            assert e.offload.drain(PATIENCE)
            e.manager.clear()
            return hit.hit_tokens

        assert play("a") == 0
        assert play("a") == 24
        assert play("b") == 0


def test_a_repeated_lookup_changes_nothing() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        handle = e.open(prompt)
        hits = {str(e.offload.lookup(handle)) for _ in range(3)}
        assert len(hits) == 1
        pinned = e.offload.stats().pinned_pages
        e.offload.lookup(handle)
        assert e.offload.stats().pinned_pages == pinned > 0
        e.close(handle, "abort")
        e.assert_idle()


def test_a_grant_without_load_ends_the_pins() -> None:
    with engine() as e:
        e.serve(text(0, 41))
        handle = e.open(text(0, 41), output=5)
        e.step()
        assert e.requests[handle].state == "running"
        assert e.offload.stats().pinned_pages == 0
        e.run(handle)


# ---- failures ------------------------------------------------------------------------------------


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
        if target.address == states.ctypes.data:
            fails += 1
            raise OSError("a bad state")
        native_copy(source, target, *ids)

    with engine(copy=copy) as e:
        states = e.memory[STATE]
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
        submit = e.offload._worker.submit

        def no_loads(transfer: Transfer) -> bool:
            if transfer.direction is Direction.LOAD:
                raise ConnectionError("gone")
            return submit(transfer)

        e.offload._worker.submit = no_loads  # type: ignore[method-assign]
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


def test_a_late_load_gives_the_request_back_and_keeps_its_pages_away() -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    with engine(copy=copy, deadline_seconds=0.02) as e:
        prompt = text(0, 21)
        e.offload._scheduler._deadline_seconds = PATIENCE  # type: ignore[attr-defined]
        e.serve(prompt)
        e.manager.clear()
        e.offload._scheduler._deadline_seconds = 0.02  # type: ignore[attr-defined]
        gate.shut()
        handle = e.open(prompt)
        e.step()
        gate.wait_reached()
        assert e.offload._worker.wait(PATIENCE)
        assert e.poll() == [(handle, False)]
        assert e.manager.stats().open_loads == 1
        assert e.manager.pool_stats(ATTENTION).held == 5  # in quarantine
        assert e.offload.stats().pinned_pages == 6
        while handle in e.requests:  # meanwhile it is computed
            e.step()
        e.check()
        gate.open()
        e.settle()
        assert e.offload.stats().late_transfers == 1
        e.assert_idle()


@pytest.mark.parametrize("how", ["abort", "preempt", "finish"])
def test_a_request_that_ends_during_its_load_is_not_reported(how: str) -> None:
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
        e.close(handle, how)
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


# ---- stores --------------------------------------------------------------------------------------


def test_pages_wait_for_their_turn_unheld_and_are_counted_when_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    def copy(*args: Any) -> None:
        gate()
        native_copy(*args)

    monkeypatch.setattr(driver, "STORE_BYTES", 100)
    monkeypatch.setattr(driver, "MAX_STORES", 2)
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
    monkeypatch.setattr(driver, "STORE_BYTES", 1)
    monkeypatch.setattr(driver, "MAX_STORES", 1)
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


# ---- configuration -------------------------------------------------------------------------------


def test_regions_must_cover_the_pools() -> None:
    manager = Manager(GEOMETRY, pages=[8, 4], retention=Dense())
    connector = CpuConnector(GEOMETRY, pages=[4, 4])
    sizes = [g.page_bytes for g in GEOMETRY.groups]
    with pytest.raises(ConfigError, match="1 regions for 2 groups"):
        Offload(manager, connector, [PageRegion(64, sizes[0], 8)])
    with pytest.raises(
        ConfigError, match="region of group 'state' has 3 pages, its pool may use 4"
    ):
        Offload(manager, connector, [PageRegion(64, sizes[0], 8), PageRegion(64, sizes[1], 3)])
    endless = Manager(GEOMETRY, pages=[8, UNLIMITED], retention=Dense())
    with pytest.raises(ConfigError, match="region of group 'state'"):
        Offload(endless, connector, [PageRegion(64, sizes[0], 8), PageRegion(64, sizes[1], 4)])
    connector.worker.close()


def test_check_notices_a_pin_that_no_store_knows_of() -> None:
    with engine() as e:
        e.serve(text(0, 9))
        item = np.zeros(1, KEYED_DTYPE)
        handle = e.open(text(0, 9))
        item["page"] = e.manager.find_key(ATTENTION, e.manager.digests(handle)[0].tobytes())
        item["digest"] = e.manager.digests(handle)[0]
        assert e.manager.pin(item).tolist() == [1]
        with pytest.raises(InvariantError, match="1 device pages are pinned, stores know of 0"):
            e.offload.check()
        e.manager.unpin(ATTENTION, item["page"])


# ---- at random -----------------------------------------------------------------------------------


def play_at_random(e: Engine, chance: random.Random, steps: int) -> None:
    """Some requests side by side over few prompts; every read is checked by the engine."""
    texts = [text(i, 40) for i in range(3)]
    texts.append([*texts[0][:16], *text(9, 24)])
    operations = ("open", "step", "deliver", "recover", "preempt", "abort", "clear")
    for _ in range(steps):
        operation = chance.choices(operations, (4, 10, 4, 1, 1, 1, 0.3))[0]
        if operation == "open" and len(e.requests) < 4:
            salt = chance.choice(("", "", "x"))
            e.open(chance.choice(texts)[: chance.randint(1, 40)], chance.randint(0, 9), salt)
        elif operation == "step":
            e.step(chance.randint(1, 16))
        elif operation in {"deliver", "recover"} and e.faulty is not None:
            if operation == "deliver":
                e.faulty.deliver(chance.randint(1, 5))
            else:
                e.faulty.recover()
            e.poll()
        elif operation in {"preempt", "abort"} and e.requests:
            handle = chance.choice(list(e.requests))
            if operation == "abort" or e.requests[handle].state != "waiting":
                e.close(handle, operation)
        elif operation == "clear" and e.may_clear():
            e.manager.clear()
        e.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_long_run_with_faults_reads_no_wrong_byte_and_leaks_nothing(seed: int) -> None:
    chance = random.Random(seed)
    faults = Faults(
        fail_item=chance.choice((0, 0.05, 0.2)),
        late=chance.choice((0, 0.2)),
        duplicate=0.1,
        drop=chance.choice((0, 0.1)),
        refuse=0.1,
        refuse_by_raising=chance.choice((0, 0.1)),
    )
    with engine(
        pages=(chance.choice((14, 20, 30)), chance.choice((7, 9, 16))),
        tier=chance.choice(((64, 24), (6, 3), (20, 5))),
        retention=chance.choice((Dense(), Sparse(0), Sparse(8))),
        faults=faults,
        seed=seed,
    ) as e:
        play_at_random(e, chance, 300)
        for handle in list(e.requests):
            e.close(handle, "abort")
        e.settle()
        e.assert_idle()
        stats = e.offload.stats()
        assert stats.loaded_pages > 0
        assert stats.stored_pages > 0


@settings(max_examples=50, stateful_step_count=50)
class OffloadMachine(RuleBasedStateMachine):
    """Requests over few prompts in a small pool and a small tier, results spoiled and delayed."""

    requests = Bundle("requests")

    @initialize(
        seed=st.integers(0, 1000),
        faulty=st.booleans(),
        retention=st.sampled_from((Dense(), Sparse(0), Sparse(8))),
        tier=st.sampled_from(((64, 24), (6, 3), (20, 5))),
    )
    def start(self, seed: int, faulty: bool, retention: Any, tier: Any) -> None:
        faults = Faults()
        if faulty:
            faults = Faults(
                fail_item=0.1,
                late=0.15,
                duplicate=0.15,
                drop=0.1,
                refuse=0.1,
                refuse_by_raising=0.1,
            )
        self.e = Engine(pages=(14, 9), tier=tier, retention=retention, faults=faults, seed=seed)
        self.texts = [text(i, 32) for i in range(2)]
        self.texts.append([*self.texts[0][:16], *text(9, 16)])

    @rule(
        target=requests,
        which=st.integers(0, 2),
        length=st.integers(1, 32),
        output=st.integers(0, 9),
        salt=st.sampled_from(("", "", "x")),
    )
    def open(self, which: int, length: int, output: int, salt: str) -> Any:
        if len(self.e.requests) >= 3:
            return multiple()
        return self.e.open(self.texts[which][:length], output, salt)

    @rule(chunk=st.integers(1, 16))
    def step(self, chunk: int) -> None:
        self.e.step(chunk)

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        assert self.e.faulty is not None
        self.e.faulty.deliver(count)
        self.e.poll()

    @rule()
    def recover(self) -> None:
        assert self.e.faulty is not None
        self.e.faulty.recover()
        self.e.poll()

    @rule(handle=requests)
    def preempt(self, handle: int) -> None:
        request = self.e.requests.get(handle)
        if request is not None and request.state != "waiting":
            self.e.close(handle, "preempt")

    @rule(handle=consumes(requests))
    def abort(self, handle: int) -> None:
        if handle in self.e.requests:
            self.e.close(handle, "abort")

    @rule()
    def forget_the_device(self) -> None:
        if self.e.may_clear():
            self.e.manager.clear()

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "e"):
            self.e.check()

    def teardown(self) -> None:
        if not hasattr(self, "e"):
            return
        for handle in list(self.e.requests):
            self.e.close(handle, "abort")
        self.e.settle()
        self.e.assert_idle()
        self.e.offload.close(PATIENCE)


TestOffloadMachine = OffloadMachine.TestCase
