"""Steps: when keys appear and pages are free; preemption."""

from __future__ import annotations

import random

from core.managing import (
    A,
    attention,
    compute,
    counts,
    full,
    granted,
    held,
    hit,
    hybrid,
    text,
)

from kvcache import Dense, Geometry, Manager, SlidingWindow, Sparse
from kvcache.core.records import UNLIMITED

# ---- steps -----------------------------------------------------------------------------------------


def test_pages_freed_under_an_open_step_are_free_when_it_ends() -> None:
    m = full(4)
    handle = m.open(text(16))
    m.lookup(handle)
    step = m.begin_step()
    m.allocate(handle, 16)
    m.commit(handle, 16)
    m.abort(handle)
    assert counts(m) == (0, 0, 4)  # free, cached, held
    waiting = m.open(text(4, 50))
    m.lookup(waiting)
    assert m.allocate(waiting, 4) is None
    m.end_step(step)
    assert counts(m) == (4, 0, 0)
    assert m.allocate(waiting, 4)


def test_a_request_in_two_open_steps_is_busy_until_the_newer_ends() -> None:
    m = full(5)
    handle = m.open(text(16))
    m.lookup(handle)
    first = m.begin_step()
    m.allocate(handle, 8)
    m.commit(handle, 8)
    second = m.begin_step()
    m.allocate(handle, 8)
    m.commit(handle, 16)
    m.end_step(first)
    assert hit(m, text(16)) == 8
    m.finish(handle)
    assert held(m) == 4
    m.end_step(second)
    assert counts(m) == (2, 2, 0)
    assert hit(m, text(17)) == 8  # what the second step wrote was dropped


def test_pages_of_guesses_wait_for_the_newest_step_before_their_commit_too() -> None:
    m = full(4)
    handle = m.open(text(6), max_tokens=16)
    compute(m, handle, 6)
    step = m.begin_step()
    granted(m.allocate(handle, 1, drafts=8))  # computed from here on: what to commit is not known
    m.preempt(handle)
    assert counts(m)[2] == 4
    later = m.open(text(4, 50))
    m.lookup(later)
    assert m.allocate(later, 4) is None
    m.end_step(step)
    assert held(m) == 0
    m.check()
    assert m.allocate(later, 4)


def test_a_draft_block_whose_key_is_told_late_has_it_at_the_end() -> None:
    window = SlidingWindow(
        name="d", layers=1, kv_heads=1, head_dim=4, window=7, block_tokens=2, lookahead_tokens=2
    )
    m = Manager(Geometry((attention(), window)), slabs=UNLIMITED, retention=Dense())
    handle = m.open(text(13), max_tokens=30)
    compute(m, handle, 13)  # the draft block before 12 is told apart by the tokens up to 16
    m.extend(handle, text(6, 13))
    step = m.begin_step()
    granted(m.allocate(handle, 6))
    m.commit(handle, 19)
    m.finish(handle)
    m.check()
    m.end_step(step)
    m.check()
    again = m.open(text(19))
    assert m.lookup(again).hit_tokens == 12
    granted(m.allocate(again, 7))
    assert m.draft_holes(again, 1) == []


def test_a_request_in_no_open_step_frees_its_pages_at_once() -> None:
    m = full()
    handle = m.open(text(8))
    compute(m, handle, 8)
    m.begin_step()
    m.finish(handle)
    assert counts(m) == (0, 2, 0)


def test_twins_compute_the_same_block_and_the_first_writer_keeps_the_key() -> None:
    m = full()
    one, two = m.open(text(8)), m.open(text(8))
    step = m.begin_step()
    for handle in (one, two):
        m.lookup(handle)
        m.allocate(handle, 8)
        m.commit(handle, 8)
    m.end_step(step)
    key = bytes(m.digests(one)[0])
    assert m.find_key(A, key) == m.block_table(one, A)[0]
    m.finish(one)
    m.finish(two)
    assert counts(m) == (2, 2, 0)
    assert len(m.take_keyed()) == 2


def test_if_the_first_of_two_writers_leaves_the_other_gets_the_key() -> None:
    m = hybrid()
    one, two = m.open(text(9)), m.open(text(9))
    step = m.begin_step()
    for handle in (one, two):
        m.lookup(handle)
        m.allocate(handle, 9)
        m.commit(handle, 9)
    m.abort(one)
    m.end_step(step)
    assert hit(m, text(9)) == 8
    assert m.find_key(A, bytes(m.digests(two)[0])) == m.block_table(two, A)[0]


def test_a_state_that_is_complete_gets_its_key_though_another_step_is_writing_it() -> None:
    m = hybrid()
    one, two = m.open(text(20)), m.open(text(9))
    compute(m, one, 8)  # 8 is where it stands, not where the policy wants a state
    step = m.begin_step()
    m.lookup(two)
    m.allocate(two, 9)
    m.commit(two, 9)
    m.preempt(one)
    assert m.lookup(one).hit_tokens == 8
    m.abort(two)
    assert m.lookup(one).hit_tokens == 8
    m.end_step(step)
    assert m.lookup(one).hit_tokens == 8
    m.check()


def test_a_token_that_is_known_after_the_step_gives_its_block_a_key_then() -> None:
    m = full()
    handle = m.open(text(3), max_tokens=8)
    compute(m, handle, 4)
    assert hit(m, text(5)) == 0
    m.extend(handle, [3])
    m.check()
    assert hit(m, text(5)) == 4


def test_preempted_requests_resume_from_the_last_grid_point() -> None:
    m = hybrid()
    handle = m.open(text(30))
    for upto in (3, 10, 15):
        compute(m, handle, upto)
    m.preempt(handle)
    assert m.info(handle)[2:7] == (0, 0, 0, 7, "waiting")
    assert m.lookup(handle).hit_tokens == 12
    assert granted(m.allocate(handle, 18)).start == 12


# ---- the whole -------------------------------------------------------------------------------------


def test_ten_thousand_random_steps_leak_no_page() -> None:
    rng = random.Random(1)
    m = hybrid(Sparse(8), slabs=36)
    open_now: list[int] = []
    for i in range(10_000):
        if len(open_now) < 4:
            prompt = [*text(4 * rng.randrange(5)), *(rng.randrange(3) for _ in range(9))]
            open_now.append(m.open(prompt, max_tokens=40))
        handle = rng.choice(open_now)
        state = m.info(handle).state
        step = m.begin_step()
        if state == "waiting":
            m.lookup(handle)
        known = m.info(handle).tokens
        room = known - m.info(handle).committed
        grant = m.allocate(handle, min(rng.randrange(1, 9), room)) if state == "running" else None
        if state == "waiting" and m.allocate(handle, 0):
            grant = m.allocate(handle, min(4, known - m.info(handle).committed))
        if grant and grant.end > grant.start:
            m.commit(handle, grant.end)
        event = rng.randrange(8)
        if event == 0:
            m.finish(handle)
        elif event == 1:
            m.abort(handle)
        elif event == 2 and m.info(handle).state == "running":
            m.preempt(handle)
        elif known < 40:
            m.extend(handle, [rng.randrange(3)])
        if event < 2:
            open_now.remove(handle)
        m.end_step(step)
        if i % 500 == 0:
            m.check()
    for handle in open_now:
        m.abort(handle)
    m.check()
    assert held(m) == 0
    assert m.arena_stats().evictions > 1000
