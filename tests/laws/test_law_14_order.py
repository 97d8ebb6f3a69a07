"""On arenas of one page size, where eviction has one exact order over all groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from laws import cases
from laws.drive import compute, decode, open_request, replay
from laws.engine import Engine
from laws.grants import allocate
from laws.pressure import Chain, Snapshot, release, squeeze

from kvcache import ChunkedLocal, Dense, FullAttention, Geometry, Manager

sizes = st.sampled_from(sorted(cases.ONE_SIZE))
declared = st.lists(st.integers(0, 40), max_size=2)


def engine_of(name: str, interval: int | None, tokens: int, spare: int) -> Engine:
    geometry = cases.ONE_SIZE[name]
    assert geometry.pages_per_slab == (1,)
    slabs = geometry.slabs_needed(tokens) + spare
    return Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)


def superseded(engine: Engine, prompt: int, inside: list[int], end: int) -> list[set[int]]:
    """Ends of the sparse pages of a turn that a later state or window of it makes needless."""
    lasting = {engine.oracle.floor(end), *(engine.oracle.floor(b) for b in inside)}
    ends: list[set[int]] = []
    for g in engine.groups:
        if g not in engine.oracle.sparse:
            ends.append(set())
            continue
        kept = engine.oracle.kept(engine.policy, g, prompt, inside, 0, end)
        lasts = {e for p in lasting for e in engine.oracle.needs(g, p)}
        ends.append({e for p in kept for e in engine.oracle.needs(g, p)} - lasts)
    return ends


@cases.law(120)
@given(
    name=sizes,
    interval=cases.intervals,
    prompt=cases.prompts,
    output=cases.texts(12, least=0),
    boundaries=declared,
    spare=st.integers(0, 20),
    chunks=cases.chunk_plans,
)
def test_law_14_superseded_first_then_tail_before_head_and_what_serves_it_before_the_prefix(
    name: str,
    interval: int | None,
    prompt: list[int],
    output: list[int],
    boundaries: list[int],
    spare: int,
    chunks: list[int],
) -> None:
    engine = engine_of(name, interval, 60, spare)
    inside = [b for b in boundaries if b <= len(prompt)]
    request = open_request(engine, prompt, output=len(output), boundaries=inside)
    compute(engine, request, chunks=chunks)
    decode(engine, request, output)
    end, text = request.computed, request.tokens
    engine.finish(request)
    chain, start = Chain(engine, text), engine.resident()
    before = start
    first = superseded(engine, len(prompt), inside, end)
    for there in squeeze(engine):
        gone = [was - now for was, now in zip(start, there, strict=True)]
        needless = [
            {k for k in now if k.end in ends} for now, ends in zip(there, first, strict=True)
        ]
        if any(needless):
            for keys, ends in zip(gone, first, strict=True):
                assert all(k.end in ends for k in keys), "a needed page went before a needless one"
        check_chain(chain, [chain], before, there)
        before = there
    release(engine)


def check_chain(chain: Chain, chains: list[Chain], before: Snapshot, there: Snapshot) -> None:
    """Full blocks have no gap; sparse pages do not outlive the prefix, nor leave a tail behind.

    A boundary is superseded where any chain that goes through it has a later one.
    """
    prefix, tail = chain.prefix(there), chain.tail(there)
    assert tail <= prefix, "a block outlived the prefix before it"
    for position in chain.points():
        for g in chain.oracle.state:
            if chain.has(g, position, there):
                assert prefix >= position, f"the state of {position} outlived its prefix, {prefix}"
        if chain.complete(position, before) and not chain.complete(position, there):
            through = [c for c in chains if c.shares(chain) >= position]
            later = any(c.complete(p, before) for c in through for p in c.points() if p > position)
            assert later or tail <= position, f"{position} left a tail behind"


SHARED_BY_CHANCE = [
    cases.Turn(3, 27, [0, 1, 1], [1, 2, 2, 2, 2, 2, 0], [16]),
    cases.Turn(3, 27, [0, 1, 1], [1, 2, 2, 2, 2, 2, 0], [16]),
    cases.Turn(5, 8, [2, 2, 1, 0, 0, 1, 1], [2, 2, 0], [12, 1, 28]),
    cases.Turn(0, 20, [2, 2], [1, 1, 0, 2, 0], [2]),
    cases.Turn(
        1,
        35,
        [1, 2, 2, 2, 2, 2, 0, 1, 2, 1, 2, 0, 1, 0, 1, 1],
        [1, 1, 0, 2, 0, 1, 2, 0, 1],
        [21],
    ),
]
"""The window of the third turn's end serves a boundary below it as well, with a block that others left."""


@cases.law(120)
@given(
    name=sizes,
    interval=cases.intervals,
    history=cases.histories,
    spare=st.integers(0, 20),
)
@example(name="window", interval=2, history=SHARED_BY_CHANCE, spare=2)
def test_law_14_holds_for_histories_that_share_heads(
    name: str, interval: int | None, history: list[cases.Turn], spare: int
) -> None:
    engine = engine_of(name, interval, 80, spare)
    chains = [Chain(engine, text) for text in replay(engine, history)]
    before = engine.resident()
    for there in squeeze(engine):
        for chain in chains:
            check_chain(chain, chains, before, there)
        before = there
    release(engine)


@pytest.mark.parametrize("end", ["finish", "preempt", "abort"])
@cases.law(40)
@given(
    name=sizes,
    interval=cases.intervals,
    first=cases.prompts,
    second=cases.texts(20),
    spare=st.integers(0, 20),
)
def test_law_14_pages_freed_under_an_open_step_go_in_the_same_order_as_at_once(
    end: str,
    name: str,
    interval: int | None,
    first: list[int],
    second: list[int],
    spare: int,
) -> None:
    orders: list[list[Snapshot]] = []
    for deferred in (False, True):
        engine = engine_of(name, interval, 60, spare + 8)
        request = open_request(engine, [*first, 5], output=8)
        compute(engine, request, upto=len(first))
        if deferred:
            engine.begin_step()
            assert allocate(engine, request, 1)
            engine.commit(request)
        getattr(engine, end)(request)
        if deferred:
            engine.end_step()
        if end == "preempt":
            engine.abort(request)
        other = open_request(engine, [6, *second])
        compute(engine, other)
        engine.finish(other)
        orders.append([engine.resident(), *squeeze(engine)])
        release(engine)
    assert orders[0] == orders[1]


@cases.law(60)
@given(
    name=sizes,
    interval=cases.intervals,
    history=cases.histories,
    spare=st.integers(0, 20),
)
def test_law_14_a_key_is_evicted_only_when_no_page_without_one_is_left(
    name: str, interval: int | None, history: list[cases.Turn], spare: int
) -> None:
    engine = engine_of(name, interval, 80, spare)
    replay(engine, history)
    before = engine.resident()
    held = sum(engine.held())
    for there in squeeze(engine):
        evicted = sum(map(len, before)) - sum(map(len, there))
        keyed, held_now = sum(map(len, before)), sum(engine.held())
        idle = engine.slabs - held - keyed
        assert evicted == max(0, held_now - held - idle)
        before, held = there, held_now
    release(engine)


CHUNKED = Geometry(
    (
        FullAttention(name="f", layers=1, kv_heads=1, head_dim=8, block_tokens=4),
        ChunkedLocal(name="c", layers=1, kv_heads=1, head_dim=8, chunk_tokens=64, block_tokens=4),
    )
)


@pytest.mark.parametrize("how", ["finished", "aborted while it loads"])
def test_law_14_what_a_request_took_over_goes_tail_first_however_it_ends(how: str) -> None:
    """A chunk of which each block serves a boundary: the hit shrinks block by block."""
    tokens, hits = list(range(24)), []
    for evicted in range(0, 10, 2):
        manager = Manager(CHUNKED, slabs=20, retention=Dense())
        first = manager.open([*tokens[:20], 99], max_tokens=40)
        manager.lookup(first)
        step = manager.begin_step()
        grant = manager.allocate(first, 21)
        assert grant is not None
        manager.commit(first, grant.end)
        manager.end_step(step)
        manager.finish(first)
        if how != "finished":
            second = manager.open([*tokens, 99], max_tokens=40)
            manager.lookup(second, [np.ones(6, np.uint8)] * 2)
            grant = manager.allocate(second, 1)
            assert grant is not None
            assert grant.load
            manager.abort(second)
            manager.end_load(grant.load, np.zeros(grant.load_pages, np.uint8))
        stranger = manager.open(range(1000, 1020 + 2 * evicted), max_tokens=40)
        manager.lookup(stranger)
        step = manager.begin_step()
        grant = manager.allocate(stranger, 20 + 2 * evicted)
        assert grant is not None
        probe = manager.open([*tokens, 99])
        hits.append(manager.lookup(probe).hit_tokens)
    assert hits == [20, 16, 12, 8, 4]
