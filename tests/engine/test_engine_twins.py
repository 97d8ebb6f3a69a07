"""Requests that share one long prefix and arrive together cause one load or one prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.clock import Clock
from engine.rig import (
    DRAIN_SECONDS,
    FINGERPRINT,
    Failing,
    Gate,
    Rig,
    evict_all,
    generate,
    rig,
    tokens,
)
from engine.stamp_runner import expected_output

from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.core.layout import Geometry
from kvcache.engine.request import Status

PREFIX = tokens(320, 7)
PREFIX_PAGES = 20
TWINS = 12
SESSIONS = 6


def add_twins(r: Rig, count: int = TWINS, priority: int = 0, salt: int = 0) -> dict[int, list[int]]:
    """Requests with tails of their own; what each must say."""
    wanted = {}
    for i in range(count):
        prompt = [*PREFIX, *tokens(1 + i % 5, 1000 * salt + i)]
        request = r.engine.add_request(prompt, max_new_tokens=3, priority=priority)
        wanted[request] = expected_output(prompt, 3)
    return wanted


def finish(r: Rig, wanted: dict[int, list[int]]) -> int:
    """To the end; returns the prompt tokens that were computed beyond one prefix and the tails."""
    results = r.engine.run()
    for request, output in wanted.items():
        assert results[request].tokens == output
    assert r.held == 0
    return r.engine.counters.computed_tokens - 7 * len(wanted)


def chain_in(folder: Path) -> Callable[[Geometry], Connector]:
    def make(geometry: Geometry) -> Connector:
        groups = len(geometry.groups)
        disk = DiskConnector(
            geometry, folder=folder, fingerprint=FINGERPRINT, layout="whole", pages=[99] * groups
        )
        return ChainConnector(CpuConnector(geometry, pages=[64] * groups), disk)

    return make


@pytest.mark.parametrize("budget", [48, 1000])
@pytest.mark.parametrize("states", [0, 1])
def test_one_prefill_serves_all(budget: int, states: int) -> None:
    with rig([100, 40][: 1 + states], states=states, token_budget=budget, max_requests=8) as r:
        assert finish(r, add_twins(r)) <= len(PREFIX) + 16


@pytest.mark.parametrize("states", [0, 1])
@pytest.mark.parametrize("chained", [False, True])
def test_one_load_serves_all(chained: bool, states: int, tmp_path: Path) -> None:
    connector = chain_in(tmp_path) if chained else None
    pages, tier = [100, 40][: 1 + states], None if chained else [99, 99]
    for new in (True, False) if chained else (True,):  # the second time the disk alone has it
        with rig(
            pages, states=states, max_requests=8, connector=connector,
            tier_pages=tier and tier[: 1 + states],
        ) as r:  # fmt: skip
            assert r.offload is not None
            if new:
                generate(r.engine, [*PREFIX, 5], 1)
                evict_all(r)
            loaded, computed = r.offload.stats().loaded_pages, r.engine.counters.computed_tokens
            assert finish(r, add_twins(r)) - computed <= 16
            assert r.offload.stats().loaded_pages - loaded <= PREFIX_PAGES + states


@pytest.mark.parametrize("times", [1, 3])
def test_when_the_one_that_loads_is_aborted_another_one_does(times: int) -> None:
    gate = Gate()
    gate.open.set()
    with rig([100], max_requests=8, tier_pages=[99], tier={"copy": gate}) as r:
        generate(r.engine, PREFIX, 1)
        evict_all(r)
        assert r.offload is not None
        computed = r.engine.counters.computed_tokens
        gate.open.clear()
        wanted = add_twins(r)
        for _ in range(times):
            while not r.engine.scheduler.loading:
                r.engine.step()
            (leader,) = r.engine.scheduler.loading
            r.engine.abort(leader)
            del wanted[leader]
            r.engine.step()
        gate.open.set()
        assert finish(r, wanted) - computed <= 16
        assert r.offload.stats().loaded_pages <= PREFIX_PAGES * (times + 1)


def test_when_the_load_fails_one_of_them_computes_it() -> None:
    broken = False
    with rig([100], max_requests=8, tier_pages=[99], tier={"copy": Failing(lambda: broken)}) as r:
        generate(r.engine, PREFIX, 1)
        evict_all(r)
        computed = r.engine.counters.computed_tokens
        broken = True
        assert finish(r, add_twins(r)) - computed <= len(PREFIX) + 16


def test_when_the_one_that_computes_is_preempted_the_others_go_on_from_there() -> None:
    with rig([100], token_budget=48, max_requests=8) as r:
        wanted = add_twins(r)
        for _ in range(3):
            r.engine.step()
            leaders = [q for q in r.engine.scheduler.running if q.remaining > 1]
            assert len(leaders) == 1
            r.engine.preempt(leaders[0].id)
        assert finish(r, wanted) <= len(PREFIX) + 16


def test_when_the_one_that_computes_is_aborted_another_one_goes_on() -> None:
    with rig([100], token_budget=48, max_requests=8) as r:
        wanted = add_twins(r)
        for _ in range(3):
            r.engine.step()
            (leader,) = [q for q in r.engine.scheduler.running if q.remaining > 1]
            r.engine.abort(leader.id)
            del wanted[leader.id]
        assert finish(r, wanted) <= len(PREFIX) + 16 + 3 * 7


@pytest.mark.parametrize("pages", [100, 60])
def test_twins_of_a_higher_priority_wait_for_the_prefill_of_a_lower_one(pages: int) -> None:
    with rig([pages], token_budget=48, max_requests=6, clock=Clock()) as r:
        other = r.engine.add_request(tokens(30, 1), max_new_tokens=40, priority=9)  # the oldest
        wanted = {other: expected_output(tokens(30, 1), 40)}
        wanted |= add_twins(r, 2, priority=5)
        for _ in range(3):
            r.engine.step()
        wanted |= add_twins(r, 6, priority=0, salt=1)
        wanted |= add_twins(r, 3, priority=7, salt=2)
        computed = finish(r, wanted)
        assert computed <= 30 + 40 - 7 + len(PREFIX) + 48


def test_twins_of_a_higher_priority_share_the_load_of_a_lower_one() -> None:
    gate = Gate()
    gate.open.set()
    with rig([100], max_requests=6, tier_pages=[99], tier={"copy": gate}, clock=Clock()) as r:
        generate(r.engine, PREFIX, 1)
        evict_all(r)
        gate.open.clear()
        wanted = add_twins(r, 3, priority=5)
        r.engine.step()
        (leader,) = r.engine.scheduler.loading
        wanted |= add_twins(r, 3, priority=-5, salt=1)
        for _ in range(3):
            r.engine.step()
        assert list(r.engine.scheduler.loading) == [leader]
        assert all(q.status is Status.WAITING for q in r.engine.scheduler.waiting)
        gate.open.set()
        finish(r, wanted)
        assert r.offload is not None
        assert r.offload.stats().loaded_pages == PREFIX_PAGES


SHAPES: list[dict[str, int]] = [{}, {"states": 1}, {"window": 40}, {"states": 1, "window": 40}]


def returning(r: Rig, shared: int, own: int) -> dict[int, list[int]]:
    """Sessions with a common beginning that the tier alone has, all back; what each must say."""
    histories = [[*PREFIX[:shared], *tokens(own, i)] for i in range(SESSIONS)]
    for history in histories:
        generate(r.engine, history, 1)
    evict_all(r)
    prompts = [[*history, *tokens(3, 99)] for history in histories]
    return {r.engine.add_request(p, max_new_tokens=6): expected_output(p, 6) for p in prompts}


@contextmanager
def gated(shape: dict[str, int], pages: int) -> Iterator[tuple[Rig, Gate]]:
    gate, groups = Gate(), 1 + len(shape)
    gate.open.set()
    with rig(
        [pages] * groups, **shape, max_requests=SESSIONS, token_budget=512,
        tier_pages=[400] * groups, tier={"copy": gate},
    ) as r:  # fmt: skip
        yield r, gate
        gate.open.set()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_short_common_beginning_is_no_reason_to_load_one_after_the_other(
    shape: dict[str, int],
) -> None:
    with gated(shape, 200) as (r, gate):
        wanted = returning(r, 64, 320)
        gate.open.clear()
        for _ in range(3):
            r.engine.step()
        assert len(r.engine.scheduler.loading) == SESSIONS
        gate.open.set()
        finish(r, wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_common_beginning_is_loaded_once_and_then_the_rest_side_by_side(
    shape: dict[str, int],
) -> None:
    with gated(shape, 100) as (r, gate):
        wanted = returning(r, 320, 48)
        assert r.offload is not None
        before, computed = r.offload.stats().loaded_pages, r.engine.counters.computed_tokens
        gate.open.clear()
        for _ in range(3):
            r.engine.step()
        assert len(r.engine.scheduler.loading) == 1
        gate.open.set()
        assert r.offload.wait(DRAIN_SECONDS)
        gate.open.clear()
        for _ in range(3):
            r.engine.step()
        assert len(r.engine.scheduler.loading) == SESSIONS - 1
        gate.open.set()
        assert finish(r, wanted) - computed <= SESSIONS
        sparse = SESSIONS * (shape.get("states", 0) + 4 * ("window" in shape))
        assert r.offload.stats().loaded_pages - before <= PREFIX_PAGES + 3 * SESSIONS + sparse


def test_who_waited_for_a_load_that_failed_waits_for_the_next_one() -> None:
    gate = Gate()
    gate.open.set()
    broken = False

    def copy(*args: Any) -> None:
        gate(*args)
        if broken:
            raise OSError("injected")

    with rig([100], max_requests=8, tier_pages=[99], tier={"copy": copy}) as r:
        generate(r.engine, PREFIX, 1)
        evict_all(r)
        gate.open.clear()
        wanted, broken = add_twins(r), True
        r.engine.step()
        assert len(r.engine.scheduler.loading) == 1
        gate.open.set()
        assert r.offload is not None
        assert r.offload.wait(DRAIN_SECONDS)
        gate.open.clear()
        broken = False
        r.engine.step()
        r.engine.step()
        assert len(r.engine.scheduler.loading) == 1
        assert [q.awaits is not None for q in r.engine.scheduler.waiting].count(True) > 0
        gate.open.set()
        finish(r, wanted)


def test_who_was_refused_is_asked_again_when_a_load_has_brought_a_part_of_what_it_needs() -> None:
    """Beside the one that loaded there is room for the rest alone; no page comes free before."""
    with gated({}, 26) as (r, gate):
        texts = [[*PREFIX[:64], *tokens(own, own)] for own in (160, 128)]
        for text in texts:
            generate(r.engine, text, 1)
        evict_all(r)
        gate.open.clear()
        wanted = {}
        for text, count in zip(texts, (12, 4), strict=True):
            request = r.engine.add_request([*text, 1, 2], max_new_tokens=count)
            wanted[request] = expected_output([*text, 1, 2], count)
        first, second = wanted
        for _ in range(3):
            r.engine.step()
        assert list(r.engine.scheduler.loading) == [first]
        assert [q.id for q in r.engine.scheduler.waiting] == [second]
        gate.open.set()
        assert r.offload is not None
        assert r.offload.wait(DRAIN_SECONDS)
        for _ in range(3):
            r.engine.step()
        assert not r.engine.scheduler.waiting
        assert len(r.engine.scheduler.running) + len(r.engine.scheduler.loading) == 2
        finish(r, wanted)
