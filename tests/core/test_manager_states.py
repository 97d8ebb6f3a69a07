"""Recurrent states: where they are taken and kept, and what is evicted first."""

from __future__ import annotations

import pytest
from core.managing import HYBRID, S, compute, full, granted, held, hit, hybrid, run, text

from kvcache import Dense, Manager, Sparse
from kvcache.core.errors import MisuseError
from kvcache.core.records import KEYED_DTYPE

# ---- states ----------------------------------------------------------------------------------------


def test_stops_are_what_the_policy_keeps_and_the_last_grid_point() -> None:
    m = hybrid(Sparse(8))
    handle = m.open(text(23), boundaries=[13])
    assert m.stops(handle, 0, 23) == [8, 12, 16, 20]
    assert m.stops(handle, 8, 11) == []
    assert m.stops(handle, 3, 7) == [4]
    attention_only = full()
    assert attention_only.stops(attention_only.open(text(9)), 0, 9) == []


def test_a_plan_starts_from_the_zero_state_and_snapshots_at_each_stop() -> None:
    m = hybrid()
    handle = m.open(text(14), boundaries=[4])
    m.lookup(handle)
    m.allocate(handle, 14)
    plan = m.state_plan(handle, S)
    assert plan.source == -1
    assert plan.positions.tolist() == [4, 12, 14]
    assert len(set(plan.pages.tolist())) == 3


def test_decoding_updates_the_working_state_in_place_until_the_grid() -> None:
    m = hybrid()
    handle = m.open(text(8), max_tokens=20)
    compute(m, handle, 8)
    pages = []
    for position in range(9, 15):
        m.extend(handle, [position])
        compute(m, handle, position)
        plan = m.state_plan(handle, S)
        assert plan.positions.tolist() == [position]
        pages.append((plan.source, int(plan.pages[0])))
    first, second = pages[0][1], pages[4][1]
    assert first != pages[0][0]  # the snapshot at 8 is not written again
    assert pages[1:4] == [(first, first)] * 3  # 10, 11, 12 in place; 12 is frozen then
    assert pages[4] == (first, second)
    assert second != first
    assert pages[5] == (second, second)


def test_an_adopted_state_is_read_and_never_written() -> None:
    m = hybrid()
    run(m, text(9))
    key = m.open(text(8))
    state = m.find_key(S, bytes(m.digests(key)[1]))
    handle = m.open(text(20))
    m.lookup(handle)
    m.allocate(handle, 12)
    plan = m.state_plan(handle, S)
    assert plan.source == state
    assert state not in plan.pages


def test_a_decoding_request_holds_two_state_pages() -> None:
    m = hybrid(slabs=13)
    handle = m.open(text(9), max_tokens=40)
    for position in range(9, 40):
        compute(m, handle, position)
        m.extend(handle, [position])
        assert held(m) <= -(-position // 4) + 2
    m.finish(handle)
    assert hit(m, text(41)) == 36


def test_a_junction_of_a_lookup_is_kept_for_the_next_request() -> None:
    m = hybrid()
    shared = text(14)
    run(m, [*shared, 100])
    run(m, [*shared[:9], 200, 201, 202, 203, 204])  # attention goes on to 8: a state there, please
    assert hit(m, [*shared[:9], 300]) == 8


def test_a_declared_boundary_is_a_hit_on_the_second_sighting() -> None:
    m = hybrid()
    run(m, [*text(9), 100, 101, 102, 103, 104], boundaries=[9])
    assert hit(m, [*text(9), 200, 201, 202]) == 8


def test_dense_keeps_every_grid_point() -> None:
    m = hybrid(Dense())
    run(m, text(30))
    assert [hit(m, [*text(n), 99]) for n in range(4, 30, 4)] == [4, 8, 12, 16, 20, 24, 28]


# ---- eviction order --------------------------------------------------------------------------------


def test_freed_blocks_are_reused_lru_first() -> None:
    m = full(4)
    run(m, text(8))
    run(m, text(8, 50))
    run(m, text(4, 90))  # evicts one block, of the first prompt
    assert (hit(m, text(9)), hit(m, text(9, 50))) == (4, 8)


def test_within_a_request_the_tail_is_evicted_before_the_head() -> None:
    m = full(5)
    run(m, text(16))
    for evicted in (0, 1, 2, 3):
        run(m, text(4, 100 + 4 * evicted))
        assert hit(m, text(17)) == 16 - 4 * evicted


def test_a_hit_makes_a_prefix_recently_used() -> None:
    m = full(4)
    run(m, text(8))
    run(m, text(8, 50))
    run(m, text(8))
    run(m, text(4, 90))
    assert (hit(m, text(9)), hit(m, text(9, 50))) == (8, 4)


def test_pages_without_key_are_reused_before_any_key_is_evicted() -> None:
    m = full(4)
    run(m, text(8))
    run(m, text(7, 50))  # its second page has no key
    run(m, text(4, 90))
    assert (hit(m, text(9)), hit(m, text(7, 50))) == (8, 4)


def test_superseded_undeclared_states_are_the_first_victims() -> None:
    m = hybrid(slabs=12)
    run(m, text(9, 50))  # state 8, older in time
    handle = m.open(text(9), max_tokens=16)
    compute(m, handle, 9)  # replay boundary 8
    m.extend(handle, text(7, 9))
    compute(m, handle, 16)  # 16 supersedes 8
    m.finish(handle)
    run(m, text(5, 90))  # two blocks and two states: three free pages, and one victim
    assert hit(m, text(9, 50)) == 8
    assert hit(m, text(17)) == 16
    assert hit(m, text(9)) == 0


def test_a_declared_state_keeps_its_place_when_superseded() -> None:
    m = hybrid(slabs=12)
    run(m, text(9, 50))
    handle = m.open(text(9), max_tokens=16, boundaries=[8])
    compute(m, handle, 9)
    m.extend(handle, text(7, 9))
    compute(m, handle, 16)
    m.finish(handle)
    run(m, text(5, 90))
    assert hit(m, text(9)) == 8
    assert hit(m, text(9, 50)) == 0  # the oldest of equals goes first


def test_a_state_declared_by_the_request_that_hits_it_keeps_its_place() -> None:
    m = hybrid(slabs=11)
    run(m, text(9))  # leaves the state at 8, not declared
    run(m, text(5, 100))  # an unrelated, younger state
    handle = m.open(text(17), boundaries=[8])
    compute(m, handle, 17)  # adopts 8, which it declares, and goes on to 16
    m.finish(handle)
    run(m, text(5, 200))  # needs room: the oldest state that nobody declared goes
    assert hit(m, text(9)) == 8
    assert hit(m, text(5, 100)) == 0


def test_states_of_an_interval_are_not_declared() -> None:
    m = hybrid(Sparse(4), slabs=9)
    run(m, text(13))  # states at 4 and 8 are superseded by 12
    run(m, text(5, 100))
    assert [hit(m, [*text(n), 99]) for n in (4, 8, 12)] == [0, 8, 12]


def test_a_lone_request_gets_on_in_the_smallest_arena_whatever_it_keeps() -> None:
    m = hybrid(Dense(), slabs=HYBRID.slabs_needed(40))
    for _ in range(2):
        handle = m.open(text(30), max_tokens=40)
        done = m.lookup(handle).hit_tokens
        while done < 30:
            step = m.begin_step()
            grant = m.allocate(handle, 30 - done)
            assert grant is not None
            assert grant.end > done
            m.commit(handle, grant.end)
            m.end_step(step)
            m.check()
            done = grant.end
        m.finish(handle)
    assert m.arena_stats().created == 12


def test_a_shorter_grant_gives_back_what_a_longer_one_took() -> None:
    m = hybrid(slabs=16)
    handle = m.open(text(40))
    m.lookup(handle)
    assert granted(m.allocate(handle, 40)).end == 40
    assert held(m) == 12
    assert granted(m.allocate(handle, 3)).end == 3
    assert held(m) == 2
    other = m.open(text(36, 500))
    m.lookup(other)
    assert m.allocate(other, 36) is not None
    m.check()


def test_without_a_journal_no_key_is_remembered() -> None:
    m = Manager(HYBRID, slabs=16, retention=Sparse(), journal=False)
    run(m, text(9))
    assert not m.keeps_journal
    with pytest.raises(MisuseError, match="journal=True"):
        m.take_keyed()
    assert len(m._read(KEYED_DTYPE, m._lib.kvc_take_keyed)) == 0
    assert hit(m, text(9)) == 8


def test_every_grid_point_among_guesses_may_be_the_last_that_stands() -> None:
    m = hybrid()
    handle = m.open(text(28), max_tokens=60)
    compute(m, handle, 28)
    m.extend(handle, [28])
    step = m.begin_step()
    assert m.allocate(handle, 1, drafts=7)  # up to 36: past the grid points 32 and 36
    m.commit(handle, 34)
    m.extend(handle, text(5, 29))
    m.end_step(step)
    m.check()
    m.abort(handle)
    assert hit(m, text(40)) == 32
