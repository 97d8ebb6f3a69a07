"""Requests at random, with results spoiled and delayed: nothing is leaked or read wrongly."""

from __future__ import annotations

import random
from typing import Any

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
from tiers.random_play import play_at_random
from tiers.stamp_engine import (
    PATIENCE,
    Engine,
    engine,
    text,
)

from kvcache.connectors.testing import Faults
from kvcache.retention import Dense, Sparse


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
        slabs=chance.choice((6, 8, 12)),
        tier=chance.choice(((64, 24), (30, 9), (20, 5))),
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
        self.e = Engine(slabs=6, tier=tier, retention=retention, faults=faults, seed=seed)
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
