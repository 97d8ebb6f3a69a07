"""Also checked at every grant of every other law: what is handed out is not in use."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.loads import abandon_load, end_load
from laws.pressure import release, squeeze
from laws.verify import verify


@cases.law(120)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    end=st.sampled_from(["abort", "preempt", "finish"]),
    spare=st.integers(0, 6),
    movable=st.booleans(),
)
def test_law_18_pages_of_open_steps_are_handed_out_after_the_last_of_them(
    name: str,
    interval: int | None,
    prompt: list[int],
    chunks: list[int],
    end: str,
    spare: int,
    movable: bool,
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(41) + spare,
        max_open_steps=3,
        movable=movable,
    )
    request = open_request(engine, prompt)
    engine.lookup(request)
    for chunk in chunks:
        size = min(chunk, len(prompt) - request.committed)
        if size and allocate(engine, request, size):
            engine.begin_step()
            engine.commit(request)
    busy = engine.in_use()
    getattr(engine, end)(request)
    if end == "preempt":
        engine.abort(request)
    for _ in squeeze(engine):  # `allocate` asserts that what it gets was not in use
        verify(engine)
    while engine.steps:
        assert busy <= engine.in_use()
        engine.end_step()
    for _ in squeeze(engine, 5000):
        verify(engine)
    release(engine)


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.texts(40, least=14),
    ending=st.sampled_from(["late", "abort", "in time"]),
    spare=st.integers(0, 4),
)
def test_law_18_pages_that_a_load_writes_are_handed_out_after_its_end(
    name: str, interval: int | None, prompt: list[int], ending: str, spare: int
) -> None:
    """Its request may be long gone: the writer of a late load writes still."""
    geometry = cases.GEOMETRIES[name]
    source = Engine(geometry, cases.policy_of(geometry, None))
    run(source, prompt)
    tier = source.resident()
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(len(prompt)) + spare,
    )
    request = open_request(engine, prompt)
    assert engine.lookup(request, tier).hit_tokens == engine.oracle.limit(len(prompt))
    if not (request.hit and request.hit.hit_tokens):
        return
    assert allocate(engine, request, 1)
    load = request.load
    busy = {engine.group_page(g, page) for g, page, _ in engine.loads[load].items}
    if ending == "late":
        abandon_load(engine, load)
    if ending != "in time":
        engine.abort(request)
    for _ in squeeze(engine):
        assert busy <= engine.in_use()
        verify(engine)
    end_load(engine, load, [True] * len(engine.loads[load].items))
    verify(engine)
    release(engine)


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    spare=st.integers(0, 4),
    movable=st.booleans(),
)
def test_law_18_a_pinned_page_stays_where_it_is_until_its_reader_is_done(
    name: str, interval: int | None, prompt: list[int], spare: int, movable: bool
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(
        geometry,
        cases.policy_of(geometry, interval),
        slabs=geometry.slabs_needed(42) + spare,
        movable=movable,
    )
    run(engine, prompt)
    items = engine.manager.take_keyed()
    pages = engine.manager.pin(items).tolist()
    engine.pinned = [(int(i["group"]), p) for i, p in zip(items, pages, strict=True) if p >= 0]
    stamps = {pin: engine.content.pages[engine.group_page(*pin)] for pin in engine.pinned}
    for _ in squeeze(engine):
        verify(engine)
    for pin, stamp in stamps.items():
        assert engine.content.pages[engine.group_page(*pin)] == stamp
        engine.manager.unpin(pin[0], np.array([pin[1]], np.int32))
    engine.pinned = []
    release(engine)
