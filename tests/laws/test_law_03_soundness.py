from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute_twins, hit_of, open_request, replay, run
from laws.engine import Engine
from laws.verify import verify


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


@cases.law(60)
@given(
    name=st.sampled_from(sorted(n for n in cases.GEOMETRIES if n.endswith("+ draft"))),
    interval=cases.intervals,
    head=cases.texts(24, least=8),
    tail=cases.texts(16),
    others=st.integers(1, 2),
    order=st.permutations(range(3)),
    chunks=cases.chunk_plans,
)
def test_law_03_what_a_draft_lacks_of_a_hit_gets_no_key_from_twins(
    name: str,
    interval: int | None,
    head: list[int],
    tail: list[int],
    others: int,
    order: list[int],
    chunks: list[int],
) -> None:
    """Their prompts part from an earlier one right behind the hit. `verify` counts the keys."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    run(engine, [*head, *[7] * 16])
    twins = [open_request(engine, [*head, 8, *tail]) for _ in range(1 + others)]
    compute_twins(engine, twins, chunks=chunks)
    for i in (i for i in order if i < len(twins)):
        engine.finish(twins[i])
        verify(engine)
