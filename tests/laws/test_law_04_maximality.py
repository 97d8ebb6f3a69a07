from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.loads import end_load
from laws.oracle import Key
from laws.verify import verify

holes = st.sets(st.integers(0, 14), max_size=2)
"""Blocks or grid points that a tier lacks."""


@cases.law(150)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.texts(60),
    stored=st.integers(0, 60),
    missing=st.lists(holes, min_size=4, max_size=4),
)
def test_law_04_a_hit_equals_brute_force_over_device_and_tier(
    name: str,
    interval: int | None,
    prompt: list[int],
    stored: int,
    missing: list[set[int]],
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    if prompt[:stored]:
        run(engine, prompt[:stored])
    request = open_request(engine, prompt)
    tier: list[set[Key]] = []
    for g, block in enumerate(engine.oracle.blocks):
        ends = range(block, len(prompt) + 1, block) if block else ()
        keys = (
            request.key(engine.oracle, g, end)
            for i, end in enumerate(ends)
            if i not in missing[g % len(missing)]
        )
        tier.append({key for key in keys if key})
    hit = engine.lookup(request, tier)
    assert hit.device_tokens == engine.walk(request, engine.resident()).hit
    assert hit.hit_tokens == engine.walk(request, engine.resident(), tier).hit
    assert hit.hit_tokens + sum(hit.lost.values()) == len(prompt)
    if not allocate(engine, request, 1):
        raise AssertionError("an unlimited pool had no space")
    if request.load:
        end_load(engine, request.load, [True] * len(engine.loads[request.load].items))
    verify(engine)
    compute(engine, request)
    engine.finish(request)


@cases.law(40)
@given(
    prompt=cases.texts(40, least=10),
    short=st.lists(st.integers(0, 12), min_size=2, max_size=2),
)
def test_law_04_a_tier_map_may_be_shorter_or_longer_than_the_prompt(
    prompt: list[int], short: list[int]
) -> None:
    engine = Engine(cases.GEOMETRIES["hybrid"], cases.policy_of(cases.GEOMETRIES["hybrid"], 0))
    request = open_request(engine, prompt)
    hit = engine.manager.lookup(request.handle, [np.ones(n, np.uint8) for n in short])
    limit = engine.oracle.limit(len(prompt))
    assert hit.hit_tokens == min(limit, 4 * min(short))
