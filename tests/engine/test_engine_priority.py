"""Who goes first: priorities, ages, and the oldest request that nobody pushes out."""

from __future__ import annotations

import random

import pytest
from engine.clock import Clock
from engine.rig import Rig, rig, tokens
from engine.stamp_runner import expected_output
from hypothesis import given, settings, strategies as st

from kvcache import ConfigError
from kvcache.engine.request import Event, Finished, Reason, Token


def add(r: Rig, length: int, seed: int, count: int, priority: int = 0) -> int:
    return r.engine.add_request(tokens(length, seed), max_new_tokens=count, priority=priority)


def ended(events: list[Event]) -> list[int]:
    return [e.request for e in events if isinstance(e, Finished)]


def test_smaller_numbers_go_first_and_equal_ones_in_order_of_arrival() -> None:
    with rig([40], max_requests=1, clock=Clock()) as r:
        ids = [add(r, 20, i, 2, p) for i, p in enumerate([0, 3, -2, 0, 3, -2, 1])]
        order = ended(list(r.engine.stream()))
    assert order == [ids[i] for i in (2, 5, 0, 3, 6, 1, 4)]


def test_a_running_request_makes_room_for_a_higher_priority() -> None:
    with rig([10], clock=Clock()) as r:
        oldest = add(r, 20, 1, 30, 1)
        low = add(r, 60, 2, 30, 1)
        for _ in range(3):
            r.engine.step()
        high = add(r, 90, 3, 2, 0)
        r.engine.step()
        assert [q.id for q in r.engine.scheduler.waiting] == [low]
        assert ended(list(r.engine.stream())) == [high, oldest, low]
        assert r.engine.counters.preemptions == 1


def test_a_waiting_request_pushes_nobody_of_its_own_priority_out() -> None:
    """The tier did not know of it yet, so that a younger one was admitted before it."""
    with rig([20], max_requests=2, tier_pages=[20], clock=Clock()) as r:
        assert r.offload is not None
        oldest, passed, young = (add(r, 20, i, 30) for i in range(3))
        lookup = r.offload.lookup
        r.offload.lookup = lambda h: None if h == passed else lookup(h)  # type: ignore[method-assign]
        r.engine.step()
        r.offload.lookup = lookup  # type: ignore[method-assign]
        assert [q.id for q in r.engine.scheduler.running] == [oldest, young]
        order = ended(list(r.engine.stream()))
        assert order[-1] == passed
        assert r.engine.counters.preemptions == 0


def test_of_two_running_requests_the_lower_priority_gives_its_pages() -> None:
    with rig([9], clock=Clock()) as r:
        oldest = add(r, 14, 1, 60, 5)
        low = add(r, 40, 2, 60, 5)
        high = add(r, 40, 3, 40, 0)
        events = list(r.engine.stream())
        order = ended(events)
        assert order[0] == high
        assert order.index(oldest) < order.index(low)


def test_the_oldest_is_pushed_out_by_no_priority() -> None:
    with rig([8], clock=Clock()) as r:
        oldest = add(r, 60, 0, 40, 1000)
        r.engine.step()
        others = [add(r, 60, i, 20, -i) for i in range(1, 6)]
        usage = {e.request: e.usage for e in r.engine.stream() if isinstance(e, Finished)}
        assert set(usage) == {oldest, *others}
        assert usage[oldest].recomputed_tokens == 0


def test_a_low_priority_is_passed_for_a_while_and_not_for_ever() -> None:
    """One request of priority 0 arrives each second, the engine ends one each second."""
    clock = Clock()
    with rig([6], max_requests=1, clock=clock, priority_seconds=20.0) as r:
        first, low = add(r, 5, 0, 1), add(r, 5, 1, 1, 1)
        arrived, order = {first: 0.0, low: 0.0}, []
        for second in range(1, 60):
            clock.advance(1.0)
            arrived[add(r, 5, 100 + second, 1)] = float(second)
            order += ended(r.engine.step())
        passed = order[: order.index(low)]
        assert all(arrived[i] < 20.0 for i in passed)
        assert len(passed) > 10


@pytest.mark.parametrize("priority", [1.5, "high", True, 10_000_000])
def test_a_priority_that_cannot_be_is_refused(priority: object) -> None:
    with rig([6]) as r:
        with pytest.raises(ConfigError, match="priority"):
            r.engine.add_request([1], max_new_tokens=1, priority=priority)  # type: ignore[arg-type]
        assert not r.engine.busy


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pages=st.integers(7, 16),
    states=st.sampled_from([0, 1]),
    spread=st.sampled_from([0, 1, 5]),
    max_requests=st.integers(1, 5),
    token_budget=st.sampled_from([5, 17, 40]),
)
def test_everything_ends_whatever_the_priorities(
    seed: int, pages: int, states: int, spread: int, max_requests: int, token_budget: int
) -> None:
    """No clock moves: there is no ageing but by arrivals; a request that stood still would be stalled."""
    rng = random.Random(seed)
    with rig(
        pages + 2 * states, 16, states=states, max_requests=max_requests, debug=False,
        clock=Clock(), token_budget=token_budget,
    ) as r:  # fmt: skip
        wanted = {}
        for _ in range(12):
            prompt = tokens(rng.randrange(1, 70), rng.randrange(4))
            count = rng.randrange(1, 40)
            request = r.engine.add_request(
                prompt, max_new_tokens=count, priority=rng.randint(-spread, spread)
            )
            wanted[request] = expected_output(prompt, count)
            for _ in range(rng.randrange(4)):
                r.engine.step()
        outputs = {i: list(q.output) for i, q in r.engine._requests.items()}
        for _ in range(4000):
            if not r.engine.busy:
                break
            for event in r.engine.step():
                if isinstance(event, Token):
                    outputs[event.request].append(event.token)
                else:
                    assert event.reason is Reason.LENGTH
                    if event.request in outputs:
                        assert outputs[event.request] == wanted[event.request]
        assert not r.engine.busy
        assert max(r.runner.step_tokens) <= token_budget
        assert max(map(len, r.runner.steps)) <= max_requests
        assert r.held == 0
