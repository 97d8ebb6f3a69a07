"""Requests that compute the same blocks side by side: one copy has the key, each holds its own.

Whoever held the keyed copy may leave first, and that may be evicted. The prefix of the one who
leaves last must go from its tail to its head like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, strategies as st
from laws import cases
from laws.drive import compute_twins, hit_of, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.loads import end_load
from laws.pressure import Chain, release, squeeze
from laws.test_law_14_order import check_chain
from laws.verify import verify

MOST = 3
ROOM = 36
"""Pages of one of them at most: 40 tokens in one chunk, with a page at each 4 in three groups."""


class Twin(NamedTuple):
    """Where it parts from the others, how long it goes on, and how it leaves."""

    parts_at: int
    tail: int
    end: str
    evictions: int
    """After it has left."""

    def text(self, head: Sequence[int], number: int) -> list[int]:
        return [*head[: self.parts_at], *[10 + number] * self.tail]


twins = st.lists(
    st.builds(
        Twin,
        parts_at=st.integers(4, 24),
        tail=st.integers(0, 16),
        end=st.sampled_from(["finish", "abort", "preempt"]),
        evictions=st.integers(0, 6),
    ),
    min_size=2,
    max_size=MOST,
)


def evict(engine: Engine, least: int, first: int) -> None:
    """So many keys, or as many as there are."""
    before = engine.manager.arena_stats().evictions
    for _ in squeeze(engine, first) if least else ():
        if engine.manager.arena_stats().evictions >= before + least:
            return


@cases.law(120)
@given(
    name=st.sampled_from(sorted(cases.ONE_SIZE)),
    interval=cases.intervals,
    head=cases.texts(24, least=24),
    drawn=twins,
    order=st.permutations(range(MOST)),
    chunks=cases.chunk_plans,
    lead=st.sampled_from([0, 0, 1, 40]),
    alike=st.booleans(),
    spare=st.integers(0, 4),
)
def test_law_14_of_twins_the_tail_goes_before_the_head_whoever_leaves_last(
    name: str,
    interval: int | None,
    head: list[int],
    drawn: list[Twin],
    order: list[int],
    chunks: list[int],
    lead: int,
    alike: bool,
    spare: int,
) -> None:
    """All that the last one had computed is there when it leaves, and goes in order."""
    geometry = cases.ONE_SIZE[name]
    if alike:
        drawn = [t._replace(parts_at=drawn[0].parts_at, tail=t.tail % 2) for t in drawn]
    texts = [twin.text(head, i) for i, twin in enumerate(drawn)]
    slabs = ROOM * len(texts) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs)
    requests = [open_request(engine, text) for text in texts]
    compute_twins(engine, requests, chunks=chunks, lead=lead)
    order = [i for i in order if i < len(drawn)]
    for i in order:
        getattr(engine, drawn[i].end)(requests[i])
        verify(engine)
        if i == order[-1]:
            assert hit_of(engine, [*texts[i], 9]) == engine.oracle.floor(len(texts[i]))
        evict(engine, drawn[i].evictions, 2000 + 1000 * i)
    check_order(engine, texts)


def check_order(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    chains = [Chain(engine, text) for text in texts]
    before = engine.resident()
    for there in squeeze(engine, 9000):
        for chain in chains:
            check_chain(chain, chains, before, there)
        before = there
    release(engine)


@cases.law(80)
@given(
    name=st.sampled_from(sorted(cases.ONE_SIZE)),
    interval=cases.intervals,
    head=cases.texts(24, least=24),
    drawn=twins,
    loads_first=st.booleans(),
    leaves_first=st.booleans(),
    chunks=cases.chunk_plans,
    spare=st.integers(0, 4),
)
def test_law_14_of_twins_of_which_one_loads_what_the_other_computes_the_tail_goes_first(
    name: str,
    interval: int | None,
    head: list[int],
    drawn: list[Twin],
    loads_first: bool,
    leaves_first: bool,
    chunks: list[int],
    spare: int,
) -> None:
    geometry = cases.ONE_SIZE[name]
    policy = cases.policy_of(geometry, interval)
    texts = [twin.text(head, i) for i, twin in enumerate(drawn[:2])]
    source = Engine(geometry, policy)
    run(source, texts[0])
    engine = Engine(geometry, policy, slabs=ROOM * 2 + spare)
    loading, computing = (open_request(engine, text) for text in texts)
    engine.lookup(computing)
    engine.lookup(loading, source.resident())
    if not (loading.hit and loading.hit.hit_tokens):
        return
    if not loads_first:
        compute_twins(engine, [computing], chunks=chunks)
    assert allocate(engine, loading, 1)
    load = loading.load
    if loads_first:
        compute_twins(engine, [computing], chunks=chunks)
    if load:
        end_load(engine, load, [True] * len(engine.loads[load].items))
    compute_twins(engine, [loading], chunks=chunks)
    ends = list(zip(drawn, (loading, computing), strict=False))
    for i, (twin, request) in enumerate(ends if leaves_first else ends[::-1]):
        getattr(engine, twin.end)(request)
        verify(engine)
        evict(engine, twin.evictions, 2000 + 1000 * i)
    check_order(engine, texts)
