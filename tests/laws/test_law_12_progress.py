from __future__ import annotations

import pytest
from arena.crowds import RATIOS, random_crowd
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import run
from laws.engine import Engine


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
        random_crowd(seed, ratio=ratio).run()


@pytest.mark.parametrize("name", sorted(cases.GEOMETRIES))
def test_law_12_what_is_admitted_completes_in_every_geometry(name: str) -> None:
    for seed in range(25 * cases.SCALE):
        random_crowd(seed, cases.GEOMETRIES[name]).run()
