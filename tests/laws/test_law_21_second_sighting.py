from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, hit_of, open_request, run
from laws.engine import Engine

own = cases.texts(14)
"""What a session says beside the shared system prompt."""


@cases.law(150)
@given(
    name=cases.names,
    interval=cases.intervals,
    system=cases.texts(40, least=4),
    first=own,
    second=own,
    output=cases.texts(9, least=0),
    chunks=cases.chunk_plans,
)
def test_law_21_a_declared_system_prompt_hits_on_the_second_request(
    name: str,
    interval: int | None,
    system: list[int],
    first: list[int],
    second: list[int],
    output: list[int],
    chunks: list[int],
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    run(engine, [*system, 8, *first], output=output, boundaries=[len(system)], chunks=chunks)
    assert hit_of(engine, [*system, 9, *second]) >= engine.oracle.floor(len(system))


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    system=cases.texts(40, least=4),
    tails=st.lists(own, min_size=2, max_size=3),
)
def test_law_21_an_undeclared_one_hits_on_the_third_at_the_latest(
    name: str, interval: int | None, system: list[int], tails: list[list[int]]
) -> None:
    """The second request finds the junction, and keeps what a lookup there reads."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    for i, tail in enumerate(tails):
        run(engine, [*system, 10 + i, *tail])
    if engine.oracle.full:
        assert hit_of(engine, [*system, 9]) >= engine.oracle.floor(len(system))


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    system=cases.texts(30, least=4),
    tails=st.lists(own, min_size=2, max_size=6),
    spare=st.integers(0, 4),
)
def test_law_21_under_eviction_each_token_of_it_that_is_lost_is_reported_as_evicted(
    name: str, interval: int | None, system: list[int], tails: list[list[int]], spare: int
) -> None:
    geometry = cases.GEOMETRIES[name]
    longest = len(system) + 1 + max(map(len, tails))
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(longest) + spare,
    )
    for i, tail in enumerate(tails):
        text = [*system, 10 + i, *tail]
        request = open_request(engine, text, boundaries=[len(system)])
        hit = engine.lookup(request)
        if i:
            assert hit.hit_tokens + hit.lost["evicted"] >= engine.oracle.floor(len(system))
        compute(engine, request)
        engine.finish(request)
