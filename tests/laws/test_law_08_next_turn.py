from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import hit_of, run
from laws.engine import Engine


@cases.law(150)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    output=cases.texts(20),
    new=cases.texts(9),
    chunks=cases.chunk_plans,
)
def test_law_08_the_next_turn_hits_all_that_the_last_one_computed_to_the_grid(
    name: str,
    interval: int | None,
    prompt: list[int],
    output: list[int],
    new: list[int],
    chunks: list[int],
) -> None:
    """The law allows one grid unit less; the state of the last grid point needs no such slack."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    text = run(engine, prompt, output=output, chunks=chunks)
    computed = len(prompt) + len(output) - 1
    grid = engine.oracle.grid
    assert hit_of(engine, [*text, *new]) >= computed // grid * grid


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    turns=st.lists(cases.texts(14), min_size=2, max_size=5),
)
def test_law_08_a_session_recomputes_less_than_a_grid_unit_of_each_earlier_turn(
    name: str, interval: int | None, turns: list[list[int]]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    text: list[int] = []
    for turn in turns:
        before = len(text)
        hit = hit_of(engine, [*text, *turn])
        assert before - hit <= engine.oracle.grid
        text = run(engine, [*text, *turn], output=turn[:5])
