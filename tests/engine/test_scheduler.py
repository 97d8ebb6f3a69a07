from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine.rig import held_pages
from engine.stamp_runner import VOCAB, StampRunner, expected_output, slabs_for, stamp_geometry
from numpy.typing import NDArray

from kvcache import ConfigError, Dense, Manager, Sparse
from kvcache.core.records import Hit
from kvcache.core.retain import RetentionPolicy
from kvcache.engine.chunk import Chunk
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.request import Finished, Status, Token
from kvcache.engine.scheduler import MAX_LOOKUPS


class CountingManager(Manager):
    lookups = 0

    def lookup(self, handle: int, present: Any = None) -> Hit:
        self.lookups += 1
        return super().lookup(handle, present)


def make(
    pages: Sequence[int],
    *blocks: int,
    states: int = 0,
    retention: RetentionPolicy | None = None,
    **limits: int,
) -> tuple[Engine, CountingManager, StampRunner]:
    geometry = stamp_geometry(*(blocks or (16,)), states=states)
    slabs = slabs_for(geometry, pages)
    manager = CountingManager(geometry, slabs=slabs, retention=retention or Sparse())
    runner = StampRunner(geometry, slabs)
    settings = EngineSettings(debug=True, **({"token_budget": 64, "max_requests": 4} | limits))
    return Engine(runner, manager, settings=settings), manager, runner


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def first_tokens(engine: Engine) -> list[int]:
    """Requests in the order of their first token."""
    order = [e.request for e in engine.stream() if isinstance(e, Token)]
    return list(dict.fromkeys(order))


def test_chunks_end_on_the_grid_until_the_last_one() -> None:
    engine, _, runner = make([20], states=0, token_budget=40)
    engine.add_request(tokens(110, 1), max_new_tokens=2)
    engine.run()
    assert runner.steps == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 110)], [(110, 111)]]


def test_a_budget_below_the_grid_still_moves_a_prefill() -> None:
    engine, _, runner = make([20], token_budget=5, max_requests=2)
    prompt = tokens(23, 1)
    request = engine.add_request(prompt, max_new_tokens=1)
    assert engine.run()[request].tokens == expected_output(prompt, 1)
    assert runner.steps == [[(0, 5)], [(5, 10)], [(10, 15)], [(15, 16)], [(16, 21)], [(21, 23)]]


def test_no_step_exceeds_the_budget_or_the_batch() -> None:
    engine, _, runner = make([60], token_budget=24, max_requests=3)
    for i in range(9):
        engine.add_request(tokens(10 + 7 * i, i), max_new_tokens=5)
    engine.run()
    assert max(runner.step_tokens) <= 24
    assert max(map(len, runner.steps)) == 3


def test_decodes_have_their_token_beside_a_long_prefill() -> None:
    engine, _, runner = make([60], token_budget=20, max_requests=3)
    engine.add_request(tokens(16, 1), max_new_tokens=12)
    engine.step()
    engine.add_request(tokens(200, 2), max_new_tokens=1)
    engine.run()
    decoding = runner.steps[1:12]
    assert all((16 + i, 17 + i) in step for i, step in enumerate(decoding))
    assert all(len(step) == 2 for step in decoding)


def test_a_prefill_older_than_the_decodes_is_never_starved_by_them() -> None:
    engine, _, runner = make([60], token_budget=4, max_requests=4)
    engine.add_request(tokens(8, 1), max_new_tokens=60)
    engine.add_request(tokens(8, 2), max_new_tokens=60)
    engine.add_request(tokens(8, 3), max_new_tokens=60)
    late = engine.add_request(tokens(50, 4), max_new_tokens=1)
    events = list(engine.stream())
    done = [e.request for e in events if isinstance(e, Finished)]
    assert done.index(late) == 0
    assert max(runner.step_tokens) <= 4


def test_requests_are_admitted_in_order_of_arrival() -> None:
    engine, _, _ = make([8], max_requests=2)
    ids = [engine.add_request(tokens(n, n), max_new_tokens=2) for n in (90, 20, 100, 5, 60)]
    assert first_tokens(engine) == ids


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    engine, _, _ = make([8])
    engine.add_request(tokens(60, 1), max_new_tokens=20)
    engine.step()
    large = engine.add_request(tokens(100, 2), max_new_tokens=1)
    small = engine.add_request(tokens(5, 3), max_new_tokens=1)
    assert first_tokens(engine)[1:] == [large, small]


def test_a_refused_request_is_not_looked_up_again_until_pages_come_free() -> None:
    engine, manager, _ = make([8])
    engine.add_request(tokens(60, 1), max_new_tokens=40)
    engine.step()
    engine.add_request(tokens(100, 2), max_new_tokens=1)
    engine.step()
    asked = manager.lookups
    for _ in range(30):
        engine.step()
    assert manager.lookups == asked
    engine.run()
    assert manager.lookups == asked + 1


def test_a_refused_request_starts_when_pages_come_free_though_others_still_run() -> None:
    engine, _, _ = make([8])
    long = engine.add_request(tokens(20, 1), max_new_tokens=60)
    short = engine.add_request(tokens(40, 2), max_new_tokens=5)
    refused = engine.add_request(tokens(60, 3), max_new_tokens=1)
    ended = [e.request for e in engine.stream() if isinstance(e, Finished)]
    assert ended == [short, refused, long]


def test_a_refused_request_starts_when_a_running_one_lets_go_of_a_state() -> None:
    engine, _, _ = make([40, 4], states=1, token_budget=100)
    long = engine.add_request(tokens(72, 1), max_new_tokens=60, boundaries=[16, 32])
    refused = engine.add_request(tokens(16, 2), max_new_tokens=1)
    ended = [e.request for e in engine.stream() if isinstance(e, Finished)]
    assert ended == [refused, long]


def test_a_preempted_request_comes_before_later_arrivals() -> None:
    engine, _, _ = make([9], max_requests=1)
    first = engine.add_request(tokens(40, 1), max_new_tokens=5)
    second = engine.add_request(tokens(40, 2), max_new_tokens=1)
    engine.step()
    engine.preempt(first)
    ended = [e.request for e in engine.stream() if isinstance(e, Finished)]
    assert ended == [first, second]


def test_a_prefill_gets_no_sliver_of_a_step_that_another_prefill_uses() -> None:
    engine, _, runner = make([20], token_budget=20)
    engine.add_request(tokens(32, 1), max_new_tokens=1)
    engine.add_request(tokens(32, 2), max_new_tokens=1)
    engine.run()
    assert runner.steps == [[(0, 16)], [(16, 32)], [(0, 16)], [(16, 32)]]


def test_twins_in_one_batch_are_computed_once() -> None:
    engine, _, runner = make([40], token_budget=200)
    prompt = tokens(100, 1)
    ids = [engine.add_request(prompt, max_new_tokens=3) for _ in range(4)]
    results = engine.run()
    assert all(results[i].tokens == expected_output(prompt, 3) for i in ids)
    assert [results[i].usage.cached_tokens for i in ids] == [0, 96, 96, 96]
    assert sum(runner.step_tokens) == 100 + 3 * 4 + 4 * 2


def test_twins_wait_for_every_chunk_of_the_first() -> None:
    engine, _, _ = make([40], token_budget=48)
    shared = tokens(128, 1)
    ids = [engine.add_request([*shared, i], max_new_tokens=2) for i in range(3)]
    results = engine.run()
    assert [results[i].usage.cached_tokens for i in ids] == [0, 128, 128]


def test_a_twin_goes_on_alone_when_the_first_is_aborted() -> None:
    engine, _, _ = make([40], token_budget=48)
    prompt = tokens(128, 1)
    first = engine.add_request(prompt, max_new_tokens=2)
    twin = engine.add_request(prompt, max_new_tokens=2)
    engine.step()
    engine.abort(first)
    result = engine.run()[twin]
    assert result.tokens == expected_output(prompt, 2)
    assert result.usage.cached_tokens == 48


def test_a_request_that_shares_nothing_runs_beside_waiting_twins() -> None:
    engine, _, runner = make([40], token_budget=300)
    prompt = tokens(64, 1)
    engine.add_request(prompt, max_new_tokens=1)
    engine.add_request(prompt, max_new_tokens=1)
    engine.add_request(tokens(30, 2), max_new_tokens=1)
    engine.step()
    assert runner.steps == [[(0, 64), (0, 30)]]


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    engine, _, _ = make([9])
    prompts = [tokens(40, i) for i in range(3)]
    ids = [engine.add_request(p, max_new_tokens=60) for p in prompts]
    lost: list[int] = []
    while engine.busy:
        had = {r.id: r.computed for r in engine.scheduler.running}
        engine.step()
        lost += [r.id for r in engine.scheduler.waiting if had.get(r.id)]
    assert lost
    assert ids[0] not in lost
    assert ids[2] in lost
    assert engine.counters.preemptions == len(lost)


def test_preempted_requests_keep_their_tokens_and_give_the_same_output() -> None:
    engine, _, _ = make([9])
    prompts = [tokens(40, i) for i in range(3)]
    ids = [engine.add_request(p, max_new_tokens=60) for p in prompts]
    results = engine.run()
    for i, prompt in zip(ids, prompts, strict=True):
        assert results[i].tokens == expected_output(prompt, 60)
    assert results[ids[0]].usage.recomputed_tokens == 0
    assert sum(r.usage.recomputed_tokens for r in results.values()) > 0
    assert engine.counters.recomputed_tokens == sum(
        r.usage.recomputed_tokens for r in results.values()
    )


def test_a_resumed_request_hits_what_is_left_of_it() -> None:
    engine, _, _ = make([20])
    prompt = tokens(100, 1)
    request = engine.add_request(prompt, max_new_tokens=40)
    for _ in range(20):
        engine.step()
    known = 100 + 19
    engine.preempt(request)
    result = engine.run()[request]
    assert result.tokens == expected_output(prompt, 40)
    assert result.usage.recomputed_tokens == (known - 1) % 16
    assert result.usage.device_tokens == 0


def test_a_request_that_fills_the_pool_completes_beside_others() -> None:
    engine, manager, _ = make([8])
    small = [engine.add_request(tokens(20, i), max_new_tokens=20) for i in range(3)]
    whole = engine.add_request(tokens(100, 9), max_new_tokens=28)
    after = engine.add_request(tokens(30, 10), max_new_tokens=5)
    results = engine.run()
    assert results[whole].tokens == expected_output(tokens(100, 9), 28)
    assert set(results) == {*small, whole, after}
    assert held_pages(manager) == 0


@pytest.mark.parametrize("retention", [Dense(), Sparse(), Sparse(32)])
def test_two_state_pages_are_enough_for_any_chunk(retention: RetentionPolicy) -> None:
    engine, _, _ = make([40, 2], states=1, retention=retention, token_budget=200)
    prompts = [tokens(130, 1), [*tokens(130, 1), *tokens(20, 2)]]
    for prompt in prompts:
        request = engine.add_request(prompt, max_new_tokens=40)
        assert engine.run()[request].tokens == expected_output(prompt, 40)


def test_requests_that_fight_over_state_pages_all_end() -> None:
    engine, manager, _ = make([40, 3], states=1, max_requests=4)
    prompts = [tokens(50 + i, i) for i in range(6)]
    ids = [engine.add_request(p, max_new_tokens=30) for p in prompts]
    results = engine.run()
    assert [results[i].tokens for i in ids] == [expected_output(p, 30) for p in prompts]
    assert held_pages(manager) == 0


def test_half_computed_prompts_do_not_push_each_other_out() -> None:
    engine, _, _ = make([16], token_budget=32)
    for i in range(4):
        engine.add_request(tokens(128, i), max_new_tokens=1)
    engine.run()
    assert engine.counters.preemptions == 0
    assert engine.counters.computed_tokens == 4 * 128


def test_a_request_blocked_by_older_ones_keeps_its_pages() -> None:
    engine, _, _ = make([8])
    engine.add_request(tokens(60, 1), max_new_tokens=30)
    young = engine.add_request(tokens(47, 2), max_new_tokens=30)
    blocked = False
    while engine.busy:
        engine.step()
        states = {r.id: r.status for r in engine.scheduler.running}
        blocked |= len(states) == 2 and states[young] is Status.RUNNING
    assert blocked


def test_limits_that_could_starve_a_prefill_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget is 3: below max_requests"):
        make([8], token_budget=3, max_requests=4)
    with pytest.raises(ConfigError, match="max_requests is 0"):
        make([8], max_requests=0)


def test_a_salt_separates_twins() -> None:
    engine, _, _ = make([40])
    prompt = tokens(64, 1)
    one = engine.add_request(prompt, max_new_tokens=1, salt="a")
    engine.run()
    other = engine.add_request(prompt, max_new_tokens=1, salt="b")
    again = engine.add_request(prompt, max_new_tokens=1, salt="a")
    results = engine.run()
    assert one not in results
    assert results[other].usage.cached_tokens == 0
    assert results[again].usage.cached_tokens == 48


def test_a_declared_boundary_serves_another_prompt_of_a_recurrent_model() -> None:
    engine, _, _ = make([40, 12], states=1)
    system = tokens(32, 1)
    engine.add_request([*system, *tokens(40, 2)], max_new_tokens=4, boundaries=[32])
    engine.run()
    other = engine.add_request([*system, *tokens(40, 3)], max_new_tokens=4)
    assert engine.run()[other].usage.device_tokens == 32


def test_the_runner_reads_only_what_was_written_before_the_step() -> None:
    # The oracle itself: a chunk that claims a prefix which nobody wrote must be seen.
    geometry = stamp_geometry(16)
    runner = StampRunner(geometry, 4)
    table = np.array([0, 1], np.int32)
    chunk = Chunk(tokens=np.arange(4, dtype=np.int32), start=16, tables=[table], states=[None])
    with pytest.raises(AssertionError, match="KV of other positions"):
        runner.run([chunk])


def test_a_step_looks_up_a_bounded_number_and_the_next_one_goes_on() -> None:
    engine, manager, runner = make([60], token_budget=72, max_requests=3)
    shared = tokens(640, 1)
    leader = engine.add_request(shared, max_new_tokens=1)
    twins = [engine.add_request([*shared, i], max_new_tokens=1) for i in range(2 * MAX_LOOKUPS)]
    small = engine.add_request(tokens(5, 2), max_new_tokens=1)
    ended: list[int] = []
    while small not in ended:
        before = manager.lookups
        ended += [e.request for e in engine.step() if isinstance(e, Finished)]
        assert manager.lookups - before <= MAX_LOOKUPS
    assert ended == [small]
    assert len(runner.steps) == 3
    results = engine.run()
    assert set(results) == {leader, *twins}
    assert all(results[i].usage.cached_tokens == 640 for i in twins)


def test_cached_pages_of_a_hit_are_not_counted_as_free_once_more() -> None:
    engine, manager, _ = make([16], token_budget=128)
    prompt = tokens(96, 1)
    engine.add_request(prompt, max_new_tokens=1)
    engine.run()
    older = engine.add_request(tokens(128, 2), max_new_tokens=20)
    engine.step()
    (stats,) = manager.arena_stats().classes
    assert (stats.held, stats.cached) == (8, 6)
    # Needs 10 pages, of which 6 are cached: once it has those, there are 2 more.
    returning = engine.add_request([*prompt, *tokens(64, 3)], max_new_tokens=1)
    engine.step()
    assert [r.id for r in engine.scheduler.running] == [older]
    results = engine.run()
    assert results[returning].usage.device_tokens == 96
    assert engine.counters.preemptions == 0


def test_pages_that_an_admitted_request_holds_cost_a_twin_nothing() -> None:
    engine, _, _ = make([12], token_budget=200)
    prompt = tokens(128, 1)
    first = engine.add_request(prompt, max_new_tokens=30)
    engine.step()
    twin = engine.add_request([*prompt, *tokens(20, 2)], max_new_tokens=4)
    engine.step()
    assert [r.id for r in engine.scheduler.running] == [first, twin]
    engine.run()


class TableManager(CountingManager):
    copied_pages = 0

    def block_table(self, handle: int, group: int, first: int = 0) -> NDArray[np.int32]:
        table = super().block_table(handle, group, first)
        self.copied_pages += len(table)
        return table


def test_each_page_number_is_copied_once_while_a_request_holds_it() -> None:
    geometry = stamp_geometry(16)
    manager = TableManager(geometry, slabs=40, retention=Sparse())
    runner = StampRunner(geometry, 40)
    engine = Engine(runner, manager, settings=EngineSettings(token_budget=64, max_requests=4))
    prompt = tokens(200, 1)
    request = engine.add_request(prompt, max_new_tokens=100)
    for _ in range(50):
        engine.step()
    assert manager.copied_pages == 16  # 200 + 46 tokens
    engine.preempt(request)
    other = engine.add_request(tokens(100, 2), max_new_tokens=2)
    results = engine.run()
    assert results[request].tokens == expected_output(prompt, 100)
    assert results[other].tokens == expected_output(tokens(100, 2), 2)
    assert manager.copied_pages == 16 + 19 + 7
