from __future__ import annotations

import pytest
from arena.adversary import Crowd
from arena.crowds import RATIOS, random_crowd
from hypothesis import given, strategies as st
from laws import cases
from laws.counting import OTHER, seen
from laws.drive import compute, drain, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.space import Arena
from laws.verify import verify


@pytest.mark.parametrize("max_open_steps", [1, 2])
@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=st.lists(cases.turns, max_size=2),
    prompt=cases.prompts,
    output=cases.texts(12, least=0),
    chunks=cases.chunk_plans,
)
def test_law_12_a_lone_request_completes_in_the_smallest_pool_that_admits_it(
    max_open_steps: int,
    name: str,
    interval: int | None,
    history: list[cases.Turn],
    prompt: list[int],
    output: list[int],
    chunks: list[int],
) -> None:
    """Whatever earlier requests left there; large chunks are halved until they fit."""
    geometry = cases.GEOMETRIES[name]
    longest = len(prompt) + len(output)
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(longest),
        max_open_steps=max_open_steps,
    )
    for turn in history:
        run(engine, turn.tail[:longest], chunks=turn.chunks)
    run(engine, prompt, output=output, chunks=chunks, overlap=True)


@pytest.mark.parametrize("ratio", RATIOS)
def test_law_12_what_is_admitted_completes_in_the_smallest_arena(ratio: int) -> None:
    """Several requests, pins, loads and open steps; an adversary chooses (tests/arena)."""
    for seed in range(50 * cases.SCALE):
        complete(random_crowd(seed, ratio=ratio), OTHER)


@pytest.mark.parametrize("name", sorted(cases.GEOMETRIES))
def test_law_12_what_is_admitted_completes_in_every_geometry(name: str) -> None:
    for seed in range(25 * cases.SCALE):
        complete(random_crowd(seed, cases.GEOMETRIES[name]), name)


def complete(crowd: Crowd, where: str) -> None:
    crowd.run()
    for what, times in crowd.met.items():
        seen[f"crowds: {what}", where] += times


@pytest.mark.parametrize("name", sorted(cases.GEOMETRIES))
def test_law_12_admitted_is_exactly_what_the_arena_can_serve_to_its_end(name: str) -> None:
    """One slab fewer than the longest request needs, and `open` refuses it."""
    geometry = cases.GEOMETRIES[name]
    for tokens in range(1, 64, 3):
        slabs = sum(Arena(geometry, 1).needed(tokens))
        for fewer in range(min(2, slabs)):
            engine = Engine(geometry, cases.policy_of(geometry, None), slabs=slabs - fewer)
            request = engine.open([0], max_tokens=tokens)  # it asserts what the arena admits
            assert (request is None) == bool(fewer)


@pytest.mark.parametrize("name", sorted(cases.GEOMETRIES))
def test_law_12_while_the_oldest_waits_nobody_else_gets_a_page(name: str) -> None:
    """A younger one was preempted in an open step; what is free is kept for the oldest."""
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(48)
    engine = Engine(geometry, cases.policy_of(geometry, 0), slabs=slabs)
    run(engine, [8] * 17)
    cached = engine.manager.take_keyed()
    oldest = open_request(engine, [1] * 47, output=1)
    younger, third = open_request(engine, [2] * 24), open_request(engine, [3, 3])
    engine.lookup(younger)
    engine.begin_step()
    assert allocate(engine, younger, 24)
    engine.commit(younger)
    engine.lookup(oldest)
    engine.lookup(third)
    reasons = []
    while allocate(engine, oldest, 48) is None:
        reasons.append(engine.manager.blockage(oldest.handle))
        assert allocate(engine, third, 1) is None  # asserts that it is told "frozen"
        assert (engine.manager.pin(cached) == -1).all()
        if reasons[-1] == "preempt":
            engine.preempt(younger)
        else:
            engine.end_step()
    assert reasons == ["preempt", "wait"]


SPREAD = {
    "window": cases.geometry(cases.full("a", 1), cases.window("w", 9, 1, width=8)),
    "state": cases.geometry(cases.full("a", 1), cases.state("s", 64)),
    "small": cases.geometry(cases.full("a", 1, width=1), cases.window("w", 3, 1, width=8)),
    "three sizes": cases.geometry(
        cases.full("a", 1, width=8), cases.window("w", 4, 1, width=16), cases.state("s", 96)
    ),
}
"""Pages of two or three sizes, a page for each token."""


@cases.law(150)
@given(
    name=st.sampled_from(sorted(SPREAD)),
    first=st.booleans(),
    movable=st.booleans(),
    prompt=cases.texts(12, least=4),
    thin=st.integers(-1, 3),
    spare=st.integers(0, 1),
    chunk=st.integers(1, 4),
)
def test_law_12_a_request_that_was_spread_thin_before_it_became_the_oldest_completes(
    name: str, first: bool, movable: bool, prompt: list[int], thin: int, spare: int, chunk: int
) -> None:
    """Each of its pages shares its slab with a page of a request that has finished since. Where it
    must start again it may hit less than what is there: what its quota allows. If it is the first
    one it keeps its quota all the time, as `allocate` asserts.
    """
    geometry = SPREAD[name]
    engine = Engine(
        geometry,
        cases.policy_of(geometry, None),
        slabs=geometry.slabs_needed(len(prompt)) + spare,
        movable=movable,
    )
    older = None if first else open_request(engine, [8])
    spread = open_request(engine, prompt)
    for n in range(min(len(prompt) // 2 + thin, len(prompt) - 1)):
        if spread.state == "waiting":
            engine.lookup(spread)
        engine.begin_step()
        if not allocate(engine, spread, 1):
            drain(engine)
            break
        if spread.granted > spread.committed:
            engine.commit(spread)
        drain(engine)
        other = open_request(engine, [20 + n])
        engine.lookup(other)
        if allocate(engine, other, 1):
            engine.begin_step()
            engine.commit(other)
            drain(engine)
        engine.finish(other)
    if older:
        engine.abort(older)
    compute(engine, spread, chunks=[chunk])
    engine.finish(spread)
    verify(engine)
