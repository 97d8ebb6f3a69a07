"""Load or compute: the estimates, and that the choice is never much worse than the better of the two."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine.clock import Clock
from engine.rig import DRAIN_SECONDS, evict_all, generate, rig, tokens
from engine.simulated import SimulatedRunner, SimulatedWorker, Speeds, simulated
from engine.stamp_runner import StampRunner, expected_output, stamp_geometry
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from kvcache import ConfigError, Manager, Sparse
from kvcache.connectors.base import LoadBytes
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.driver import Offload
from kvcache.engine.chunk import Chunk
from kvcache.engine.costs import SAMPLES, Costs, Fit, Loads, hit_bytes
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.runner import TorchRunner
from kvcache.engine.tiny import build_model


@given(
    a=st.floats(0, 1e-2), b=st.floats(1e-9, 1e-5), noise=st.floats(0, 0.05), seed=st.integers(0, 99)
)
def test_a_fit_finds_the_line_beside_outliers(a: float, b: float, noise: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fit = Fit(2)
    for i in range(SAMPLES):
        size = float(rng.integers(1_000, 10_000_000))
        seconds = (a + b * size) * (1 + noise * rng.uniform(-1, 1))
        fit.add((1.0, size), seconds * (20 if i % 8 == 3 else 1))
    for size in (2e6, 5e6, 1e7):
        assert fit.seconds((1.0, size)) == pytest.approx(a + b * size, rel=0.15 + 3 * noise)


def test_a_fit_never_predicts_less_than_nothing() -> None:
    fit = Fit(2)
    fit.add((1.0, 10.0), 5.0)
    fit.add((1.0, 1000.0), 1.0)
    estimate = fit.seconds((1.0, 100_000.0))
    assert estimate is not None
    assert 0 <= estimate < 10


def test_a_fit_forgets_what_is_old() -> None:
    fit = Fit(2)
    for _ in range(100):
        fit.add((1.0, 1000.0), 1.0)
    for _ in range(SAMPLES):
        fit.add((1.0, 1000.0), 3.0)
    assert fit.seconds((1.0, 1000.0)) == pytest.approx(3.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_measurement_that_cannot_be_is_left_out(seconds: float) -> None:
    fit = Fit(2)
    fit.add((1.0, 5.0), seconds)
    assert fit.seconds((1.0, 5.0)) is None


def test_steps_of_decoding_say_nothing_about_prefill() -> None:
    costs = Costs(Loads.AUTO, 64)
    costs.note_step([(100, 101)] * 8, 1.0)
    costs.note_step([(100, 101)] * 8 + [(0, 4)], 1.0)
    assert costs.compute_seconds(0, 64) is None
    costs.note_step([(100, 101), (0, 64)], 1.0)
    assert costs.compute_seconds(0, 64) is not None


def test_a_way_that_looks_dear_is_tried_again_for_a_small_share_of_the_time() -> None:
    costs = Costs(Loads.AUTO, 64)
    costs.note_step([(0, 64)], 1.0)
    costs.note_load(1000, 3.0)
    tries, computed = 0, 0
    for _ in range(1000):
        excess = costs.excess_seconds(LoadBytes(1000, 0), 0, 64)
        if costs.affords(excess):
            costs.note_load_begun(excess)
            tries += 1
        else:
            costs.note_computed_instead(0, 64)
            computed += 1
    assert 0.5 * 0.05 * computed <= 2.0 * tries <= 0.05 * computed


def test_what_a_hit_takes_is_full_blocks_a_window_and_a_state() -> None:
    geometry = stamp_geometry(16, states=1, window=20)
    full, window, state = (g.page_bytes for g in geometry.groups)
    assert hit_bytes(geometry, 0, 160) == (10 * full + 2 * window + state, 0)
    assert hit_bytes(geometry, 96, 160) == (4 * full + 2 * window + state, 0)
    assert hit_bytes(geometry, 192, 160) == (2 * window + state, 0)  # full groups reach farther
    far = [np.zeros(12, np.uint8) for _ in range(3)]
    far[0][[0, 6, 9, 10]] = 1  # of which the hit takes two where 96 tokens are there
    far[1][[7, 9]] = 1
    assert hit_bytes(geometry, 96, 160, far) == (2 * full + window + state, 2 * full + window)
    far[2][9] = 1
    assert hit_bytes(geometry, 0, 160, far) == (7 * full + window, 3 * full + window + state)


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, always, never"):
        EngineSettings(loads="sometimes")


def seconds_of(speeds: Speeds, seed: int, states: int, loads: str) -> tuple[float, float, int]:
    """Sessions that return when the device has forgotten them: all, the first load's, tokens loaded."""
    rng = random.Random(seed)
    pages = [64, 8][: 1 + states]
    with simulated(
        pages, 16, speeds=speeds, states=states, tier_pages=[4096, 512][: 1 + states], loads=loads
    ) as r:
        assert isinstance(r.runner, SimulatedRunner)
        sessions = [tokens(rng.randrange(40, 400), i) for i in range(8)]
        for prompt in sessions:
            assert generate(r.engine, prompt, 1).tokens == expected_output(prompt, 1)
            assert r.offload is not None
            assert r.offload.drain(DRAIN_SECONDS)  # a slow store loses what the next one evicts
        begin, first = r.runner.clock.now, 0.0
        for _ in range(40):
            evict_all(r)
            before = r.runner.clock.now
            i = rng.randrange(len(sessions))
            result = generate(r.engine, sessions[i], 1)
            assert result.tokens == expected_output(sessions[i], 1)
            first = first or (r.runner.clock.now - before) * (result.usage.host_tokens > 0)
        assert r.held == 0
        assert r.offload is not None
        assert r.offload.stats().pinned_pages == 0
        return r.runner.clock.now - begin, first, r.engine.counters.restored_tokens


@settings(max_examples=6, deadline=None)
@given(
    step=st.sampled_from([1e-4, 5e-3]),
    token=st.sampled_from([1e-4, 1e-3]),
    context=st.sampled_from([0.0, 1e-5]),
    latency=st.sampled_from([1e-4, 5e-2]),
    byte=st.sampled_from([1e-7, 3e-6, 1e-5, 1e-4, 1e-3]),
    seed=st.integers(0, 99),
    states=st.sampled_from([0, 1]),
)
def test_the_choice_costs_at_most_a_tenth_more_than_the_better_of_the_two(
    step: float, token: float, context: float, latency: float, byte: float, seed: int, states: int
) -> None:
    """But for the first load, which has to be made to know what loads take."""
    speeds = Speeds(step, token, context, latency, byte)
    always, _, loaded = seconds_of(speeds, seed, states, "always")
    never, _, none = seconds_of(speeds, seed, states, "never")
    chosen, first, _ = seconds_of(speeds, seed, states, "auto")
    assert loaded > 0 == none
    assert chosen - first <= 1.1 * min(always, never)


def test_a_tier_that_is_slow_for_a_while_is_used_again_when_it_is_fast() -> None:
    slow = Speeds(byte=1.5e-4)
    with simulated([64], 16, speeds=slow, tier_pages=[512]) as r:
        assert r.offload is not None
        prompt = tokens(300, 1)
        generate(r.engine, prompt, 1)
        for _ in range(4):
            evict_all(r)
            generate(r.engine, prompt, 1)
        assert r.engine.counters.computed_instead_tokens >= 2 * 288
        r.offload._worker.speeds = Speeds(byte=1e-8)  # type: ignore[attr-defined]
        for _ in range(150):
            evict_all(r)
            if generate(r.engine, prompt, 1).usage.host_tokens:
                break
        for _ in range(40):
            evict_all(r)
            generate(r.engine, prompt, 1)
        evict_all(r)
        assert generate(r.engine, prompt, 1).usage.host_tokens == 288


def test_a_state_alone_is_loaded_where_the_device_has_the_rest() -> None:
    """Loading all would be dearer than computing; the full blocks are on the device, though."""
    speeds = Speeds(byte=1e-4)
    with simulated([64, 8], 16, speeds=speeds, states=1, tier_pages=[512, 64]) as r:
        assert r.offload is not None
        worker = r.offload._worker
        assert isinstance(worker, SimulatedWorker)
        prompt = tokens(300, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        worker.broken = {1}
        leaving = r.engine.add_request(prompt, max_new_tokens=1)
        while not r.engine.counters.failed_loads:
            r.engine.step()
        r.engine.abort(leaving)
        worker.broken = set()
        costs, whole = r.engine.scheduler.costs, hit_bytes(r.manager.geometry, 0, 288).near
        for loaded in (whole, whole // 8):
            costs.note_load(loaded, 1e-3 + 1e-4 * loaded)
        rest = hit_bytes(r.manager.geometry, 64, 288)  # it has computed a chunk before it left
        compute, load = costs.compute_seconds(64, 288), costs.load_seconds(rest)
        assert compute is not None
        assert load is not None
        assert compute < load
        assert generate(r.engine, prompt, 1).usage[2:4] == (64, 224)


def test_a_refused_request_that_will_compute_holds_nothing_in_the_tier() -> None:
    speeds = Speeds(byte=1e-1)
    with simulated([16], 16, speeds=speeds, tier_pages=[512]) as r:
        assert r.offload is not None
        prompt = tokens(150, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        r.engine.scheduler.costs.note_load(1000, 100.0)
        r.engine.add_request(tokens(150, 2), max_new_tokens=20)
        for _ in range(4):
            r.engine.step()
        late = r.engine.add_request(prompt, max_new_tokens=1)
        r.engine.step()
        assert [q.id for q in r.engine.scheduler.waiting] == [late]
        assert r.offload.drain(DRAIN_SECONDS)
        assert r.offload.stats().pinned_pages == 0
        assert r.engine.run()[late].usage.host_tokens == 0


def test_a_try_is_paid_for_when_its_load_begins_not_when_it_is_considered() -> None:
    """A request that has the credit for its dear load, and no space at first, loads in the end."""
    with simulated([16], 16, speeds=Speeds(byte=1e-4), tier_pages=[512]) as r:
        prompt = tokens(150, 1)
        generate(r.engine, prompt, 1)
        evict_all(r)
        costs, moved = r.engine.scheduler.costs, hit_bytes(r.manager.geometry, 0, 144)
        costs.note_load(moved.near, 2.0)
        excess = costs.excess_seconds(moved, 0, 144)
        assert not costs.affords(excess)
        while not costs.affords(excess):
            costs.note_computed_instead(0, 144)
        r.engine.add_request(tokens(150, 2), max_new_tokens=20)
        r.engine.step()
        late = r.engine.add_request(prompt, max_new_tokens=1)
        r.engine.step()
        assert [q.id for q in r.engine.scheduler.waiting] == [late]
        assert r.engine.run()[late].usage.host_tokens == 144
        assert not costs.affords(excess)


def test_a_real_copy_that_is_held_back_is_not_waited_for() -> None:
    """The real connector; its copies take a fixed time for each call, loads and stores alike."""

    def copy(*args: Any) -> None:
        time.sleep(0.03)  # the fault: a slow device
        native_copy(*args)

    clock = Clock()

    class Device(StampRunner):
        def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
            clock.advance(0.001)
            return super().run(chunks)

    tier = {"copy": copy, "batch_bytes": 384}
    with rig([24], tier_pages=[64], tier=tier, loads="auto", clock=clock, runner_type=Device) as r:
        prompt = tokens(100, 1)
        for _ in range(6):
            result = generate(r.engine, prompt, 2)
            assert result.tokens == expected_output(prompt, 2)
            evict_all(r)
        assert r.engine.counters.computed_instead_tokens > 0
        assert r.engine.counters.restored_tokens > 0
        assert r.held == 0
        assert r.offload is not None
        assert r.offload.stats().pinned_pages == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_real_model_computes_what_a_slow_tier_would_bring_later(slow: bool) -> None:
    """A hybrid; a copy of its pages takes no time, or 0.4 s each."""
    model = build_model(1)
    rng = random.Random(1)
    prompt = [rng.randrange(256) for _ in range(120)]
    slabs = 2 * model.geometry.slabs_needed(160)
    loading = threading.Event()

    def copy(*args: Any) -> None:
        if slow and loading.is_set():
            time.sleep(0.4)  # the fault: a slow device
        native_copy(*args)

    runner = TorchRunner(model, slabs)
    manager = Manager(model.geometry, slabs=slabs, retention=Sparse(), movable=True)
    connector = CpuConnector(model.geometry, pages=[60, 20], copy=copy, batch_bytes=1)
    offload = Offload(manager, connector, runner.regions())
    engine = Engine(runner, manager, offload, settings=EngineSettings(token_budget=64))
    try:
        outputs = []
        for _ in range(4):
            outputs.append(generate(engine, prompt, 4).tokens)
            assert offload.drain(DRAIN_SECONDS)
            manager.clear()
            loading.set()
        assert outputs == outputs[:1] * 4
        restored, computed = (
            engine.counters.restored_tokens,
            engine.counters.computed_instead_tokens,
        )
        assert restored + computed == 336
        assert restored >= 112
        assert not slow or computed == 224
        assert offload.stats().pinned_pages == 0
        offload.check()
    finally:
        offload.close()
