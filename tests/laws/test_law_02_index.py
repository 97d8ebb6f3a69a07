from __future__ import annotations

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, found_keys, hit_of, open_request, replay
from laws.engine import Engine
from laws.verify import verify


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    spare=st.integers(0, 6),
    history=cases.histories,
)
def test_law_02_every_key_leads_to_its_page_and_every_other_is_gone(
    name: str, interval: int | None, spare: int, history: list[cases.Turn]
) -> None:
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(80) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    texts = replay(engine, history)
    found = found_keys(engine, texts)
    assert found == engine.resident()
    for group, keys in enumerate(found):
        assert engine.manager.group_stats(group).keyed == len(keys)
    cached = sum(c.cached for c in engine.manager.arena_stats().classes)
    assert cached == sum(map(len, found))


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    history=cases.histories,
    done=st.integers(1, 50),
)
def test_law_02_clear_forgets_every_key_and_what_runs_leaves_none_until_it_starts_anew(
    name: str, interval: int | None, history: list[cases.Turn], done: int
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    texts = replay(engine, history)
    running, waiting = open_request(engine, [*texts[0], 0]), open_request(engine, texts[0])
    compute(engine, running, upto=min(done, len(running.tokens) - 1))
    engine.lookup(waiting)
    engine.clear()
    verify(engine)
    assert not any(found_keys(engine, [*texts, running.tokens]))
    compute(engine, running)
    engine.preempt(running)
    assert not any(found_keys(engine, [*texts, running.tokens]))
    assert engine.lookup(waiting).hit_tokens == 0
    for request in (waiting, running):
        compute(engine, request)
        engine.finish(request)
    verify(engine)
    if len(texts[0]) > engine.oracle.grid:
        assert hit_of(engine, texts[0]) > 0


@cases.law(40)
@given(name=cases.names, interval=cases.intervals, prompt=cases.prompts)
def test_law_02_clearing_one_salt_leaves_the_keys_of_others(
    name: str, interval: int | None, prompt: list[int]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    for salt in ("", "a", "b"):
        request = engine.open(prompt, salt=salt)
        assert request
        compute(engine, request)
        engine.finish(request)
    engine.clear("a")
    verify(engine)
    assert hit_of(engine, prompt, salt="a") == 0
    for salt in ("", "b"):
        assert hit_of(engine, prompt, salt=salt) == engine.oracle.limit(len(prompt))
