from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import hit_of, replay, run
from laws.engine import Engine


@cases.law(150)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=st.lists(cases.turns, max_size=2),
    prompt=cases.prompts,
    output=cases.texts(9, least=0),
    chunks=cases.chunk_plans,
    overlap=st.booleans(),
)
def test_law_06_the_second_identical_request_hits_all_but_the_last_grid_unit(
    name: str,
    interval: int | None,
    history: list[cases.Turn],
    prompt: list[int],
    output: list[int],
    chunks: list[int],
    overlap: bool,
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    replay(engine, history)
    run(engine, prompt, output=output, chunks=chunks, overlap=overlap)
    assert hit_of(engine, prompt) == (len(prompt) - 1) // engine.oracle.grid * engine.oracle.grid


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    others=st.lists(cases.prompts, min_size=1, max_size=4),
    spare=st.integers(0, 2),
)
def test_law_06_under_eviction_every_token_lost_by_a_resend_is_reported_as_evicted(
    name: str, interval: int | None, prompt: list[int], others: list[list[int]], spare: int
) -> None:
    geometry = cases.GEOMETRIES[name]
    longest = max(len(prompt), *map(len, others)) + len(others)
    slabs = geometry.slabs_needed(longest) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    run(engine, prompt)
    for i, other in enumerate(others):
        run(engine, [100 + i, *other])
    request = engine.open(prompt)
    assert request
    hit = engine.lookup(request)
    assert hit.hit_tokens + hit.lost["evicted"] == engine.oracle.limit(len(prompt)), hit
