"""The deciding side of a tier with numbered slots, beyond the contract."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tiers.pieces import cpu, one_group

from kvcache.connectors import in_flight, pool_scheduler
from kvcache.connectors.base import (
    KEYED_DTYPE,
    Direction,
    KeyedPages,
    RequestKeys,
    TransferResult,
    failed,
)
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.key_events import KeysLost, KeysRemoved, KeysStored
from kvcache.connectors.pool_promises import Promises
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import Key, RandomRun, Setup, chain, digest, rig
from kvcache.connectors.tier_counts import MAX_ERROR_KINDS
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.hashing import NATIVE_NAMESPACE

GEOMETRY = one_group(64)


def request_keys(request: int, *rows: int) -> RequestKeys:
    """Digests that are numbers."""
    digests = [
        np.frombuffer(b"".join(i.to_bytes(32, "little") for i in range(n)), np.uint8).reshape(
            -1, 32
        )
        for n in rows
    ]
    return RequestKeys(request, NATIVE_NAMESPACE, digests)


def test_a_repeated_lookup_does_not_ask_the_index() -> None:
    """At 1M tokens: the second answer is the first, not a new one."""
    connector = CpuConnector(GEOMETRY, pages=[70_000])
    keys = request_keys(1, 62_500)
    first = connector.scheduler.lookup(keys)
    second = connector.scheduler.lookup(keys)
    assert first is not None
    assert second is not None
    assert first[0] is second[0]
    assert not first[0].flags.writeable
    connector.worker.close()


def test_after_a_change_the_index_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    renew = Promises._renew

    def counted(self: Promises, promise: Any, keys: RequestKeys, versions: Any) -> None:
        asked.append(keys.request)
        renew(self, promise, keys, versions)

    monkeypatch.setattr(Promises, "_renew", counted)
    with rig(cpu) as r:
        keys = chain("a", 3)
        r.lookup(1, keys)
        r.store(chain("b", 1))
        for _ in range(3):
            r.lookup(1, keys)
        assert asked == [1]
        r.scheduler.release(1)


def test_a_longer_chain_is_looked_up_anew() -> None:
    with rig(cpu) as r:
        keys = chain("a", 6)
        r.store(keys)
        assert r.lookup(1, keys[:3]) == [1, 1, 1]
        assert r.lookup(1, keys) == [1] * 6
        assert r.pinned() == 6
        assert r.lookup(1, keys[:1]) == [1]
        assert r.pinned() == 1
        r.scheduler.release(1)


def test_digests_are_read_in_place_from_any_stride() -> None:
    with rig(cpu) as r:
        keys = chain("a", 5)
        r.store(keys[1::2])
        spread = r.request_keys(1, keys).digests[0]
        strided = RequestKeys(1, NATIVE_NAMESPACE, [spread[1::2], spread[:0]])
        assert not strided.digests[0].flags.c_contiguous
        flags = r.scheduler.lookup(strided)
        assert flags is not None
        assert flags[0].tolist() == [1, 1]
        r.scheduler.release(1)


def test_a_lookup_of_other_groups_is_refused() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    with pytest.raises(ConfigError, match="keys of 2 groups: this tier has 1"):
        connector.scheduler.lookup(request_keys(1, 2, 2))
    connector.worker.close()


def test_kinds_of_errors_are_bounded() -> None:
    with rig(cpu, pages=MAX_ERROR_KINDS + 5) as r:
        for i in range(MAX_ERROR_KINDS + 5):
            planned = r.planned([Key("a")])
            none = np.zeros(1, np.uint8)
            r.scheduler.complete(
                TransferResult(planned.id, Direction.STORE, none, error=f"Kind{i}: text")
            )
        errors = r.scheduler.stats().errors
        assert len(errors) == MAX_ERROR_KINDS + 1
        assert errors["other"] == 5


def test_check_notices_a_slot_that_nobody_knows_of() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    scheduler = connector.scheduler
    scheduler.check()
    scheduler._pools[0].take(1)  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match="1 slots are held, lookups and transfers know of 0"):
        scheduler.check()
    connector.worker.close()


def test_an_empty_store_is_no_transfer() -> None:
    connector = CpuConnector(GEOMETRY, pages=[4])
    nothing = KeyedPages(np.zeros(0, KEYED_DTYPE), [NATIVE_NAMESPACE])
    assert connector.scheduler.plan_store(nothing) is None
    connector.worker.close()


def test_a_large_store_is_planned_and_completed_without_a_loop_over_its_keys() -> None:
    """Counted in steps of the interpreter: a loop would stop the scheduler's thread."""
    keys, steps = 10_000, 0
    scheduler = PoolScheduler([64], [keys], deadline_seconds=1.0)
    items = np.zeros(keys, KEYED_DTYPE)
    items["digest"] = np.random.default_rng(0).integers(0, 256, (keys, 32), dtype=np.uint8)
    pages = KeyedPages(items, [NATIVE_NAMESPACE])

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan = scheduler.plan_store(pages)
        again = scheduler.plan_store(pages)
        assert plan is not None
        ok = np.ones(keys, np.uint8)
        scheduler.complete(TransferResult(plan[0].id, Direction.STORE, ok))
    finally:
        sys.settrace(before)
    assert again is None
    assert scheduler.stats().stored_pages == keys
    assert 0 < steps < keys
    scheduler.check()


def digests_of(numbers: list[int]) -> np.ndarray[Any, Any]:
    rows = [n.to_bytes(32, "big") for n in numbers]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


@pytest.mark.parametrize("hashed", ["well", "all alike", "in two"])
@given(data=st.data())
def test_keys_in_flight_equal_a_set_however_they_hash(hashed: str, data: st.DataObject) -> None:
    weights = {"all alike": [0, 0, 0, 0], "in two": [0, 0, 0, 1 << 63]}
    with pytest.MonkeyPatch.context() as patch:
        if hashed in weights:
            patch.setattr(in_flight, "_WEIGHTS", np.array(weights[hashed], np.uint64))
        keys, held = in_flight.KeysInFlight(), dict[int, list[int]]()
        for _ in range(data.draw(st.integers(1, 6))):
            numbers = data.draw(st.lists(st.integers(0, 12), max_size=12))
            seen = {n for row in held.values() for n in row}
            wanted = []
            for i, number in enumerate(numbers):
                wanted.append(number not in seen and number not in numbers[:i])
            assert keys.new(digests_of(numbers)).tolist() == wanted
            new = [n for n, flag in zip(numbers, wanted, strict=True) if flag]
            if new:
                held[keys.add(digests_of(new))] = new
            if held and data.draw(st.booleans()):
                store = data.draw(st.sampled_from(sorted(held)))
                keys.remove(store)
                del held[store]
            assert len(keys) == sum(map(len, held.values()))


# ---- both sides, at random -----------------------------------------------------------------------


@settings(max_examples=12, stateful_step_count=40)
class CpuMachine(RuleBasedStateMachine):
    """The operations of `RandomRun`, in the order that hypothesis finds worth trying."""

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.run = RandomRun(cpu, seed)

    @rule()
    def look_up(self) -> None:
        self.run.look_up()

    @rule()
    def load(self) -> None:
        self.run.load()

    @rule()
    def store(self) -> None:
        self.run.store()

    @rule()
    def release(self) -> None:
        self.run.release()

    @rule()
    def deliver(self) -> None:
        self.run.deliver()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestCpuMachine = CpuMachine.TestCase


def test_a_random_run_is_the_same_for_the_same_seed() -> None:
    def play() -> tuple[Any, ...]:
        run = RandomRun(cpu, 5)
        for _ in range(300):
            run.step()
        stats = run.rig.scheduler.stats()
        run.finish()
        return replace(stats, store_seconds=0.0, load_seconds=0.0), run.random.random()

    assert play() == play()


# ---- events --------------------------------------------------------------------------------------


def test_neighbours_of_one_kind_and_namespace_are_one_event() -> None:
    with rig(cpu, Setup(events=True)) as r:
        a, b = b"\x01" * 32, b"\x02" * 32
        r.store(chain("k", 3, 0, a))
        r.store(chain("l", 2, 0, a))
        r.store(chain("k", 2, 0, b))
        r.store(chain("k", 2, 1, b))
        r.store(chain("m", 4, 0, b))
        told = r.scheduler.take_events()
        assert [(type(e), e.group, e.namespace, len(e.keys)) for e in told] == [
            (KeysStored, 0, a, 5),
            (KeysStored, 0, b, 2),
            (KeysRemoved, 0, a, 3),
            (KeysStored, 0, b, 4),
            (KeysStored, 1, b, 2),
        ]
        assert [bytes(key) for key in told[0].keys[:3]] == [digest(k) for k in chain("k", 3)]


def test_a_loss_in_one_group_comes_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_scheduler, "MAX_WAITING_EVENTS", 3)
    with rig(cpu, Setup(events=True)) as r:
        r.store(chain("a", 2, 0))
        for name in "ab":
            r.store(chain(name, 4, 1))
        told = r.scheduler.take_events()
        assert isinstance(told[0], KeysLost)
        assert [(type(e), *e[:1]) for e in told[1:]] == [(KeysStored, 0), (KeysStored, 1)]
        assert r.scheduler.take_events() == []


def test_a_tier_that_is_not_asked_for_events_keeps_none() -> None:
    with rig(cpu) as r:
        r.store(chain("a", 3))
        assert not r.scheduler.reports_events
        assert r.scheduler.take_events() == []


# ---- namespaces ----------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_every", [1, 7, 10**6])
def test_namespaces_are_known_as_long_as_a_key_or_an_event_has_them(taken_every: int) -> None:
    """Not all that ever were. Whoever replays the events has the keys that are found, under their names."""
    slots, journal = 4, 3 * 500  # no event is lost
    with rig(cpu, Setup(events=taken_every < 10**6, pages=(slots, 1))) as r:
        numbers = r.scheduler._numbers  # type: ignore[attr-defined]
        keys, there = [], set()
        for i in range(500):
            keys.append(Key("k", 0, hashlib.sha256(b"%d" % (i % 300)).digest()))
            r.store([keys[-1]])
            if i % taken_every == 0 or i == 499:
                for event in r.scheduler.take_events():
                    assert not isinstance(event, KeysLost)
                    change = there.add if isinstance(event, KeysStored) else there.remove
                    change(event.namespace)
            assert len(numbers) <= 2 * (slots + 1 + min(2 * taken_every, journal))
        last = {key.namespace for key in keys[-slots:]}
        assert all(r.visible([key]) == [key.namespace in last] for key in keys[:300])
        assert there == (last if r.scheduler.reports_events else set())
        assert r.lookup(1, keys[-1:]) == [1]
        assert r.load(1, keys[-1:]) == [1]
        if taken_every > 7:
            assert len(numbers) <= 2 * (slots + 1)


def test_what_is_looked_up_or_refused_leaves_no_namespace_behind() -> None:
    with rig(cpu, pages=50) as r:
        for i in range(50):
            key = Key("k", 0, hashlib.sha256(b"%d" % i).digest())
            assert r.visible([key]) == [0]
            r.scheduler.complete(failed(r.planned([key]), "Test: nothing was copied"))
        assert len(r.scheduler._numbers) == 0  # type: ignore[attr-defined]
