from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine


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
        adopted = [0 if i else len(engine.oracle.needs(g, hit)) for g in engine.groups]
        held = engine.held()
        need = engine.manager.need(request.handle, size)
        assert min(need) >= 0
        engine.allocate(request, size)
        assert engine.held() == [h + n + a for h, n, a in zip(held, need, adopted, strict=True)]
        if request.granted > request.committed:
            engine.begin_step()
            engine.commit(request)
            engine.end_step()
        engine.verify()


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
            engine.allocate(request, min(size, len(prompt) - request.committed))
            engine.verify()
        held.append(engine.held())
        compute(engine, request)
        engine.finish(request)
        assert engine.held() == [0] * len(engine.groups)
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
    pages = [n + spare for n in geometry.pages_needed(max(map(len, prompts)))]
    engine = Engine(geometry, cases.policy_of(geometry, interval), pages=pages)
    for prompt in prompts:
        request = open_request(engine, prompt)
        hit = engine.lookup(request).hit_tokens
        if engine.allocate(request, len(prompt) - hit):
            engine.begin_step()
            engine.commit(request)
            engine.end_step()
        engine.verify()
