from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Key
from laws.records import Request
from laws.verify import verify


def hit_pages(engine: Engine, request: Request, hit: int) -> list[Key]:
    """What of the hit is on the device, drafts too: adopted, not taken."""
    found = (
        (g, request.key(engine.oracle, g, end))
        for g in engine.groups
        for end in engine.oracle.needs(g, hit)
    )
    return [key for g, key in found if key and engine.find(g, key) >= 0]


@cases.law(120)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    shared=st.integers(0, 40),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
def test_law_13_pages_counted_are_the_pages_taken(
    name: str, interval: int | None, prompt: list[int], shared: int, sizes: list[int]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    if prompt[:shared]:
        run(engine, prompt[:shared])
    request = open_request(engine, prompt)
    hit = engine.lookup(request).hit_tokens
    for i, size in enumerate(sizes):
        size = min(size, len(prompt) - max(hit, request.committed))  # noqa: PLW2901
        adopted = 0 if i else len(hit_pages(engine, request, hit))
        held = sum(engine.held())
        need = engine.manager.need(request.handle, size)
        assert min(need) >= 0
        allocate(engine, request, size)
        assert sum(engine.held()) == held + sum(need) + adopted
        if request.granted > request.committed:
            engine.begin_step()
            engine.commit(request)
            engine.end_step()
        verify(engine)


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    first=st.integers(0, 40),
    second=st.integers(0, 40),
)
def test_law_13_a_grant_that_replaces_another_ends_as_if_it_had_been_the_first(
    name: str, interval: int | None, prompt: list[int], first: int, second: int
) -> None:
    held = []
    for sizes in ((first, second), (second,)):
        geometry = cases.GEOMETRIES[name]
        engine = Engine(geometry, cases.policy_of(geometry, interval))
        request = open_request(engine, prompt)
        compute(engine, request, upto=len(prompt) // 2)
        for size in sizes:
            allocate(engine, request, min(size, len(prompt) - request.committed))
            verify(engine)
        held.append(engine.held())
        compute(engine, request)
        engine.finish(request)
        assert not any(engine.held())
    assert held[0] == held[1]


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompts=st.lists(cases.prompts, min_size=2, max_size=5),
    spare=st.integers(0, 4),
)
def test_law_13_no_space_is_said_only_where_pages_lack_and_changes_nothing(
    name: str, interval: int | None, prompts: list[list[int]], spare: int
) -> None:
    """All requests at once in a pool for one: `Engine.allocate` asserts each answer."""
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(max(map(len, prompts))) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    for prompt in prompts:
        request = open_request(engine, prompt)
        hit = engine.lookup(request).hit_tokens
        if allocate(engine, request, len(prompt) - hit):
            engine.begin_step()
            engine.commit(request)
            engine.end_step()
        verify(engine)
