from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import ONE_CHUNK, found_keys, replay, run
from laws.engine import Engine


@cases.law(120)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=st.lists(cases.turns, max_size=2),
    prompt=cases.prompts,
    output=cases.texts(9, least=0),
    boundaries=st.lists(st.integers(0, 40), max_size=2),
    chunks=cases.chunk_plans,
    overlap=st.booleans(),
)
def test_law_07_the_keys_kept_do_not_depend_on_chunk_sizes(
    name: str,
    interval: int | None,
    history: list[cases.Turn],
    prompt: list[int],
    output: list[int],
    boundaries: list[int],
    chunks: list[int],
    overlap: bool,
) -> None:
    geometry = cases.GEOMETRIES[name]
    inside = [b for b in boundaries if b <= len(prompt)]
    kept = []
    for plan, together in ((ONE_CHUNK, False), (chunks, overlap)):
        engine = Engine(geometry, cases.policy_of(geometry, interval))
        texts = replay(engine, [t._replace(chunks=list(plan)) for t in history])
        last = run(engine, prompt, output=output, boundaries=inside, chunks=plan, overlap=together)
        kept.append(found_keys(engine, [*texts, last]))
    assert kept[0] == kept[1]


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    boundaries=st.lists(st.integers(0, 40), max_size=2),
    chunks=cases.chunk_plans,
)
def test_law_07_the_stops_of_chunks_are_the_stops_of_the_whole_and_the_chunk_ends(
    name: str,
    interval: int | None,
    prompt: list[int],
    boundaries: list[int],
    chunks: list[int],
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    inside = [b for b in boundaries if b <= len(prompt)]
    request = engine.open(prompt, boundaries=inside)
    assert request
    stops = engine.manager.stops
    whole = set(stops(request.handle, 0, len(prompt)))
    parts: set[int] = set()
    ends: set[int] = set()
    at = 0
    while at < len(prompt):
        end = min(at + chunks[len(ends) % len(chunks)], len(prompt))
        parts |= set(stops(request.handle, at, end))
        ends.add(end // engine.oracle.grid * engine.oracle.grid)
        at = end
    assert whole <= parts
    assert parts <= whole | ends
