from __future__ import annotations

import threading
from typing import Any

import pytest
from engine.rig import DRAIN_SECONDS, Failing, Gate, evict_all, generate, held_pages, rig, tokens
from engine.stamp_runner import expected_output
from tiers.late import pass_deadlines

from kvcache.connectors.cpu import native_copy
from kvcache.connectors.driver import MAX_FAILED_LOADS
from kvcache.core.records import Hit
from kvcache.engine.request import Finished, Reason
from kvcache.engine.scheduler import MAX_LOOKUPS


def test_a_returning_turn_is_restored_from_the_tier() -> None:
    with rig([12], tier_pages=[64]) as r:
        prompt = tokens(150, 1)
        output = generate(r.engine, prompt, 10).tokens
        evict_all(r)
        again = [*prompt, *output, *tokens(9, 2)]
        second = r.engine.add_request(again, max_new_tokens=5)
        result = r.engine.run()[second]
        assert result.tokens == expected_output(again, 5)
        assert result.usage == (169, 5, 0, 144, 0)
        assert r.engine.counters.restored_tokens == 144
        assert r.offload is not None
        assert r.offload.stats().loaded_pages == 9


def test_states_are_restored_with_their_attention() -> None:
    with rig([12, 4], states=1, tier_pages=[64, 16]) as r:
        prompt = tokens(150, 1)
        output = generate(r.engine, prompt, 10).tokens
        evict_all(r)
        again = [*prompt, *output, *tokens(9, 2)]
        result = generate(r.engine, again, 5)
        assert result.tokens == expected_output(again, 5)
        assert result.usage.host_tokens == 144


def test_others_compute_while_a_load_is_in_flight() -> None:
    gate = Gate()
    gate.open.set()
    with rig([24], tier_pages=[64], tier={"copy": gate}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        loading = r.engine.add_request(prompt, max_new_tokens=1)
        other = r.engine.add_request(tokens(30, 2), max_new_tokens=5)
        ended: list[int] = []
        while other not in ended:
            ended += [e.request for e in r.engine.step() if isinstance(e, Finished)]
        assert ended == [other]
        assert loading in r.engine.scheduler.loading
        gate.open.set()
        assert r.engine.run()[loading].usage.host_tokens == 96
        assert r.held == 0


def test_a_load_starts_though_a_prefill_takes_the_whole_budget() -> None:
    with rig([40], tier_pages=[64], token_budget=32) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        r.engine.add_request(tokens(320, 2), max_new_tokens=1)
        back = r.engine.add_request(prompt, max_new_tokens=1)
        r.engine.step()
        assert back in r.engine.scheduler.loading
        r.engine.run()


def test_an_aborted_request_gives_back_what_the_tier_held_for_it() -> None:
    with rig([12], tier_pages=[64]) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        r.engine.add_request(tokens(100, 2), max_new_tokens=20)
        r.engine.step()
        refused = r.engine.add_request(prompt, max_new_tokens=1)
        r.engine.step()
        assert r.offload is not None
        assert r.offload.stats().pinned_pages >= 6
        r.engine.abort(refused)
        r.engine.run()
        assert r.held == 0
        assert r.offload.stats().pinned_pages == 0


def test_twins_share_one_load() -> None:
    gate = Gate()
    gate.open.set()
    with rig([24], tier_pages=[64], tier={"copy": gate}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        ids = [r.engine.add_request(prompt, max_new_tokens=2) for _ in range(3)]
        for _ in range(5):
            r.engine.step()
        assert list(r.engine.scheduler.loading) == ids[:1]
        gate.open.set()
        results = r.engine.run()
        assert r.offload is not None
        assert r.offload.stats().loaded_pages == 6
        assert [results[i].usage[2:4] for i in ids] == [(0, 96), (96, 0), (96, 0)]


def test_an_abort_in_mid_load_leaks_nothing() -> None:
    gate = Gate()
    gate.open.set()
    with rig([12], tier_pages=[64], tier={"copy": gate}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        gate.entered.clear()
        request = r.engine.add_request(prompt, max_new_tokens=1)
        r.engine.step()
        assert gate.entered.wait(DRAIN_SECONDS)
        r.engine.abort(request)
        events = list(r.engine.stream())
        assert [e.reason for e in events if isinstance(e, Finished)] == [Reason.ABORT]
        gate.open.set()
        assert r.held == 0
        assert generate(r.engine, prompt, 2).tokens == expected_output(prompt, 2)


def test_a_preemption_beside_a_load_in_flight_loses_nothing() -> None:
    gate = Gate()
    gate.open.set()
    with rig([16], tier_pages=[64], tier={"copy": gate}) as r:
        prompts = [tokens(100, 1), tokens(40, 2), tokens(40, 3)]
        generate(r.engine, prompts[0], 1)
        evict_all(r)
        older = r.engine.add_request(prompts[1], max_new_tokens=60)
        younger = r.engine.add_request(prompts[2], max_new_tokens=60)
        for _ in range(3):
            r.engine.step()
        gate.open.clear()
        loading = r.engine.add_request(prompts[0], max_new_tokens=3)
        while not r.engine.counters.preemptions:
            r.engine.step()
        assert loading in r.engine.scheduler.loading
        gate.open.set()
        results = r.engine.run()
        assert results[older].tokens == expected_output(prompts[1], 60)
        assert results[younger].tokens == expected_output(prompts[2], 60)
        assert results[loading].tokens == expected_output(prompts[0], 3)
        assert r.held == 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_failed_loads_fall_back_to_computing_with_the_same_output(every: int) -> None:
    calls, broken = 0, False

    def fails() -> bool:
        nonlocal calls
        calls += 1
        return broken and calls % every == 0

    tier = {"copy": Failing(fails), "batch_bytes": 1}
    with rig([12, 4], states=1, tier_pages=[64, 16], tier=tier) as r:
        prompt = tokens(150, 1)
        generate(r.engine, prompt, 5)
        evict_all(r)
        broken = True
        request = r.engine.add_request(prompt, max_new_tokens=5)
        result = r.engine.run()[request]
        assert result.tokens == expected_output(prompt, 5)
        assert r.engine.counters.failed_loads > 0
        assert r.held == 0


def test_a_load_that_misses_its_deadline_is_computed_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    gate.open.set()
    with rig([24], tier_pages=[64], tier={"copy": gate}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        gate.entered.clear()
        request = r.engine.add_request(prompt, max_new_tokens=4)
        r.engine.step()
        assert gate.entered.wait(DRAIN_SECONDS)
        pass_deadlines(monkeypatch)
        result = r.engine.run()[request]
        assert result.tokens == expected_output(prompt, 4)
        assert result.usage.cached_tokens == 0
        assert r.engine.counters.failed_loads == 1
        assert r.manager.stats().pinned == 0
        assert held_pages(r.manager) == 6  # quarantined until the late copy has ended
        gate.open.set()
        assert r.held == 0


def test_a_decode_has_its_token_beside_an_older_prefill() -> None:
    begun, go_on = threading.Event(), threading.Event()
    broken = False

    def copy(*args: Any) -> None:
        if not broken:
            return native_copy(*args)
        begun.set()
        assert go_on.wait(DRAIN_SECONDS)
        raise OSError("injected")

    with rig([60], tier_pages=[64], tier={"copy": copy}, token_budget=32) as r:
        prompt = tokens(200, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        broken = True
        old = r.engine.add_request(prompt, max_new_tokens=1)
        young = r.engine.add_request(tokens(5, 2), max_new_tokens=600)
        r.engine.step()
        assert begun.wait(DRAIN_SECONDS)
        go_on.set()
        while old in r.engine.scheduler.loading:
            r.engine.step()
        del r.runner.steps[:]
        while not any(isinstance(e, Finished) for e in r.engine.step()):
            pass
        assert len(r.runner.steps) > 10
        assert all(step[-1][1] - step[-1][0] == 1 for step in r.runner.steps)
        assert all(len(step) == 2 for step in r.runner.steps[1:])
        r.engine.abort(young)


def test_a_full_transfer_queue_delays_a_request_and_loses_nothing() -> None:
    gate = Gate()
    gate.open.set()
    one_at_a_time = {"copy": gate, "queue_depth": 1}
    with rig([40], tier_pages=[64], tier=one_at_a_time, token_budget=200) as r:
        prompts = [tokens(100, i) for i in range(3)]
        for prompt in prompts:
            generate(r.engine, prompt, 1)
            evict_all(r)
        gate.open.clear()
        ids = [r.engine.add_request(p, max_new_tokens=4) for p in prompts]
        for _ in range(4):
            r.engine.step()
        assert len(r.engine.scheduler.loading) < 3
        gate.open.set()
        results = r.engine.run()
        for i, prompt in zip(ids, prompts, strict=True):
            assert results[i].tokens == expected_output(prompt, 4)
            assert results[i].usage.host_tokens == 96


def test_twins_behind_a_load_are_looked_up_once_and_hold_nothing_in_the_tier() -> None:
    gate = Gate()
    gate.open.set()
    with rig([40], tier_pages=[64], tier={"copy": gate}, max_waiting=200) as r:
        prompt = tokens(200, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        assert r.offload is not None
        lookup, asked = r.offload.lookup, 0

        def counted(handle: int) -> Hit | None:
            nonlocal asked
            asked += 1
            return lookup(handle)

        r.offload.lookup = counted  # type: ignore[method-assign]
        gate.open.clear()
        leader = r.engine.add_request(prompt[:100], max_new_tokens=2)
        decoding = r.engine.add_request(tokens(16, 2), max_new_tokens=60)
        twins = [r.engine.add_request(prompt, max_new_tokens=2) for _ in range(100)]
        per_step = []
        for _ in range(40):
            before = asked
            r.engine.step()
            per_step.append(asked - before)
        assert max(per_step) <= MAX_LOOKUPS
        assert asked == 102
        assert list(r.engine.scheduler.loading) == [leader]
        assert r.offload.stats().pinned_pages < 12  # 6 of the load, and those of stores
        gate.open.set()
        results = r.engine.run()
        assert results[leader].usage.host_tokens == 96
        assert results[decoding].reason is Reason.LENGTH
        wanted = expected_output(prompt, 2)
        assert all(results[i].tokens == wanted for i in twins)
        assert results[twins[0]].usage[2:4] == (96, 96)
        assert r.held == 0


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_twins_go_on_when_the_load_that_they_wait_for_comes_to_nothing(end: str) -> None:
    gate = Gate()
    gate.open.set()
    broken = threading.Event()

    def copy(*args: Any) -> None:
        gate(*args)
        if broken.is_set():
            broken.clear()
            raise OSError("injected")

    with rig([24], tier_pages=[64], tier={"copy": copy}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        ids = [r.engine.add_request(prompt, max_new_tokens=2) for _ in range(3)]
        r.engine.step()
        assert list(r.engine.scheduler.loading) == ids[:1]
        if end == "abort":
            r.engine.abort(ids[0])
        else:
            broken.set()
        gate.open.set()
        results = r.engine.run()
        for i in ids[end == "abort" :]:
            assert results[i].tokens == expected_output(prompt, 2)
        assert r.held == 0


def test_a_preempted_request_remembers_that_its_tier_fails() -> None:
    broken = False
    with rig([24], tier_pages=[64], tier={"copy": Failing(lambda: broken)}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        broken = True
        request = r.engine.add_request(prompt, max_new_tokens=40)
        for _ in range(8):
            while request not in [q.id for q in r.engine.scheduler.running]:
                r.engine.step()
            r.engine.preempt(request)
            evict_all(r)
        result = r.engine.run()[request]
        assert result.tokens == expected_output(prompt, 40)
        assert 1 <= r.engine.counters.failed_loads <= MAX_FAILED_LOADS
        assert r.offload is not None
        assert not r.offload._loads.faults  # and is forgotten at its end
