from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine.stamp_runner import VOCAB, StampRunner, expected_output, stamp_geometry

from kvcache import (
    CapacityError,
    ConfigError,
    Dense,
    HandleError,
    InputError,
    KVCacheError,
    Manager,
    Sparse,
)
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.driver import Offload
from kvcache.core.records import KEYED_DTYPE
from kvcache.core.retain import RetentionPolicy
from kvcache.engine.chunk import Chunk
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Event, Finished, Reason, Result, Status, Token
from kvcache.engine.runner import TorchRunner
from kvcache.engine.smollm2 import load_model, load_tokenizer
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)

DRAIN_SECONDS = 20.0


class Rig(NamedTuple):
    engine: Engine
    manager: Manager
    runner: StampRunner
    offload: Offload | None

    @property
    def held(self) -> int:
        """Pages with a reference, over all groups, once nothing is in flight."""
        if self.offload is not None:
            assert self.offload.drain(DRAIN_SECONDS)
            self.offload.check()
        self.manager.check()
        groups = range(len(self.manager.geometry.groups))
        return sum(self.manager.pool_stats(g).held for g in groups)


@contextmanager
def rig(
    pages: Sequence[int],
    *blocks: int,
    states: int = 0,
    retention: RetentionPolicy | None = None,
    tier_pages: Sequence[int] | None = None,
    tier: dict[str, Any] | None = None,
    runner_type: type[StampRunner] = StampRunner,
    **limits: Any,
) -> Iterator[Rig]:
    geometry = stamp_geometry(*(blocks or (16,)), states=states)
    manager = Manager(geometry, pages=pages, retention=retention or Sparse())
    runner = runner_type(geometry, pages)
    offload = None
    if tier_pages is not None:
        connector = CpuConnector(geometry, pages=tier_pages, **(tier or {}))
        offload = Offload(manager, connector, runner.regions())
    settings = EngineSettings(**({"token_budget": 64, "max_requests": 4, "debug": True} | limits))
    try:
        yield Rig(Engine(runner, manager, offload, settings=settings), manager, runner, offload)
    finally:
        if offload is not None:
            offload.close()


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def generate(engine: Engine, prompt: Sequence[int], count: int) -> Result:
    """One request, to its end."""
    request = engine.add_request(prompt, max_new_tokens=count)
    return engine.run()[request]


class Gate:
    """A copy function that waits, with a deadline, until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> None:
        self.entered.set()
        assert self.open.wait(DRAIN_SECONDS)
        native_copy(*args)


class Failing:
    """A copy function whose calls fail when `fails` says so."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails = fails

    def __call__(self, *args: Any) -> None:
        if self.fails():
            raise OSError("injected")
        native_copy(*args)


def evict_all(rig: Rig) -> None:
    """Push everything out of the device, not out of the tier's memory."""
    assert rig.offload is None or rig.offload.drain(DRAIN_SECONDS)
    rig.manager.clear()


# ---- what is refused ---------------------------------------------------------------------------


def test_bad_prompts_are_refused_with_the_numbers() -> None:
    with rig([8]) as r:
        add = r.engine.add_request
        with pytest.raises(InputError, match="the prompt is empty"):
            add([], max_new_tokens=1)
        with pytest.raises(InputError, match=f"from -1 to 5: .* 0 to {VOCAB - 1}"):
            add([5, -1], max_new_tokens=1)
        with pytest.raises(InputError, match=f"from 0 to {VOCAB}"):
            add([0, VOCAB], max_new_tokens=1)
        with pytest.raises(InputError, match="max_new_tokens is 0"):
            add([1], max_new_tokens=0)
        with pytest.raises(InputError, match="together 100001, the model's context is 100000"):
            add(np.zeros(99_999, np.int32), max_new_tokens=2)
        with pytest.raises(ConfigError, match="whole numbers"):
            add([0.5], max_new_tokens=1)  # type: ignore[list-item]
        assert not r.engine.busy
        assert r.manager.stats().open_requests == 0


def test_a_request_that_never_fits_is_refused_with_pool_and_settings() -> None:
    with rig([8]) as r:
        r.engine.add_request(tokens(100, 1), max_new_tokens=28)
        with pytest.raises(
            CapacityError, match=r"129 tokens .* needs 9 pages .* 'attention0', its pool has 8"
        ):
            r.engine.add_request(tokens(100, 1), max_new_tokens=29)
        r.engine.run()


def test_the_queue_is_bounded() -> None:
    with rig([8], max_waiting=2) as r:
        r.engine.add_request([1], max_new_tokens=1)
        r.engine.add_request([2], max_new_tokens=1)
        with pytest.raises(CapacityError, match="2 requests wait already"):
            r.engine.add_request([3], max_new_tokens=1)
        r.engine.run()


@pytest.mark.parametrize("name", ["max_waiting", "idle_wait_seconds", "stall_seconds"])
def test_settings_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        EngineSettings(**{name: -1})


def test_a_manager_of_another_geometry_is_refused() -> None:
    geometry = stamp_geometry(16)
    manager = Manager(geometry, pages=[8], retention=Sparse())
    with pytest.raises(ConfigError, match="different geometries"):
        Engine(StampRunner(stamp_geometry(8), [8]), manager)


def test_unknown_requests_are_refused() -> None:
    with rig([8]) as r:
        request = r.engine.add_request([1, 2], max_new_tokens=1)
        r.engine.run()
        for call in (r.engine.abort, r.engine.preempt):
            with pytest.raises(HandleError, match=f"request {request} is unknown or has ended"):
                call(request)


# ---- what comes out ----------------------------------------------------------------------------


def test_events_are_the_tokens_in_order_then_the_end() -> None:
    with rig([8]) as r:
        prompt = tokens(20, 1)
        request = r.engine.add_request(prompt, max_new_tokens=3)
        events = list(r.engine.stream())
        assert events[:3] == [Token(request, t) for t in expected_output(prompt, 3)]
        end = events[3]
        assert isinstance(end, Finished)
        assert end.reason is Reason.LENGTH
        assert end.usage == (20, 3, 0, 0, 0)
        assert end.timing.arrival <= end.timing.first_token <= end.timing.finish
        assert end.timing.first_token_seconds == end.timing.first_token - end.timing.arrival
        assert len(events) == 4
        assert not r.engine.busy


def test_a_stop_id_ends_the_output_and_is_part_of_it() -> None:
    with rig([8]) as r:
        prompt = tokens(20, 1)
        wanted = expected_output(prompt, 9)
        request = r.engine.add_request(prompt, max_new_tokens=9, stop_ids=[wanted[4]])
        result = r.engine.run()[request]
        assert result.reason is Reason.STOP
        assert result.tokens == wanted[:5]


def test_the_next_turn_hits_prompt_and_output() -> None:
    with rig([20]) as r:
        prompt = tokens(40, 1)
        output = generate(r.engine, prompt, 10).tokens
        second = r.engine.add_request([*prompt, *output, *tokens(5, 2)], max_new_tokens=1)
        assert r.engine.run()[second].usage.device_tokens == 48
        assert r.engine.counters.computed_tokens == 40 + 9 + 7


def test_requests_may_be_added_while_a_stream_runs() -> None:
    with rig([20]) as r:
        r.engine.add_request(tokens(10, 1), max_new_tokens=3)
        seen, late = [], None
        for event in r.engine.stream():
            seen.append(event)
            if late is None:
                late = r.engine.add_request(tokens(10, 2), max_new_tokens=2)
        assert [e.request for e in seen if isinstance(e, Finished)][-1] == late


def test_run_gives_whole_outputs_of_requests_that_had_already_begun() -> None:
    with rig([20]) as r:
        prompt = tokens(10, 1)
        request = r.engine.add_request(prompt, max_new_tokens=6)
        for _ in range(3):
            r.engine.step()
        assert r.engine.run()[request].tokens == expected_output(prompt, 6)


CASES = [
    ((16,), [14], 0, Sparse()),
    ((16,), [200], 0, Sparse()),
    ((4, 8), [56, 28], 0, Sparse()),
    ((16,), [14, 3], 1, Sparse()),
    ((16,), [14, 6], 1, Dense()),
    ((8,), [28, 3, 4], 2, Sparse(16)),
]


@pytest.mark.parametrize("budget", [4, 17, 1000])
@pytest.mark.parametrize("tier", [None, 1, 8])
@pytest.mark.parametrize(("blocks", "pages", "states", "retention"), CASES)
def test_outputs_do_not_depend_on_pool_tier_or_budget(
    blocks: tuple[int, ...],
    pages: list[int],
    states: int,
    retention: RetentionPolicy,
    tier: int | None,
    budget: int,
) -> None:
    tier_pages = None if tier is None else [n * tier for n in pages]
    shared = tokens(90, 1)
    with rig(
        pages,
        *blocks,
        states=states,
        retention=retention,
        tier_pages=tier_pages,
        token_budget=budget,
    ) as r:
        prompts = [[*shared[: 20 * (i % 5)], *tokens(3 + 11 * i, i)] for i in range(10)]
        ids = [r.engine.add_request(p, max_new_tokens=12) for p in prompts]
        results = r.engine.run()
        for i, prompt in zip(ids, prompts, strict=True):
            assert results[i].tokens == expected_output(prompt, 12)
        assert r.held == 0


# ---- the tier ------------------------------------------------------------------------------------


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


def test_a_load_that_misses_its_deadline_is_computed_instead() -> None:
    gate = Gate()
    gate.open.set()
    with rig([24], tier_pages=[64], tier={"copy": gate, "deadline_seconds": 0.05}) as r:
        prompt = tokens(100, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        gate.open.clear()
        result = generate(r.engine, prompt, 4)
        assert result.tokens == expected_output(prompt, 4)
        assert result.usage.cached_tokens == 0
        assert r.engine.counters.failed_loads == 1
        assert r.manager.stats().pinned == 0
        assert r.manager.pool_stats(0).held == 6  # quarantined until the late copy has ended
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


# ---- ends that nobody planned ----------------------------------------------------------------------


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
        assert r.manager.pin(items).all()
        stuck = r.engine.add_request(tokens(100, 2), max_new_tokens=1)
        after = r.engine.add_request(tokens(20, 3), max_new_tokens=2)
        results = r.engine.run()
        assert results[stuck].reason is Reason.STALLED
        assert results[after].tokens == expected_output(tokens(20, 3), 2)
        r.manager.unpin(0, items["page"].astype(np.int32))
        assert r.held == 0


# ---- everything at once ----------------------------------------------------------------------------


class Play:
    """Random opens, aborts, preempts and steps, with every token checked as it comes."""

    def __init__(self, r: Rig, rng: random.Random) -> None:
        self.r, self.rng = r, rng
        self.shared = [tokens(90, -i) for i in range(1, 5)]
        self.wanted: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.opened = 0
        self.reasons: dict[Reason, int] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.got[event.request].append(event.token)
                continue
            wanted, got = self.wanted.pop(event.request), self.got.pop(event.request)
            assert got == wanted[: len(got)]
            assert (event.reason is Reason.LENGTH) == (got == wanted)
            self.reasons[event.reason] = self.reasons.get(event.reason, 0) + 1

    def act(self) -> None:
        rng, engine, dice = self.rng, self.r.engine, self.rng.random()
        if dice < 0.2 and len(self.wanted) < 20:
            prompt = rng.choice(self.shared)[: rng.randrange(1, 90)]
            prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(10)))]
            count = rng.randrange(1, 12)
            request = engine.add_request(prompt, max_new_tokens=count)
            self.wanted[request] = expected_output(prompt, count)
            self.got[request] = []
            self.opened += 1
        elif dice < 0.28 and self.wanted:
            request = rng.choice(list(self.wanted))
            with suppress(HandleError):  # aborted already, its event is still to come
                (engine.preempt if dice < 0.25 else engine.abort)(request)
        else:
            self.take(engine.step())


@pytest.mark.parametrize(
    ("steps", "blocks", "pages", "states", "retention", "tier", "failing"),
    [
        (10_000, (16,), [14], 0, Sparse(), None, 0.0),
        (10_000, (16,), [14, 4], 1, Sparse(32), 10, 0.1),
        (2_000, (4, 8), [28, 14, 5], 1, Dense(), 3, 0.0),
        (2_000, (8,), [28, 3, 5], 2, Sparse(), 2, 0.05),
    ],
)
def test_random_steps_leak_no_block(
    steps: int,
    blocks: tuple[int, ...],
    pages: list[int],
    states: int,
    retention: RetentionPolicy,
    tier: int | None,
    failing: float,
) -> None:
    rng, faults = random.Random(steps + len(pages)), random.Random(0)
    copies = {"copy": Failing(lambda: faults.random() < failing), "batch_bytes": 256}
    with rig(
        pages,
        *blocks,
        states=states,
        retention=retention,
        tier_pages=None if tier is None else [n * tier for n in pages],
        tier=copies if failing else {"queue_depth": 4},
        token_budget=rng.choice([11, 40, 200]),
        debug=False,
    ) as r:
        play = Play(r, rng)
        for step in range(steps):
            play.act()
            if step % 97 == 0:
                r.manager.check()
        play.take(list(r.engine.stream()))
        assert not play.wanted
        assert sum(play.reasons.values()) == play.opened == r.engine.counters.finished_requests
        assert set(play.reasons) == {Reason.LENGTH, Reason.ABORT}
        assert r.engine.counters.preemptions > 0
        assert (r.engine.counters.restored_tokens > 0) == (tier is not None)
        assert (r.engine.counters.failed_loads > 0) == (failing > 0)
        assert r.held == 0
        assert r.manager.stats()[:4] == (0, 0, 0, 0)


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


# ---- real models -------------------------------------------------------------------------------------


def torch_engine(
    model: Model, pages: Sequence[int], host_pages: Sequence[int] | None = None, **limits: Any
) -> tuple[Engine, Offload | None]:
    geometry = model.geometry
    runner = TorchRunner(model, pages)
    manager = Manager(geometry, pages=pages, retention=Sparse())
    offload = None
    if host_pages is not None:
        offload = Offload(manager, CpuConnector(geometry, pages=host_pages), runner.regions())
    settings = EngineSettings(**({"token_budget": 64, "max_requests": 4, "debug": True} | limits))
    return Engine(runner, manager, offload, settings=settings), offload


def play_turns(
    engine: Engine, offload: Offload | None, prompts: Sequence[Sequence[int]], turns: int, new: int
) -> list[list[int]]:
    """Sessions side by side; each turn adds the output so far and some tokens of its own."""
    histories = [list(p) for p in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for turn in range(turns):
        ids = [engine.add_request(h, max_new_tokens=new) for h in histories]
        results = engine.run()
        if offload is not None:
            assert offload.drain(DRAIN_SECONDS)
        for i, history in enumerate(histories):
            outputs[i] += results[ids[i]].tokens
            history += [*results[ids[i]].tokens, *prompts[i][turn : turn + 7]]
    return outputs


def test_tiny_hybrid_says_the_same_with_any_pool_tier_and_budget() -> None:
    model = build_model(3)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(60 + 20 * i)] for i in range(4)]

    def outputs(pages: list[int], host: list[int] | None, **limits: Any) -> list[list[int]]:
        engine, offload = torch_engine(model, pages, host, **limits)
        got = play_turns(engine, offload, prompts, 3, 9)
        if host is not None:
            assert engine.counters.restored_tokens > 0
            assert offload is not None
            offload.close()
        return got

    reference = outputs([200, 60], None, token_budget=1000)
    assert outputs([14, 6], None) == reference  # preempts and recomputes
    assert outputs([14, 6], [100, 60]) == reference
    assert outputs([14, 6], [100, 60], token_budget=20) == reference


def test_smollm2_says_the_same_after_a_restore(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    text = "The capital of France is Paris. The capital of Italy is Rome. " * 6
    prompt = load_tokenizer(smollm2_path).encode(text).tolist()
    engine, _ = torch_engine(model, [40], token_budget=512)
    reference = play_turns(engine, None, [prompt], 2, 6)
    engine, offload = torch_engine(model, [16], [40], token_budget=512)
    assert offload is not None
    first = play_turns(engine, offload, [prompt], 1, 6)[0]
    engine._manager.clear()
    result = generate(engine, [*prompt, *first, *prompt[:7]], 6)
    assert result.usage.host_tokens >= 80
    assert [*first, *result.tokens] == reference[0]
    offload.close()


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


@pytest.mark.parametrize("stops", [5, None, [[1]], [0.5]])
def test_bad_stop_ids_leave_no_request_behind(stops: Any) -> None:
    with rig([20]) as r:
        with pytest.raises(ConfigError, match="stop_ids"):
            r.engine.add_request(tokens(9, 1), max_new_tokens=1, stop_ids=stops)
        assert r.manager.stats().open_requests == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e10])
def test_waits_without_a_bound_are_refused(seconds: float) -> None:
    for name in ("idle_wait_seconds", "stall_seconds"):
        with pytest.raises(ConfigError, match=name):
            EngineSettings(**{name: seconds})
