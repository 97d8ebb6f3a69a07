"""What was declared keeps its place while requests pass it; what nobody declared goes first.

Seen while they run: at its end a request puts all that it declared in its place anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.oracle import Key
from laws.pressure import Snapshot, release, squeeze

ALIEN = 50
"""First token of a text that shares nothing with others."""
names = st.sampled_from([name for name in sorted(cases.ONE_SIZE) if name != "full"])


def engine_of(name: str, interval: int | None, spare: int) -> Engine:
    geometry = cases.ONE_SIZE[name]
    slabs = geometry.slabs_needed(64) + spare
    return Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)


def ends_at(engine: Engine, positions: Sequence[int]) -> list[set[int]]:
    """Group by group, where the sparse pages end that lookups at these positions read."""
    sparse = engine.oracle.sparse
    return [
        {e for p in positions for e in engine.oracle.needs(g, p)} if g in sparse else set()
        for g in engine.groups
    ]


def ours(there: Snapshot, ends: Sequence[set[int]]) -> list[set[int]]:
    """Ends of those of these pages that are resident, group by group."""
    return [
        {k.end for k in keys if k.tokens[0] != ALIEN} & wanted
        for keys, wanted in zip(there, ends, strict=True)
    ]


def aliens(engine: Engine, there: Snapshot) -> set[Key]:
    """Full blocks of the other text."""
    return {k for g in engine.oracle.full for k in there[g] if k.tokens[0] == ALIEN}


@cases.law(120)
@given(
    name=names,
    interval=cases.intervals,
    other=cases.texts(24, least=8),
    prompt=cases.texts(56, least=30),
    boundaries=st.lists(st.integers(8, 48), min_size=1, max_size=5),
    spare=st.integers(24, 40),
    chunks=cases.chunk_plans,
)
def test_law_14_a_running_request_passes_what_it_declared_in_order_and_the_rest_goes_first(
    name: str,
    interval: int | None,
    other: list[int],
    prompt: list[int],
    boundaries: list[int],
    spare: int,
    chunks: list[int],
) -> None:
    """Exactly what lookups at the boundaries read keeps its place: no block more, none fewer."""
    engine = engine_of(name, interval, spare)
    floor, oracle = engine.oracle.floor, engine.oracle
    run(engine, [ALIEN, *other])
    end = len(prompt)
    inside = sorted({floor(boundary) for boundary in boundaries if boundary <= end})
    request = open_request(engine, prompt, output=1, boundaries=inside)
    compute(engine, request, chunks=chunks)
    held = ends_at(engine, [floor(end)])
    declared = [d - h for d, h in zip(ends_at(engine, inside), held, strict=True)]
    kept = [set(oracle.kept(engine.policy, g, end, inside, 0, end)) for g in engine.groups]
    passed = [
        ends_at(engine, sorted(points))[g] - declared[g] - held[g] for g, points in enumerate(kept)
    ]
    before = engine.resident()
    assert ours(before, declared) == declared
    for there in squeeze(engine):
        if ours(there, declared) != ours(before, declared):
            assert not aliens(engine, there), "what was declared went before what is older"
        if aliens(engine, there) != aliens(engine, before):
            left = ours(there, passed)
            assert not any(left), f"what is needless, {left}, outlived what is needed"
        before = there
    release(engine)


@cases.law(80)
@given(
    name=names,
    interval=st.sampled_from([None, 0, 1]),
    other=cases.texts(16, least=8),
    prompt=cases.texts(40, least=20),
    boundary=st.integers(8, 19),
    more=st.integers(20, 30),
    spare=st.integers(24, 40),
)
def test_law_14_what_others_declared_keeps_its_place_when_a_request_hits_and_passes_it(
    name: str,
    interval: int | None,
    other: list[int],
    prompt: list[int],
    boundary: int,
    more: int,
    spare: int,
) -> None:
    engine = engine_of(name, interval, spare)
    position = engine.oracle.floor(boundary)
    run(engine, prompt, boundaries=[position])
    run(engine, [ALIEN, *other])
    request = open_request(engine, [*prompt[:position], *([9] * more)], output=1)
    compute(engine, request)
    assert request.began == position
    end = engine.oracle.floor(request.computed)
    declared = [
        d - h for d, h in zip(ends_at(engine, [position]), ends_at(engine, [end]), strict=True)
    ]
    before = engine.resident()
    assert ours(before, declared) == declared
    for there in squeeze(engine):
        if ours(there, declared) != ours(before, declared):
            assert not aliens(engine, there), "what was declared went before what is older"
        before = there
    release(engine)
