"""`verify` has the events of every law and of the state machine followed, through the wire format."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from laws import cases
from laws.counting import seen
from laws.drive import compute, open_request, run
from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Oracle
from laws.pressure import release, squeeze
from laws.verify import verify
from numpy.typing import NDArray

from kvcache.core.events import AllBlocksCleared, BlockStored, ReferenceIndex
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    spare=st.integers(0, 6),
    history=cases.histories,
    movable=st.booleans(),
    salt=st.sampled_from([None, "", "s"]),
)
def test_law_16_events_rebuild_the_keys_through_evictions_moves_and_clears(
    name: str,
    interval: int | None,
    spare: int,
    history: list[cases.Turn],
    movable: bool,
    salt: str | None,
) -> None:
    geometry = cases.GEOMETRIES[name]
    slabs = geometry.slabs_needed(80) + spare
    engine = Engine(geometry, cases.policy_of(geometry, interval), slabs=slabs, movable=movable)
    texts: list[list[int]] = []
    for turn in history:
        texts.append(run(engine, turn.prompt(texts), output=turn.output, chunks=turn.chunks))
    for _ in squeeze(engine):
        verify(engine)
    release(engine)
    verify(engine)
    stored = len(engine.audit.index)
    assert stored == sum(engine.manager.group_stats(g).keyed for g in engine.groups)
    engine.clear(salt)
    verify(engine)
    assert len(engine.audit.index) == (stored if salt == "s" else 0)


@cases.law(60)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.prompts,
    done=st.integers(1, 40),
    end=st.sampled_from(["abort", "preempt", "finish"]),
)
def test_law_16_what_an_open_step_writes_is_told_when_the_step_has_ended(
    name: str, interval: int | None, prompt: list[int], done: int, end: str
) -> None:
    geometry = cases.GEOMETRIES[name]
    engine = Engine(geometry, cases.policy_of(geometry, interval))
    request = open_request(engine, [*prompt, 5])
    compute(engine, request, upto=min(done, len(prompt)))
    engine.begin_step()
    assert allocate(engine, request, len(request.tokens) - request.committed)
    engine.commit(request)
    told = len(engine.audit.index)
    verify(engine)
    assert len(engine.audit.index) == told
    getattr(engine, end)(request)
    verify(engine)
    engine.end_step()
    verify(engine)


@cases.law(40)
@given(
    name=cases.names,
    interval=cases.intervals,
    spare=st.integers(0, 6),
    history=cases.histories,
)
def test_law_16_one_look_at_the_end_gives_the_same_keys_as_many(
    name: str, interval: int | None, spare: int, history: list[cases.Turn]
) -> None:
    geometry = cases.GEOMETRIES[name]
    ends = []
    for often in (False, True):
        manager = Manager(
            geometry,
            slabs=geometry.slabs_needed(80) + spare,
            retention=cases.policy_of(geometry, interval),
            events=True,
        )
        index = ReferenceIndex()
        texts: list[list[int]] = []
        for turn in history:
            texts.append(turn.prompt(texts))
            handle = manager.open(texts[-1])
            start = manager.lookup(handle).hit_tokens
            step = manager.begin_step()
            if grant := manager.allocate(handle, len(texts[-1]) - start):
                manager.commit(handle, grant.end)
            manager.end_step(step)
            manager.finish(handle)
            if often:
                index.apply(manager.take_events())
        index.apply(manager.take_events())
        assert not index.repeated_stores
        assert not index.unknown_removals
        ends.append({shelf: index.keys(shelf.group) for shelf in index.shelves()})
    assert ends[0] == ends[1]
    seen["keys told", name] += sum(map(len, ends[0].values()))


@cases.law(80)
@given(
    name=cases.names,
    interval=cases.intervals,
    prompt=cases.texts(60, least=24),
    declared=st.lists(st.integers(0, 60), max_size=2),
)
def test_law_16_neighbouring_blocks_are_told_as_one_event_and_a_gap_makes_two(
    name: str, interval: int | None, prompt: list[int], declared: list[int]
) -> None:
    """What one step stores, of a prompt computed at once."""
    geometry = cases.GEOMETRIES[name]
    oracle = Oracle.of(geometry)
    policy, n = cases.policy_of(geometry, interval), len(prompt)
    manager = Manager(geometry, slabs=UNLIMITED, retention=policy, events=True)
    inside = [b for b in declared if b <= n]
    handle = manager.open(prompt, boundaries=inside)
    manager.lookup(handle)
    step = manager.begin_step()
    assert manager.allocate(handle, n)
    manager.commit(handle, n)
    manager.end_step(step)
    told: list[list[range]] = [[] for _ in oracle.groups]
    keys = manager.group_digests(handle)
    for event in manager.take_events():
        assert isinstance(event, BlockStored)
        group = event.group_idx
        assert group is not None
        block = oracle.blocks[group]
        ends = {key.tobytes(): (i + 1) * block for i, key in enumerate(keys[group])}
        first, last = (ends[bytes(event.block_hashes[i])] for i in (0, -1))  # type: ignore[arg-type]
        assert len(range(first, last + 1, block)) == len(event.block_hashes)
        told[group].append(range(first, last + 1, block))
    for g, runs in enumerate(told):
        kept = oracle.kept(policy, g, n, inside, 0, n)
        keyed = oracle.keyed(g, kept, 0, n)
        expected = {e for e in keyed if oracle.key(g, ("native", ""), prompt, e)}
        assert sorted(e for run in runs for e in run) == sorted(expected)
        gaps = sum(e + oracle.blocks[g] not in expected for e in expected)
        assert len(runs) == gaps, f"group {g}: {runs}"
        seen["gap between events", name] += gaps > 1


def test_law_16_a_reader_that_comes_too_late_is_told_to_start_over() -> None:
    """Nothing is kept beyond about a million keys that wait, or two rounds over all pages."""
    geometry = cases.geometry(cases.full("a", 1))
    manager = Manager(geometry, slabs=300_000, retention=cases.policy_of(geometry, 0), events=True)

    def compute(tokens: NDArray[np.int32]) -> None:
        handle = manager.open(tokens)
        hit = manager.lookup(handle).hit_tokens
        step = manager.begin_step()
        assert manager.allocate(handle, len(tokens) - hit)
        manager.commit(handle, len(tokens))
        manager.end_step(step)
        manager.finish(handle)

    for first in (1, 2, 4, 5):
        compute(np.full(280_000, first, np.int32))
    assert manager.stats().events_dropped > 0
    compute(np.full(5, 3, np.int32))
    events = manager.take_events()
    assert isinstance(events[0], AllBlocksCleared)
    index = ReferenceIndex()
    index.apply(events)
    keys = [bytes(key) for key in index.keys(0)]  # type: ignore[arg-type]
    assert len(keys) >= 5
    assert all(manager.find_key(0, key) >= 0 for key in keys[:100])
    compute(np.array([3] * 5 + [4, 4], np.int32))
    index.apply(manager.take_events())
    assert len(index) == manager.group_stats(0).keyed == 300_000
    assert all(manager.find_key(0, bytes(key)) >= 0 for key in list(index.keys(0))[-100:])  # type: ignore[arg-type]
