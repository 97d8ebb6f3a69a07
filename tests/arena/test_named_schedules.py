"""Schedules that broke earlier rules, staged against the real manager. Numbers as in docs/memory.md."""

from __future__ import annotations

import numpy as np
import pytest
from arena.adversary import Job, Pressure, crowd
from laws import cases

from kvcache import Geometry, Manager
from kvcache.core.errors import CapacityError
from kvcache.core.records import Grant
from kvcache.retention import Dense

WIDE = cases.geometry(cases.full("a", 1), cases.window("w", 9, 1, width=8))
"""Two full pages to a slab, one window page; a request of 6 tokens needs 3 + 6 slabs."""
STATE = cases.geometry(cases.full("a", 1), cases.state("s", 16))
"""Two full pages to a slab, one state."""
X, SMALL = [0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]


def manager(geometry: Geometry, slabs: int, *, movable: bool = False) -> Manager:
    return Manager(geometry, slabs=slabs, retention=Dense(), movable=movable)


def step(m: Manager, handle: int, tokens: int = 1) -> Grant | None:
    """Compute that many tokens at once; a request that has no pages is looked up first."""
    if m.info(handle).state == "waiting":
        m.lookup(handle)
    grant = m.allocate(handle, tokens)
    if grant and not grant.load:
        opened = m.begin_step()
        m.commit(handle, grant.end)
        m.end_step(opened)
    m.check()
    return grant


def run(m: Manager, tokens: list[int]) -> None:
    handle = m.open(tokens)
    while m.info(handle).computed < len(tokens):
        assert step(m, handle)
    m.finish(handle)


def spread(m: Manager, x: int, pages: int) -> None:
    """Each page of x shares its slab with a page of a request that has finished since."""
    for n in range(pages):
        assert step(m, x)
        run(m, [SMALL[n]])


@pytest.mark.parametrize("movable", [False, True])
def test_1_the_oldest_does_not_spread_its_own_pages_too_thin(movable: bool) -> None:
    m = manager(WIDE, WIDE.slabs_needed(6), movable=movable)
    x = m.open(X)
    spread(m, x, 4)
    while m.info(x).computed < len(X):
        assert step(m, x), m.blockage(x)
    m.finish(x)


@pytest.mark.parametrize("movable", [False, True])
def test_1_one_that_was_spread_before_it_became_the_oldest_restarts_once(movable: bool) -> None:
    """It gets on as far as it can first: two tokens do not fit, one does."""
    m = manager(WIDE, WIDE.slabs_needed(6), movable=movable)
    older, x = m.open(X), m.open(X)
    spread(m, x, 4)
    m.abort(older)
    grant = step(m, x, 2)
    assert grant
    assert grant.end == 5
    assert step(m, x) is None
    assert m.blockage(x) == "restart"
    m.preempt(x)
    assert m.lookup(x).hit_tokens > 0
    while m.info(x).computed < len(X):
        assert step(m, x)
    m.finish(x)


def test_2_no_chain_of_transfers_keeps_the_oldest_waiting() -> None:
    """Each pin ends, and the next one is asked for before the oldest tries again."""
    m = manager(STATE, STATE.slabs_needed(4))
    run(m, [9, 9, 9, 9])
    cached = m.take_keyed()
    pins = [(int(item["group"]), page) for item, page in zip(cached, m.pin(cached), strict=True)]
    pins = [(group, page) for group, page in pins if page >= 0]
    x = m.open(X[:4])
    assert step(m, x) is None
    assert m.blockage(x) == "wait"
    waited = 0
    while pins:
        group, page = pins.pop(0)
        m.unpin(group, np.array([page], np.int32))
        assert (m.pin(cached) == -1).all()
        if step(m, x):
            break
        waited += 1
    for group, page in pins:
        m.unpin(group, np.array([page], np.int32))
    assert waited < len(cached)
    while m.info(x).computed < 4:
        assert step(m, x)
    m.finish(x)


def test_3_a_load_that_fills_all_of_its_pages_is_no_obstacle() -> None:
    m = manager(STATE, STATE.slabs_needed(4))
    x = m.open(X[:4])
    present = [np.ones(len(keys), np.uint8) for keys in m.group_digests(x)]
    assert m.lookup(x, present).hit_tokens == 3
    grant = m.allocate(x, 1)
    assert grant
    assert grant.load
    m.end_load(grant.load, np.ones(len(m.load_items(grant.load)), np.uint8))
    assert step(m, x)
    m.finish(x)


def test_4_and_6_what_is_drained_for_the_oldest_is_not_taken_by_others() -> None:
    m = manager(STATE, STATE.slabs_needed(4))
    x, younger, third = m.open(X[:4]), m.open([6, 6]), m.open([7])
    first = m.begin_step()
    m.lookup(younger)
    assert m.allocate(younger, 1)
    m.commit(younger, 1)
    second = m.begin_step()
    m.lookup(x)
    while not (grant := m.allocate(x, 4)):
        why = m.blockage(x)
        if why == "preempt":
            m.preempt(younger)
        else:
            assert why == "wait"
            for handle in (younger, third):
                m.lookup(handle)
                assert m.allocate(handle, 1) is None
                assert m.blockage(handle) == "frozen"
            m.end_step(first if m.stats().open_steps == 2 else second)
    m.commit(x, grant.end)
    m.end_step(second)
    m.check()


def test_5_a_stream_of_arrivals_does_not_starve_the_first() -> None:
    first = Job(list(range(8)), prompt=2, chunk=2)
    stream = [Job([50 + n, n, n], prompt=3, chunk=3, arrives=2 * n) for n in range(40)]
    pressure = Pressure(deadline=2, pins=2, loads=0)
    c = crowd(
        STATE,
        [first, *stream],
        slabs=STATE.slabs_needed(8),
        retention=Dense(),
        pressure=pressure,
        movable=False,
        seed=5,
    )
    c.run()
    assert c.order[0] is first


def test_7_quarantine_delays_and_its_end_lets_go_on() -> None:
    m = manager(STATE, STATE.slabs_needed(4))
    younger = m.open([6, 6, 6, 6])
    present = [np.ones(len(keys), np.uint8) for keys in m.group_digests(younger)]
    m.lookup(younger, present)
    grant = m.allocate(younger, 1)
    assert grant
    m.abandon_load(grant.load)
    m.abort(younger)
    x = m.open(X[:4])
    while step(m, x):
        pass
    assert m.blockage(x) == "wait"
    m.end_load(grant.load, np.zeros(len(m.load_items(grant.load)), np.uint8))
    while m.info(x).computed < 4:
        assert step(m, x)
    m.finish(x)


def test_8_two_states_and_a_speculative_tail_fit_in_the_minimum() -> None:
    geometry = cases.geometry(cases.full("a", 1), cases.state("s", 16, speculative=2))
    m = manager(geometry, geometry.slabs_needed(9))
    x = m.open([0], max_tokens=9)
    assert step(m, x)
    at = 1
    while at < 9:
        drafts = min(2, 9 - at - 1)
        opened = m.begin_step()
        grant = m.allocate(x, 1, drafts=drafts)
        assert grant
        m.extend(x, [at])
        m.commit(x, at + 1)
        m.end_step(opened)
        m.check()
        at += 1
    m.finish(x)


def test_9_a_pin_without_end_is_waited_for_and_more_than_the_arena_is_refused() -> None:
    m = manager(STATE, STATE.slabs_needed(4))
    with pytest.raises(CapacityError, match="slabs"):
        m.open(X, max_tokens=40)
    run(m, [9])
    kept = m.take_keyed()
    pages = m.pin(kept)
    x = m.open(X[:4])
    while step(m, x):
        pass
    assert m.blockage(x) == "wait"
    for item, page in zip(kept, pages, strict=True):
        m.unpin(int(item["group"]), np.array([page], np.int32))
    while m.info(x).computed < 4:
        assert step(m, x)
    m.finish(x)
