from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import hit_of, replay, run
from laws.engine import Engine


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    spare=st.integers(0, 6),
    history=cases.histories,
)
def test_law_03_what_a_hit_covers_was_written_for_exactly_that_prefix(
    name: str, interval: int | None, spare: int, history: list[cases.Turn]
) -> None:
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(80) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    replay(engine, history)  # the engine compares stamps at every adoption and read


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    where=st.integers(0, 39),
    chunks=cases.chunk_plans,
)
def test_law_03_a_hit_ends_at_or_before_the_first_changed_token(
    name: str, interval: int | None, prompt: list[int], where: int, chunks: list[int]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    run(engine, prompt, chunks=chunks)
    where %= len(prompt)
    changed = [*prompt]
    changed[where] += 7
    assert hit_of(engine, changed) <= where
    assert hit_of(engine, prompt, salt="other") == 0
