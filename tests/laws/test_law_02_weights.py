"""Other weights in mid-run: what is open runs on without keys, and nothing of before is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.loads import end_load
from laws.verify import verify

LORA = "l"


def opened(engine: Engine, tokens: list[int], lora: str):  # noqa: ANN201
    request = engine.open(tokens, max_tokens=len(tokens) + 8, lora=lora)
    assert request
    return request


def hit(engine: Engine, tokens: list[int], lora: str, tier: list) -> int:
    request = opened(engine, tokens, lora)
    found = engine.lookup(request, tier).hit_tokens
    engine.abort(request)
    return found


@pytest.mark.parametrize("lora", ["", LORA])
@pytest.mark.parametrize("name", cases.chosen)
@cases.law(5)
@given(
    interval=cases.intervals,
    prompt=cases.texts(40, least=26),
    done=st.integers(1, 25),
    end=st.sampled_from(["finish", "preempt", "abort"]),
    open_step=st.booleans(),
)
def test_law_02_after_a_change_of_weights_open_requests_find_and_leave_no_keys(
    name: str,
    lora: str,
    interval: int | None,
    prompt: list[int],
    done: int,
    end: str,
    open_step: bool,
) -> None:
    """One runs, one loads, one has looked up its hit and one has not, when the weights change."""
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    bystander = run(engine, prompt)  # of the base model
    first = opened(engine, prompt, lora)
    compute(engine, first)
    engine.finish(first)
    tier = [set(keys) for keys in engine.resident()]
    longer = [*prompt, 7, 7]
    running, loading = opened(engine, [5, *prompt], lora), opened(engine, longer, lora)
    found, late = opened(engine, longer, lora), opened(engine, longer, lora)
    before = engine.lookup(found, tier).hit_tokens
    assert before
    engine.clear()  # so that what is loaded comes from the tier
    compute(engine, running, upto=done)
    engine.lookup(loading, tier)
    assert allocate(engine, loading, 1)
    if open_step:
        engine.begin_step()
        assert allocate(engine, running, 1)
        engine.commit(running)
    engine.retire(lora or None)
    verify(engine)
    if loading.load:
        end_load(engine, loading.load, [True] * len(engine.loads[loading.load].items))
    verify(engine)
    assert engine.lookup(late, tier).hit_tokens == 0
    for request in (found, late):  # `found` goes on from the lookup that it had
        grant = allocate(engine, request, 1)
        assert grant
        assert grant.hit_tokens == 0
        engine.preempt(request)
    while engine.steps:
        engine.end_step()
    for request in (running, loading, found, late):
        compute(engine, request)
        getattr(engine, end)(request)
        verify(engine)
        if end == "preempt":
            assert engine.lookup(request, tier).hit_tokens == 0
            engine.finish(request)
    assert not any(engine.resident())
    assert not engine.manager.take_keyed().size
    assert sum(engine.manager.group_stats(g).keyed for g in engine.groups) == 0
    assert hit(engine, longer, lora, tier) == 0
    again = opened(engine, prompt, lora)
    compute(engine, again)
    engine.finish(again)
    assert hit(engine, longer, lora, []) == before
    assert not lora or hit(engine, [*bystander, 7], "", []) == 0


@pytest.mark.parametrize("lora", ["", LORA])
@cases.law(40)
@given(name=cases.names, interval=cases.intervals, prompt=cases.texts(40, least=26))
def test_law_02_a_hit_in_a_tier_of_other_weights_is_not_loaded(
    lora: str, name: str, interval: int | None, prompt: list[int]
) -> None:
    """Nothing is on the device, so that only the change itself can have told the request."""
    geometry = cases.GEOMETRIES[name]
    source = Engine(geometry, cases.policy_of(geometry, interval))
    request = opened(source, [*prompt, 7], lora)
    compute(source, request)
    source.finish(request)
    tier = source.resident()
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request = opened(engine, [*prompt, 7, 7], lora)
    assert engine.lookup(request, tier).hit_tokens
    engine.retire(lora or None)
    grant = allocate(engine, request, 1)
    assert grant
    assert (grant.hit_tokens, grant.load) == (0, 0)
    verify(engine)


@cases.law(60)
@given(name=cases.names, interval=cases.intervals, prompt=cases.texts(40, least=26))
def test_law_02_another_adapters_weights_change_nothing_for_the_rest(
    name: str, interval: int | None, prompt: list[int]
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    for lora in ("", "k"):
        request = opened(engine, prompt, lora)
        compute(engine, request)
        engine.finish(request)
    there = engine.resident()
    request = open_request(engine, [*prompt, 7])
    known = engine.lookup(request).hit_tokens
    engine.retire(LORA)
    verify(engine)
    assert engine.resident() == there
    grant = allocate(engine, request, 1)
    assert grant
    assert grant.hit_tokens == known > 0
    assert not request.retired


def test_law_02_a_page_whose_key_went_while_it_was_pinned_is_free_when_unpinned() -> None:
    engine = Engine(cases.GEOMETRIES["hybrid"], cases.policy_of(cases.GEOMETRIES["hybrid"], None))
    run(engine, list(range(33)))
    items = engine.manager.take_keyed()
    pages = engine.manager.pin(items)
    engine.pinned = [(int(i["group"]), int(p)) for i, p in zip(items, pages, strict=True)]
    engine.retire()
    verify(engine)
    assert (engine.manager.pin(items) == -1).all()
    for item, page in zip(items, pages, strict=True):
        engine.manager.unpin(int(item["group"]), np.array([page], np.int32))
    engine.pinned = []
    verify(engine)
    assert not any(engine.held())
    assert not any(c.cached for c in engine.manager.arena_stats().classes)
