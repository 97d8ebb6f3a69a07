from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, found_keys, open_request, replay
from laws.engine import Engine

from kvcache import MisuseError


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
    pages = [n + spare for n in geometry.pages_needed(80)]
    engine = Engine(geometry, cases.policy_of(geometry, interval), pages=pages)
    texts = replay(engine, history)
    found = found_keys(engine, texts)
    assert found == engine.resident()
    for group, keys in enumerate(found):
        stats = engine.manager.pool_stats(group)
        assert stats.keyed == len(keys) == stats.cached


@cases.law(30)
@given(name=cases.names, interval=cases.intervals, history=cases.histories)
def test_law_02_clear_forgets_every_key_once_no_request_holds_pages(
    name: str, interval: int | None, history: list[cases.Turn]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    texts = replay(engine, history)
    running, waiting = open_request(engine, [*texts[0], 0]), open_request(engine, texts[0])
    compute(engine, running)
    with pytest.raises(MisuseError):
        engine.manager.clear()
    engine.verify()
    engine.finish(running)
    engine.lookup(waiting)
    engine.clear()
    assert found_keys(engine, [*texts, running.tokens]) == engine.ever
    assert engine.lookup(waiting).hit_tokens == 0
    compute(engine, waiting)
    engine.finish(waiting)
    engine.verify()
