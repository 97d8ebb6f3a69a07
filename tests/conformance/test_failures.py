"""Loads that fail, come late, or never end: a request computes, its blocks come back, the engine goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.faulty import Clock, tier_with, worker_of
from conformance.stack import Stack, expected_outputs, full, state, window
from vllm.v1.request import RequestStatus

from kvcache.connectors.adapters.vllm import worker_side
from kvcache.connectors.adapters.vllm.records import StepResults
from kvcache.connectors.base import Direction, TransferResult

PROMPT = [i * 7 % 199 for i in range(150)]
SPECS: list[list[Any]] = [[full()], [full(), window()], [full(), state()]]


def ids(specs: list[Any]) -> str:
    return ", ".join(type(spec).__name__ for spec in specs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the connector's worker."""
    made = Clock()
    monkeypatch.setattr(worker_side, "time", made)
    return made


def side(stack: Stack) -> Any:
    return stack.connector._scheduler


def forgotten(stack: Stack) -> None:
    """A prompt is in the tier, and not on the device."""
    stack.add("first", PROMPT, 4)
    for _ in range(100):
        if not stack.busy:
            break
        stack.step()
        worker_of(stack).deliver()
    assert not stack.busy
    stack.forget()


def loading(stack: Stack, name: str = "again", most: int = 4) -> Any:
    """A request whose load is in flight."""
    forgotten(stack)
    request = stack.add(name, PROMPT, most)
    stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


@pytest.mark.parametrize("specs", SPECS, ids=ids)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails(specs: list[Any], policy: str) -> None:
    extra = tier_with({"corrupt": 1.0})
    with Stack(specs=specs, extra=extra, policy=policy, blocks=60) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        request = stack.serve("again", PROMPT)
        if policy == "recompute":
            assert list(request.output_token_ids) == expected_outputs(request)
        else:
            assert request.status is RequestStatus.FINISHED_ERROR
        assert stack.free == stack.setup.blocks - 1
        assert side(stack).tier.stats().failed_pages
        side(stack).tier.check()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails_while_its_step_waits(policy: str) -> None:
    extra = tier_with({"corrupt": 1.0}) | {"load": "sync"}
    with Stack(extra=extra, policy=policy) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        request = stack.serve("again", PROMPT)
        if policy == "recompute":
            assert list(request.output_token_ids) == expected_outputs(request)
        else:
            assert request.status is RequestStatus.FINISHED_ERROR
        assert stack.free == stack.setup.blocks - 1


@pytest.mark.parametrize("specs", SPECS, ids=ids)
def test_a_lost_completion(specs: list[Any], clock: Clock) -> None:
    """The request ends, and its blocks come back with the result, however late that is."""
    extra = tier_with(hold=True, deadline_seconds=2.0)
    with Stack(specs=specs, extra=extra, blocks=60) as stack:
        request = loading(stack)
        free = stack.free
        clock.now += 2.0 + worker_side.GRACE_SECONDS
        stack.run()
        assert list(request.output_token_ids) == expected_outputs(request)
        assert (
            free <= stack.free < stack.setup.blocks - 1
        )  # what is still being written is not given away
        assert side(stack).tier.stats().late_transfers == 1
        for _ in range(3):
            worker_of(stack).deliver()
            stack.step()
        assert stack.free == stack.setup.blocks - 1
        side(stack).tier.check()


def test_an_abort_in_the_middle_of_a_load(clock: Clock) -> None:
    extra = tier_with(hold=True, deadline_seconds=2.0)
    with Stack(extra=extra) as stack:
        loading(stack)
        stack.abort("again")
        worker_of(stack).deliver()
        stack.run()
        assert stack.free == stack.setup.blocks - 1
        assert not side(stack)._moving
        side(stack).tier.check()


def test_an_abort_in_the_middle_of_a_load_that_is_lost(clock: Clock) -> None:
    """vLLM itself keeps the blocks and the id for ever; here until the deadline."""
    extra = tier_with(hold=True, deadline_seconds=2.0)
    with Stack(extra=extra) as stack:
        loading(stack)
        stack.abort("again")
        clock.now += 2.0 + worker_side.GRACE_SECONDS
        stack.run()
        assert not stack.scheduler.requests
        for _ in range(3):
            worker_of(stack).deliver()
            stack.step()
        assert stack.free == stack.setup.blocks - 1


def test_a_tier_that_dies(clock: Clock) -> None:
    extra = tier_with({"die_after": 4}, deadline_seconds=2.0)
    with Stack(extra=extra) as stack:
        for number in range(12):
            if stack.pool.num_gpu_blocks == stack.free + 1:
                stack.scheduler.reset_prefix_cache()
            request = stack.add(f"r{number}", [number, *PROMPT], 4)
            for _ in range(200):
                if not stack.busy:
                    break
                if not stack.step():
                    clock.now += 1.0
            assert list(request.output_token_ids) == expected_outputs(request)
        assert worker_of(stack).dead


def test_ghost_ids_and_strange_results() -> None:
    """vLLM's scheduler dies of an id that it does not know: none gets that far."""
    with Stack(extra=tier_with()) as stack:
        stack.serve("first", PROMPT)
        ok = worker_of(stack)._waiting  # the tier's worker says what nobody asked for
        for direction in Direction:
            ok.append(TransferResult(10**6, direction, np.ones(3, np.uint8)))
        request = stack.serve("again", [5, *PROMPT])
        assert list(request.output_token_ids) == expected_outputs(request)
        assert side(stack).unknown == 2
        side(stack).take(StepResults([], 1))
        assert side(stack).unknown == 3
        assert stack.free == stack.setup.blocks - 1


def test_a_request_gives_up_a_tier_that_always_fails() -> None:
    with Stack(extra=tier_with({"corrupt": 1.0})) as stack:
        stack.serve("first", PROMPT)
        stack.forget()
        before = side(stack).tier.stats().failed_pages
        stack.serve("again", PROMPT)
        tried = side(stack).tier.stats().failed_pages - before
        assert tried <= 9  # what failed once is not asked for again


def test_a_full_queue_is_no_failure() -> None:
    with Stack(extra=tier_with({"refuse": 0.5}, seed=3), policy="recompute") as stack:
        for turn in range(5):
            request = stack.serve(f"r{turn}", PROMPT)
            assert list(request.output_token_ids) == expected_outputs(request)
            stack.forget()
        assert stack.free == stack.setup.blocks - 1
