"""The engine in simulated time: closed forms, leaps, stamps, the host tier."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from engine.simulations import BLOCK, HARDWARE, Simulation, counts, prefill_seconds, simulation

from kvcache.connectors.base import Direction, PageRegion, Transfer
from kvcache.core.errors import CapacityError, InvariantError
from kvcache.engine.simulated import SimulatedClock
from kvcache.engine.simulated_tier import NEVER, QUEUE_DEPTH, SimulatedWorker
from kvcache.presets import preset

# ---- closed forms --------------------------------------------------------------------------------------


def decode_seconds(sim: Simulation, contexts: list[int]) -> float:
    """One step in which requests of these contexts decode."""
    starts = np.array(contexts, np.int64)
    return float(sim.roofline.seconds(starts, starts + 1))


def test_one_request_alone_takes_its_prefill_and_its_decodes() -> None:
    sim = simulation(budget=2048)
    request = sim.add(range(100), 5000, 20)
    timing = sim.run()[request].timing
    assert timing.arrival == 0
    assert timing.first_token == pytest.approx(prefill_seconds(sim.roofline, 5000, 2048), rel=1e-12)
    decodes = sum(decode_seconds(sim, [5000 + i]) for i in range(19))
    assert timing.finish - timing.first_token == pytest.approx(decodes, rel=1e-9)


def test_two_that_may_not_run_together_queue() -> None:
    sim = simulation(most=1)
    first = sim.add(range(100), 3000, 5)
    second = sim.add(range(200, 300), 4000, 5)
    ended = sim.run()
    begun = ended[first].timing.finish
    prefill = prefill_seconds(sim.roofline, 4000, 2048)
    assert ended[second].timing.first_token == pytest.approx(begun + prefill, rel=1e-12)


def test_who_returns_pays_for_the_new_tokens_alone() -> None:
    sim = simulation()
    sim.add(range(100), 3000, 1)
    sim.run()
    begun = sim.clock.now
    request = sim.add([*range(46), 999], 3008, 1)
    ended = sim.run()[request]
    assert ended.usage.device_tokens == 46 * BLOCK
    alone = sim.roofline.seconds(np.array([46 * BLOCK]), np.array([3008]))
    assert ended.timing.first_token - begun == pytest.approx(float(alone), rel=1e-12)


# ---- leaps ---------------------------------------------------------------------------------------------


def play(seed: int, sim: Simulation, *, leaping: bool) -> list[tuple[object, ...]]:
    """Random requests in groups; everything that can be told of them."""
    draw = random.Random(seed)
    told: list[tuple[object, ...]] = []
    made = 100_000 * seed  # a number names a whole prefix
    known: list[list[int]] = [[]]
    for _ in range(4):
        requests = []
        for _ in range(draw.randint(1, 6)):
            path = draw.choice(known)[: draw.randint(0, 30)]
            grown = draw.randint(1, 40)
            path = path + list(range(made, made + grown))
            made += grown
            known.append(path)
            prompt = len(path) * BLOCK + draw.randrange(BLOCK)
            requests.append(sim.add(path, prompt, draw.choice((1, 2, 50, 300))))
        ended = sim.run(leaping=leaping)
        told += [tuple(ended[request]) for request in requests]
    told.append((sim.clock.now, counts(sim.engine), sim.manager.arena_stats()))
    return told


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "qwen3.5-9b"])
def test_leaps_change_nothing(name: str) -> None:
    for seed, (tokens, host) in enumerate([(50_000, 0), (9_000, 0), (9_000, 300)]):
        groups = len(simulation(name=name).roofline.geometry.groups)
        one, two = (
            simulation(tokens, name=name, host=[host] * groups if host else ()) for _ in "12"
        )
        assert play(seed, one, leaping=True) == play(seed, two, leaping=False)


def test_a_leap_takes_many_steps_and_ends_before_it_is_told_to() -> None:
    sim = simulation()
    sim.add(range(100), 6 * BLOCK + 5, 200)
    while sim.clock.now == 0 or sim.engine.leap(0.0):
        sim.engine.step()
    sim.engine.step()
    begun, steps = sim.clock.now, sim.engine.counters.steps
    one = decode_seconds(sim, [6 * BLOCK + 6])
    taken = sim.engine.leap(begun + 3.5 * one)
    assert taken == 4
    assert sim.engine.counters.steps == steps + 4
    assert 3.9 * one < sim.clock.now - begun < 4.1 * one
    assert sim.engine.leap(sim.clock.now) == 0
    assert sim.engine.leap(float("inf")) > 30


def test_requests_that_wait_come_before_any_leap() -> None:
    sim = simulation()
    sim.add(range(10), 100, 200)
    for _ in range(2):
        sim.engine.step()
    sim.add(range(10, 20), 100, 200)
    assert sim.engine.leap(float("inf")) == 0


# ---- stamps --------------------------------------------------------------------------------------------


def test_what_is_read_was_written_for_that_prefix() -> None:
    sim = simulation(9_000, host=[400])
    for seed in range(3):
        play(seed, sim, leaping=True)
    assert sim.stamps is not None
    assert sim.stamps.compared > 500
    assert sim.engine.counters.restored_tokens > 0
    assert sim.engine.counters.preemptions > 0


def test_a_page_with_another_prefix_is_found() -> None:
    sim = simulation()
    sim.add(range(10), 10 * BLOCK, 1)
    sim.run()
    assert sim.stamps is not None
    pages = sim.stamps._classes[0][:, 0]
    pages[pages == 4] = 77
    sim.add([*range(10), 99], 11 * BLOCK, 1)
    with pytest.raises(
        InvariantError, match="number 3 read as block 0 and on, holds the 256 tokens of prefix 77"
    ):
        sim.run()


@pytest.mark.parametrize("name", ["qwen3.5-9b", "gemma-3-27b", "deepseek-v4-flash"])
def test_states_windows_and_pooling_pages_are_compared_too(name: str) -> None:
    geometry = preset(name, block_tokens=128 if "deepseek" in name else BLOCK)
    groups = len(geometry.groups)
    sim = simulation(9_000, name=name, geometry=geometry, host=[400] * groups, budget=300)
    for seed in range(3):
        play(seed, sim, leaping=True)
    assert sim.stamps is not None
    assert sim.stamps.compared > 500
    assert sim.engine.counters.restored_tokens > 0
    assert sim.engine.counters.preemptions > 0


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("group", [0, 1])
def test_a_page_or_a_state_of_another_prefix_or_length_is_found(group: int, column: int) -> None:
    """At once by the next chunk of the same request, and by a later one that hits it."""
    for hit in (False, True):
        sim = simulation(name="qwen3.5-9b", budget=BLOCK * 3 // 2)
        sim.add(range(10), 10 * BLOCK, 1)
        if hit:
            sim.run()
            sim.add([*range(10), 99], 11 * BLOCK, 1)
        else:
            sim.engine.step()
        assert sim.stamps is not None
        sim.stamps._classes[sim.manager.geometry.class_of_group[group]][:, column] += 1
        with pytest.raises(InvariantError, match=sim.manager.geometry.groups[group].name):
            sim.run()


def test_a_block_that_was_written_in_part_is_compared_as_far_as_that() -> None:
    sim = simulation(budget=BLOCK // 4)
    sim.add(range(10), 2 * BLOCK, 1)
    sim.engine.step()
    assert sim.stamps is not None
    pages = sim.stamps._classes[0]
    pages[pages[:, 1] == BLOCK // 4, 1] = BLOCK // 2
    with pytest.raises(InvariantError, match=f"holds the {BLOCK // 2} tokens .* not the 16 of"):
        sim.run()


# ---- the host tier -------------------------------------------------------------------------------------


def test_a_load_takes_its_bytes_over_the_link() -> None:
    sim = simulation(40_000, host=[1000])
    sim.add(range(100), 100 * BLOCK, 1)
    sim.run()
    assert sim.offload is not None
    assert sim.worker is not None
    assert sim.offload.drain(10.0)
    sim.manager.clear()
    begun = sim.clock.now
    request = sim.add([*range(100), 500], 101 * BLOCK, 1)
    ended = sim.run()[request]
    assert ended.usage.host_tokens == 100 * BLOCK
    load = HARDWARE.link_seconds + 100 * BLOCK * 131_072 / HARDWARE.link
    rest = sim.roofline.seconds(np.array([100 * BLOCK]), np.array([101 * BLOCK]))
    assert ended.timing.first_token - begun == pytest.approx(load + float(rest), rel=1e-9)
    assert sim.worker.busy_seconds[Direction.LOAD] == pytest.approx(load, rel=1e-12)


def transfer(number: int, direction: Direction, items: int, slot: int = 0) -> Transfer:
    rows = np.arange(items)
    return Transfer(
        number, direction, rows.astype(np.int32) * 0, rows.astype(np.int32), rows + slot, 1e6
    )


@pytest.fixture
def worker() -> tuple[SimulatedWorker, SimulatedClock]:
    clock = SimulatedClock()
    worker = SimulatedWorker([1_000_000], HARDWARE, clock)
    worker.register([PageRegion(0, 1_000_000, 100)])
    return worker, clock


def test_copies_of_one_direction_go_one_after_the_other(
    worker: tuple[SimulatedWorker, SimulatedClock],
) -> None:
    tier, clock = worker
    for number, direction in enumerate((Direction.LOAD, Direction.STORE, Direction.LOAD)):
        assert tier.submit(transfer(number, direction, 10))
    one = 1e-3 + 1e7 / 1e10
    assert tier.poll() == []
    assert tier.next_seconds == pytest.approx(one)
    assert tier.wait(10.0)
    assert clock.now == pytest.approx(one)
    assert sorted(result.id for result in tier.poll()) == [0, 1]
    tier.wake_at = 1.25 * one
    assert not tier.wait(0.5 * one)
    assert clock.now == pytest.approx(1.25 * one)
    tier.wake_at = NEVER
    assert not tier.wait(0.25 * one)
    assert clock.now == pytest.approx(1.5 * one)
    assert tier.wait(10.0)
    (last,) = tier.poll()
    assert (last.id, last.bytes, last.ok.all()) == (2, 10**7, True)
    assert clock.now == pytest.approx(2 * one)


def test_a_full_queue_refuses_and_close_fails_the_rest(
    worker: tuple[SimulatedWorker, SimulatedClock],
) -> None:
    tier, _ = worker
    taken = [tier.submit(transfer(i, Direction.STORE, 1)) for i in range(QUEUE_DEPTH + 1)]
    assert taken == [True] * QUEUE_DEPTH + [False]
    assert tier.submit(transfer(99, Direction.LOAD, 1))
    assert tier.close()
    results = tier.poll()
    assert len(results) == QUEUE_DEPTH + 1
    assert not any(result.ok.any() for result in results)


def test_an_item_without_a_slot_fails_alone(
    worker: tuple[SimulatedWorker, SimulatedClock],
) -> None:
    tier, _ = worker
    tier.submit(transfer(1, Direction.LOAD, 3, slot=-1))
    assert tier.wait(10.0)
    (result,) = tier.poll()
    assert result.ok.tolist() == [0, 1, 1]
    assert result.error.startswith("BadItem")


# ---- limits --------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused() -> None:
    sim = simulation(10 * BLOCK)
    with pytest.raises(CapacityError):
        sim.add(range(20), 12 * BLOCK, 1)
    assert not sim.engine.busy


def test_time_only_grows() -> None:
    sim = simulation(9_000)
    for i in range(12):
        sim.add(range(40 * i, 40 * i + 40), 40 * BLOCK, 900)
    times = [sim.clock.now]
    while sim.engine.busy:
        if not sim.engine.leap(float("inf")):
            sim.engine.step()
        times.append(sim.clock.now)
    assert all(a < b for a, b in pairwise(times))
    assert sim.engine.counters.preemptions > 0
