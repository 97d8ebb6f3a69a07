"""Transient spans (pooling states): which blocks of a grant have a page, by hand."""

from __future__ import annotations

import pytest
from core.managing import attention, granted, hit, text

from kvcache import Geometry, Manager, PoolingState, Sparse
from kvcache.core.errors import ConfigError
from kvcache.core.records import UNLIMITED
from kvcache.core.retain import plan_of

POOL = PoolingState(name="p", layers=1, ratio=4, token_bytes=8, block_tokens=4, overlap=True)
GEOMETRY = Geometry((attention("a", 16), POOL))
P = 1
"""Blocks of 4 tokens, a grid of 16; at H the entry being pooled and the one before are read."""


def manager(interval: int = 0) -> Manager:
    return Manager(GEOMETRY, slabs=UNLIMITED, retention=Sparse(interval))


def paged(m: Manager, handle: int) -> list[int]:
    """Blocks that have a page."""
    return [i for i, page in enumerate(m.block_table(handle, P)) if page >= 0]


def step(m: Manager, handle: int, tokens: int, *, drafts: int = 0, wrong: int = 0) -> None:
    number = m.begin_step()
    end = granted(m.allocate(handle, tokens, drafts=drafts)).end
    m.commit(handle, end - wrong)
    m.check()
    m.end_step(number)
    m.check()


def test_a_grant_stores_what_kept_positions_its_last_grid_point_and_its_end_read() -> None:
    m = manager()
    handle = m.open(text(102), boundaries=[32])
    m.lookup(handle)
    assert m.need(handle, 102) == [7, 1 + 1 + 2]
    granted(m.allocate(handle, 102))
    assert paged(m, handle) == [
        7,
        23,
        24,
        25,
    ]  # before 32, before 96, and from 96 to the end at 102
    m.abort(handle)


def test_an_interval_stores_what_each_multiple_reads() -> None:
    m = manager(32)
    handle = m.open(text(70))
    m.lookup(handle)
    granted(m.allocate(handle, 64))
    assert paged(m, handle) == [7, 15]


def test_a_decoding_request_holds_the_last_grid_point_s_block_and_two_more() -> None:
    m = manager()
    handle = m.open(text(33), max_tokens=64)
    m.lookup(handle)
    step(m, handle, 33)
    for n in range(34, 48):
        m.extend(handle, [n])
        step(m, handle, 1)
        entry = n // 4
        assert paged(m, handle) == sorted(
            {7, entry - 1, entry} - ({entry} if n % 4 == 0 else set())
        )
        assert len(paged(m, handle)) <= GEOMETRY.pages_needed(64)[P] == 3
    m.finish(handle)
    assert hit(m, text(33)) == 32


def test_grid_points_whose_tokens_are_told_later_keep_what_they_read() -> None:
    m = manager()
    handle = m.open(text(10), max_tokens=100)
    m.lookup(handle)
    step(m, handle, 62)  # 52 tokens ahead of what is told: any of 16, 32, 48 may be the last
    assert paged(m, handle) == [3, 7, 11, 14, 15]
    m.extend(handle, text(30, 10))
    m.check()
    assert paged(m, handle) == [7, 11, 14, 15]  # 40 are told
    m.finish(handle)
    assert hit(m, [*text(40), 99]) == 32


def test_a_commit_may_leave_out_drafts_only_and_each_of_them() -> None:
    for wrong in range(6):
        m = manager()
        handle = m.open(text(30), max_tokens=60)
        m.lookup(handle)
        step(m, handle, 30, drafts=5, wrong=wrong)
        m.extend(handle, text(5 - wrong, 30))
        step(m, handle, 1)
        m.finish(handle)
        assert hit(m, [*text(35 - wrong), 99]) == (35 - wrong) // 16 * 16


def test_a_commit_inside_what_was_granted_for_sure_is_refused() -> None:
    m = manager()
    handle = m.open(text(30))
    m.lookup(handle)
    m.begin_step()
    granted(m.allocate(handle, 30))
    with pytest.raises(ConfigError, match="transient"):
        m.commit(handle, 29)


def test_a_grant_that_replaces_another_moves_its_pages() -> None:
    m = manager()
    handle = m.open(text(90))
    m.lookup(handle)
    granted(m.allocate(handle, 90))
    assert paged(m, handle) == [19, 21, 22]
    held = m.arena_stats().classes[GEOMETRY.class_of_group[P]].held
    assert m.need(handle, 42) == [0, 0]
    granted(m.allocate(handle, 42))
    assert paged(m, handle) == [7, 9, 10]
    assert m.arena_stats().classes[GEOMETRY.class_of_group[P]].held == held
    m.check()


def test_a_policy_that_names_a_position_too_late_gets_the_keys_that_are_there() -> None:
    m = manager()
    handle = m.open(text(40), max_tokens=60)
    m.lookup(handle)
    number = m.begin_step()
    m.commit(handle, granted(m.allocate(handle, 40)).end)
    m.retention = Sparse(16)
    m._retain(handle, plan_of(m.retention, m._shapes[handle]))  # as a lookup with a junction would
    m.end_step(number)
    m.check()
    m.finish(handle)
    assert hit(m, [*text(16), 99]) == 0
    assert hit(m, [*text(32), 99]) == 32


def test_of_blocks_of_one_token_a_decode_step_takes_what_need_tells() -> None:
    """Not every token gets a page: what the entry being pooled reads begins anew with each entry."""
    pool = PoolingState(name="p", layers=1, ratio=4, token_bytes=8, block_tokens=1)
    m = Manager(Geometry((attention("a", 16), pool)), slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(16), max_tokens=60)
    m.lookup(handle)
    step(m, handle, 16)
    taken = []
    for token in range(24):
        m.extend(handle, [token])
        before = sum(page >= 0 for page in m.block_table(handle, P))
        need = m.need(handle, 1)[P]
        number = m.begin_step()
        end = granted(m.allocate(handle, 1)).end
        assert sum(page >= 0 for page in m.block_table(handle, P)) == before + need
        taken.append(need)
        m.commit(handle, end)
        m.end_step(number)
        m.check()
    assert {0, 1} == set(taken)
