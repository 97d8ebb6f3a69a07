from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from engine.rig import DRAIN_SECONDS, Gate, Rig, generate, held_pages, rig, tokens
from engine.stamp_runner import VOCAB, StampRunner, expected_output
from tiers.late import pass_deadlines

from kvcache import (
    KVCacheError,
    MisuseError,
)
from kvcache.core.records import KEYED_DTYPE
from kvcache.engine.chunk import Chunk
from kvcache.engine.request import Finished, Reason, Status


class Interfering(StampRunner):
    """Calls `action` in the middle of a step."""

    action: Callable[[], None] | None = None

    def run(self, chunks: Sequence[Chunk]) -> Any:
        sampled = super().run(chunks)
        if self.action is not None:
            self.action()
        return sampled


def interfering(r: Rig) -> Interfering:
    assert isinstance(r.runner, Interfering)
    return r.runner


def test_an_abort_in_mid_step_leaves_no_key_and_no_token() -> None:
    with rig([20], runner_type=Interfering) as r:
        prompt = tokens(60, 1)
        request = r.engine.add_request(prompt, max_new_tokens=5)
        interfering(r).action = lambda: r.engine.abort(request)
        events = r.engine.step()
        assert [type(e) for e in events] == [Finished]
        assert events[0].reason is Reason.ABORT  # type: ignore[union-attr]
        interfering(r).action = None
        again = r.engine.add_request(prompt, max_new_tokens=5)
        result = r.engine.run()[again]
        assert result.usage.cached_tokens == 0
        assert result.tokens == expected_output(prompt, 5)
        assert r.held == 0


def test_a_preemption_in_mid_step_is_computed_again() -> None:
    with rig([20, 4], states=1, runner_type=Interfering) as r:
        prompt = tokens(60, 1)
        request = r.engine.add_request(prompt, max_new_tokens=20)
        for i in range(14):
            interfering(r).action = (lambda: r.engine.preempt(request)) if i % 5 == 2 else None
            r.engine.step()
        interfering(r).action = None
        assert r.engine.run()[request].tokens == expected_output(prompt, 20)
        assert r.engine.counters.preemptions == 3
        assert r.held == 0


def test_a_runner_that_raises_ends_its_batch_and_not_the_engine() -> None:
    def fail() -> None:
        raise RuntimeError("injected")

    with rig([20], runner_type=Interfering, token_budget=40) as r:
        prompts = [tokens(30, 1), tokens(30, 2)]
        ids = [r.engine.add_request(p, max_new_tokens=3) for p in prompts]
        later = r.engine.add_request(tokens(60, 3), max_new_tokens=3)
        interfering(r).action = fail
        with pytest.raises(RuntimeError, match="injected"):
            r.engine.step()
        interfering(r).action = None
        results = r.engine.run()
        failed = [i for i in ids if results[i].reason is Reason.ERROR]
        assert failed
        assert results[later].tokens == expected_output(tokens(60, 3), 3)
        again = r.engine.add_request(prompts[0], max_new_tokens=3)
        assert r.engine.run()[again].tokens == expected_output(prompts[0], 3)
        assert r.held == 0


class InjectedError(Exception):
    """A move of pages that fails."""


class FailingMoves(StampRunner):
    """Its moves of pages fail, in the middle of several."""

    failures = 0

    def move_pages(self, moves: Any) -> None:
        if self.failures:
            self.failures -= 1
            super().move_pages(moves[: len(moves) // 2])
            raise InjectedError
        super().move_pages(moves)


@pytest.mark.parametrize("tier_pages", [None, [64, 32, 16]])
def test_after_a_failed_move_of_pages_no_answer_is_wrong(tier_pages: list[int] | None) -> None:
    failed = 0
    for seed in range(12):
        rng = random.Random(seed)
        with rig(24, 16, 64, states=1, tier_pages=tier_pages, runner_type=FailingMoves) as r:
            prompts = [tokens(rng.randrange(40, 200), seed * 100 + i) for i in range(6)]
            asked: dict[int, list[int]] = {}
            for turn in range(40):
                prompt = rng.choice(prompts)[: rng.randrange(20, 200)]
                asked[r.engine.add_request(prompt, max_new_tokens=4)] = prompt
                runner = r.runner
                assert isinstance(runner, FailingMoves)
                runner.failures = turn % 2
                if turn % 3 == 0:
                    failed += _serve(r, asked)
            runner.failures = 0
            failed += _serve(r, asked)
            assert r.held == 0
    assert failed > 12


def _serve(r: Rig, asked: dict[int, list[int]]) -> int:
    """All that were asked get their answers; how often a step failed meanwhile."""
    failed, answers = 0, {request: [] for request in asked}
    while r.engine.busy:
        try:
            events = r.engine.step()
        except InjectedError:
            failed += 1
            continue
        for event in events:
            if isinstance(event, Finished):
                assert event.reason is Reason.LENGTH
                assert answers[event.request] == expected_output(asked.pop(event.request), 4)
            else:
                answers[event.request].append(event.token)
    assert not asked
    return failed


@pytest.mark.parametrize("tier_pages", [None, [8]])
def test_a_request_whose_pages_never_come_free_is_given_up(tier_pages: list[int] | None) -> None:
    with rig([8], tier_pages=tier_pages, stall_seconds=0.01) as r:
        prompt = tokens(64, 1)
        generate(r.engine, prompt, 1)
        items = r.manager.take_keyed() if r.offload is None else None
        if items is None:  # the tier took them: find the pages by their keys
            probe = r.manager.open(prompt)
            items = np.zeros(4, KEYED_DTYPE)
            items["digest"] = r.manager.digests(probe)
            items["page"] = [r.manager.find_key(0, bytes(d)) for d in items["digest"]]
            items["end"] = np.arange(1, 5) * 16
            r.manager.abort(probe)
            assert r.offload is not None
            assert r.offload.drain(DRAIN_SECONDS)
        assert (r.manager.pin(items) >= 0).all()
        stuck = r.engine.add_request(tokens(100, 2), max_new_tokens=1)
        after = r.engine.add_request(tokens(20, 3), max_new_tokens=2)
        results = r.engine.run()
        assert results[stuck].reason is Reason.STALLED
        assert results[after].tokens == expected_output(tokens(20, 3), 2)
        r.manager.unpin(0, items["page"].astype(np.int32))
        assert r.held == 0


def test_a_load_may_take_longer_than_a_request_may_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a deadline of its own, after which its request is computed."""
    gate = Gate()
    gate.open.set()
    with rig([20], tier_pages=[20], tier={"copy": gate}, stall_seconds=0.001) as r:
        prompt = tokens(60, 1)
        generate(r.engine, prompt, 1)
        assert r.offload is not None
        assert r.offload.drain(DRAIN_SECONDS)
        r.manager.clear()
        gate.open.clear()
        gate.entered.clear()
        request = r.engine.add_request(prompt, max_new_tokens=3)
        assert r.engine.step() == []
        assert gate.entered.wait(DRAIN_SECONDS)
        for _ in range(9):  # each waits for longer than that
            assert r.engine.step() == []
        pass_deadlines(monkeypatch)
        result = r.engine.run()[request]
        assert (result.reason, result.tokens) == (Reason.LENGTH, expected_output(prompt, 3))
        assert result.usage.cached_tokens == 0
        monkeypatch.undo()
        gate.open.set()
        assert r.held == 0


def test_a_second_thread_is_refused_and_changes_nothing() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        inside.set()
        assert go_on.wait(DRAIN_SECONDS)

    with rig([20], runner_type=Interfering) as r:
        prompt = tokens(60, 1)
        request = r.engine.add_request(prompt, max_new_tokens=5)
        interfering(r).action = stop
        with ThreadPoolExecutor(1) as thread:
            stepping = thread.submit(r.engine.step)
            assert inside.wait(DRAIN_SECONDS)
            for call in (
                r.engine.step,
                lambda: r.engine.add_request(prompt, max_new_tokens=1),
                lambda: r.engine.abort(request),
                lambda: r.engine.preempt(request),
                lambda: r.engine.sleep(0.0),
                lambda: r.engine.reload(7, lambda: None),
            ):
                with pytest.raises(MisuseError, match="two threads are in one Engine"):
                    call()
            interfering(r).action = None
            go_on.set()
            stepping.result(DRAIN_SECONDS)
        assert r.engine.run()[request].tokens == expected_output(prompt, 5)
        assert r.held == 0


def test_a_request_of_each_status_can_be_aborted() -> None:
    with rig([8]) as r:
        running = r.engine.add_request(tokens(60, 1), max_new_tokens=60)
        waiting = r.engine.add_request(tokens(100, 2), max_new_tokens=1)
        r.engine.step()
        statuses = {
            q.id: q.status for q in (*r.engine.scheduler.running, *r.engine.scheduler.waiting)
        }
        assert statuses == {running: Status.RUNNING, waiting: Status.WAITING}
        r.engine.abort(waiting)
        r.engine.abort(running)
        results = r.engine.run()
        assert {i: x.reason for i, x in results.items()} == dict.fromkeys(
            (running, waiting), Reason.ABORT
        )
        assert r.held == 0


BAD_RUNS: dict[str, Callable[[Any], Any]] = {
    "too few": lambda out: out[:-1],
    "none at all": lambda _: None,
    "no numbers": lambda out: np.full(len(out), np.nan),
    "beyond 32 bits": lambda out: np.full(len(out), 2**40),
    "outside the vocabulary": lambda out: np.full(len(out), VOCAB),
}


class Lying(StampRunner):
    """Computes rightly and tells something else, once."""

    lie: Callable[[Any], Any] | None = None

    def run(self, chunks: Sequence[Chunk]) -> Any:
        sampled, lie = super().run(chunks), self.lie
        self.lie = None
        return sampled if lie is None else lie(sampled)


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_runner_that_answers_nonsense_ends_its_batch_and_not_the_engine(case: str) -> None:
    with rig([20], runner_type=Lying, token_budget=40) as r:
        prompts = [tokens(30, 1), tokens(30, 2)]
        ids = [r.engine.add_request(p, max_new_tokens=3) for p in prompts]
        assert isinstance(r.runner, Lying)
        r.runner.lie = BAD_RUNS[case]
        with pytest.raises(KVCacheError):
            r.engine.step()
        results = r.engine.run()
        assert any(results[i].reason is Reason.ERROR for i in ids)
        again = r.engine.add_request(prompts[0], max_new_tokens=3)
        assert r.engine.run()[again].tokens == expected_output(prompts[0], 3)
        assert r.held == 0


def test_pages_that_come_free_within_stall_seconds_are_waited_for_without_a_tier() -> None:
    with rig([8], idle_wait_seconds=0.0001) as r:
        prompt = tokens(64, 1)
        generate(r.engine, prompt, 1)
        items = r.manager.take_keyed()
        assert (r.manager.pin(items) >= 0).all()
        late = r.engine.add_request(tokens(100, 2), max_new_tokens=1)
        for _ in range(20):
            assert r.engine.step() == []
        r.manager.unpin(0, items["page"].astype(np.int32))
        assert r.engine.run()[late].tokens == expected_output(tokens(100, 2), 1)


def test_nobody_gets_space_while_the_oldest_waits_for_what_is_pinned() -> None:
    with rig([8], idle_wait_seconds=0.0001) as r:
        kept = tokens(64, 1)
        generate(r.engine, kept, 1)
        items = r.manager.take_keyed()
        assert (r.manager.pin(items) >= 0).all()
        oldest = r.engine.add_request(tokens(60, 2), max_new_tokens=60)
        younger = r.engine.add_request(tokens(5, 3), max_new_tokens=4)
        while len(r.manager.block_table(oldest, 0)) < 4:
            r.engine.step()
        for _ in range(30):
            r.engine.step()
        assert r.manager.stats().frozen
        assert r.engine.step() == []
        assert (r.manager.pin(items) < 0).all()
        r.manager.unpin(0, items["page"].astype(np.int32))
        results = r.engine.run()
        assert results[oldest].tokens == expected_output(tokens(60, 2), 60)
        assert results[younger].tokens == expected_output(tokens(5, 3), 4)


def test_younger_requests_make_room_for_the_oldest_one_while_it_waits() -> None:
    with rig([6], token_budget=200) as r:
        prompts = [tokens(32, 1), tokens(60, 2)]
        oldest, younger = (r.engine.add_request(p, max_new_tokens=16) for p in prompts)
        r.engine.step()
        assert held_pages(r.manager) == 6
        items = r.manager.take_keyed()
        items = items[items["handle"] == oldest]
        pages = r.manager.pin(items)
        r.engine.preempt(oldest)
        r.manager.clear()  # what it had is of no use to it, and not free either
        r.engine.step()
        assert [q.id for q in r.engine.scheduler.running] == [oldest]
        assert [q.id for q in r.engine.scheduler.waiting] == [younger]
        r.manager.unpin(0, pages)
        results = r.engine.run()
        assert results[oldest].tokens == expected_output(prompts[0], 16)
        assert results[younger].tokens == expected_output(prompts[1], 16)
        assert r.held == 0
