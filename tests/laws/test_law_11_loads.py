"""Loads that fail in part: what arrived has its key, what did not has none."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.loads import end_load
from laws.verify import verify


@pytest.mark.parametrize("name", cases.chosen)
@cases.law(6)
@given(
    interval=cases.intervals,
    prompt=cases.texts(40, least=26),
    on_device=st.integers(0, 12),
    bad=st.sets(st.integers(0, 30), min_size=1),
    twin=st.booleans(),
)
def test_law_11_of_a_load_that_failed_in_part_exactly_what_arrived_is_found(
    name: str,
    interval: int | None,
    prompt: list[int],
    on_device: int,
    bad: set[int],
    twin: bool,
) -> None:
    geometry = cases.GEOMETRIES[name]
    source = Engine(geometry, cases.policy_of(geometry, None))
    run(source, prompt)
    tier = source.resident()
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    if on_device:
        run(engine, prompt[:on_device])
    request = open_request(engine, [*prompt, 7])
    whole = engine.lookup(request, tier)
    assert whole.hit_tokens > whole.device_tokens
    assert allocate(engine, request, 1)
    load, before = engine.loads[request.load], engine.resident()
    if twin:  # waits for the same load
        other = open_request(engine, [*prompt, 7])
        assert engine.lookup(other).pending_tokens == whole.hit_tokens
        engine.abort(other)
    ok = [i not in bad for i in range(len(load.items))]
    ok[min(bad) % len(ok)] = False
    end_load(engine, request.load, ok)
    verify(engine)
    arrived = [
        {key for (group, _, key), good in zip(load.items, ok, strict=True) if good and group == g}
        for g in engine.groups
    ]
    assert engine.resident() == [a | b for a, b in zip(before, arrived, strict=True)]
    assert request.state == "waiting"
    hit = engine.lookup(request)
    assert hit.hit_tokens == engine.walk(request, engine.resident()).hit
    compute(engine, request)
    engine.finish(request)
    verify(engine)
