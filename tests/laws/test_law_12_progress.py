from __future__ import annotations

import pytest
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
        pages=geometry.pages_needed(longest),
        max_open_steps=max_open_steps,
    )
    for turn in history:
        run(engine, turn.tail[:longest], chunks=turn.chunks)
    run(engine, prompt, output=output, chunks=chunks, overlap=True)
