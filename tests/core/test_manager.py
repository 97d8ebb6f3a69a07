"""What the manager promises, one fact a test. The laws, under any order of calls: `tests/laws`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvcache import (
    CapacityError,
    ConfigError,
    Dense,
    FullAttention,
    Geometry,
    Manager,
    RecurrentState,
    Sparse,
)
from kvcache.core.hashing import Fingerprint, as_tokens, hash_chain, root_digest
from kvcache.core.manager import LOSS_CAUSES, UNLIMITED, Grant
from kvcache.core.retain import RetentionPolicy


def attention(name: str = "a", block_tokens: int = 4) -> FullAttention:
    return FullAttention(name=name, layers=1, kv_heads=1, head_dim=8, block_tokens=block_tokens)


FULL = Geometry((attention(),))
HYBRID = Geometry((attention(), RecurrentState(name="s", layers=1, state_bytes_per_layer=64)))
A, S = 0, 1
"""Groups of `HYBRID`."""


def full(pages: int = UNLIMITED) -> Manager:
    return Manager(FULL, pages=[pages], retention=Sparse())


def hybrid(
    retention: RetentionPolicy | None = None, *, pages: int = UNLIMITED, states: int = UNLIMITED
) -> Manager:
    return Manager(HYBRID, pages=[pages, states], retention=retention or Sparse())


def text(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def compute(m: Manager, handle: int, upto: int) -> None:
    """One step; looks the request up where it has no pages yet."""
    if m.info(handle).state == "waiting":
        m.lookup(handle)
        grant = m.allocate(handle, 0)
        assert grant
        assert not grant.load
    if upto > m.info(handle).committed:
        step = m.begin_step()
        assert m.allocate(handle, upto - m.info(handle).committed)
        m.commit(handle, upto)
        m.end_step(step)
    m.check()


def run(m: Manager, tokens: Sequence[int], **options: object) -> None:
    handle = m.open(tokens, **options)  # type: ignore[arg-type]
    compute(m, handle, len(tokens))
    m.finish(handle)
    m.check()


def hit(m: Manager, tokens: Sequence[int], **options: object) -> int:
    handle = m.open(tokens, **options)  # type: ignore[arg-type]
    found = m.lookup(handle).hit_tokens
    m.abort(handle)
    return found


def granted(grant: Grant | None) -> Grant:
    assert grant is not None
    return grant


# ---- opening and reading ----------------------------------------------------------------------------


def test_an_opened_request_waits_with_no_pages() -> None:
    m = full()
    handle = m.open(text(10), max_tokens=20)
    assert m.info(handle) == (10, 10, 0, 0, 0, 2, "waiting")
    assert m.block_table(handle, A).size == 0
    assert m.stats().open_requests == 1
    assert m.pool_stats(A).created == 0


def test_extend_hashes_only_what_became_full() -> None:
    m = full()
    handle = m.open(text(7), max_tokens=20)
    m.extend(handle, text(2, 7))
    assert (m.info(handle).tokens, m.info(handle).units) == (9, 2)
    m.extend(handle, [])
    m.extend(handle, text(3, 9))
    assert (m.info(handle).tokens, m.info(handle).prompt, m.info(handle).units) == (12, 7, 3)


def test_digests_are_the_chain_from_the_root_however_the_tokens_came() -> None:
    m = full()
    handle = m.open(text(7), max_tokens=30, salt="x", lora="y")
    for token in text(23, 7):
        m.extend(handle, [token])
    root = root_digest(Fingerprint(), hash_unit_tokens=4, salt="x", lora="y")
    assert np.array_equal(m.digests(handle), hash_chain(root, as_tokens(text(30)), 4))


def test_group_digests_are_every_last_link_of_a_block() -> None:
    geometry = Geometry(
        (attention("a", 2), attention("b", 4), attention("c", 6)), state_grid_tokens=1
    )
    m = Manager(geometry, pages=[UNLIMITED] * 3, retention=Sparse())
    handle = m.open(text(25))
    chain = m.digests(handle)
    assert [len(d) for d in m.group_digests(handle)] == [12, 6, 4]
    assert np.array_equal(m.group_digests(handle)[1], chain[1::2])
    assert np.array_equal(m.group_digests(handle)[2], chain[2::3])
    m.abort(handle)
    short = m.open([1])
    assert m.digests(short).shape == (0, 32)
    assert [len(d) for d in m.group_digests(short)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("pages", "steps"), [([4], 2), ([4, 0], 2), ([4, -2], 2), ([4, 2**31], 2), ([4, 4], 0)]
)
def test_a_manager_that_cannot_work_is_a_named_error(pages: list[int], steps: int) -> None:
    with pytest.raises(ConfigError):
        Manager(HYBRID, pages=pages, retention=Sparse(), max_open_steps=steps)


def test_a_policy_off_the_grid_is_refused_at_open_and_leaves_nothing_open() -> None:
    m = hybrid(Sparse(6))
    with pytest.raises(ConfigError, match=r"6.*4"):
        m.open(text(10))
    assert m.stats().open_requests == 0


def test_a_request_too_long_for_the_pool_is_refused_at_open_and_the_longest_is_not() -> None:
    m = hybrid(pages=3, states=2)
    with pytest.raises(CapacityError, match="13"):
        m.open(text(4), max_tokens=13)
    m.open(text(4), max_tokens=12)
    with pytest.raises(CapacityError):
        hybrid(pages=3, states=1).open(text(4))


# ---- hits ------------------------------------------------------------------------------------------


def test_a_finished_prompt_is_a_hit_up_to_its_last_whole_block() -> None:
    m = full()
    run(m, text(12))
    assert hit(m, text(12)) == 8  # the last token is always recomputed
    assert hit(m, text(13)) == 12
    assert hit(m, text(40)) == 12
    assert hit(m, [*text(6), 99, *text(20)]) == 4
    assert hit(m, text(4)) == 0


def test_a_hit_needs_a_state_at_exactly_its_end() -> None:
    m = hybrid()
    run(m, text(14), boundaries=[5])  # states 4 (boundary), 12 (replay)
    assert hit(m, text(14)) == 12
    assert hit(m, text(12)) == 4  # attention has 8, state 8 was not kept
    assert hit(m, [*text(10), 99]) == 4


def test_hits_end_on_the_grid_of_all_attention_groups() -> None:
    geometry = Geometry((attention("a", 4), attention("b", 6)))
    m = Manager(geometry, pages=[UNLIMITED] * 2, retention=Sparse())
    assert (geometry.hash_unit_tokens, geometry.grid_tokens) == (2, 12)
    run(m, text(40))
    assert hit(m, text(36)) == 24
    assert hit(m, text(37)) == 36


def test_the_hit_grid_does_not_depend_on_the_size_of_a_state() -> None:
    for state_bytes in (1, 10**9):
        state = RecurrentState(name="s", layers=8, state_bytes_per_layer=state_bytes)
        m = Manager(Geometry((attention(), state)), pages=[64, 8], retention=Sparse())
        run(m, text(17))
        assert hit(m, text(17)) == 16


@pytest.mark.parametrize("other", [{"salt": "x"}, {"lora": "x"}, {"salt": "x", "lora": "y"}])
def test_salt_and_lora_separate_prefixes(other: dict[str, str]) -> None:
    m = hybrid()
    run(m, text(12))
    assert hit(m, text(12), **other) == 0
    run(m, text(12), **other)
    assert hit(m, text(12), **other) == 8


def test_a_fingerprint_separates_models() -> None:
    keys = []
    for model in ("m", "n"):
        m = Manager(FULL, pages=[8], retention=Sparse(), fingerprint=Fingerprint(model=model))
        handle = m.open(text(4))
        keys.append(bytes(m.digests(handle)[0]))
    assert keys[0] != keys[1]


# ---- why tokens were lost --------------------------------------------------------------------------


def lost(m: Manager, tokens: Sequence[int]) -> dict[str, int]:
    handle = m.open(tokens)
    found = m.lookup(handle)
    m.abort(handle)
    assert set(found.lost) == set(LOSS_CAUSES)
    assert found.hit_tokens + sum(found.lost.values()) == len(tokens)
    return {cause: n for cause, n in found.lost.items() if n}


def test_a_cold_prompt_is_not_stored_and_its_last_unit_is_the_last_block_rule() -> None:
    assert lost(full(), text(12)) == {"not_stored": 8, "last_block": 4}
    assert lost(full(), text(13)) == {"not_stored": 12, "last_block": 1}


def test_tokens_without_a_state_are_no_state_and_name_the_junction() -> None:
    m = hybrid()
    run(m, text(21))
    assert lost(m, [*text(14), 99]) == {"no_state": 12, "last_block": 3}
    handle = m.open([*text(14), 99])
    assert m.lookup(handle).junction == 12


def test_evicted_tokens_are_reported_as_evicted() -> None:
    m = full(4)
    run(m, text(13))
    run(m, text(16, 100))
    assert lost(m, text(13)) == {"evicted": 12, "last_block": 1}


def test_tokens_of_an_open_step_are_pending() -> None:
    m = full()
    handle = m.open(text(12))
    step = m.begin_step()
    m.lookup(handle)
    m.allocate(handle, 12)
    m.commit(handle, 12)
    assert lost(m, text(17)) == {"pending": 12, "not_stored": 4, "last_block": 1}
    m.end_step(step)
    assert lost(m, text(17)) == {"not_stored": 4, "last_block": 1}


# ---- allocation ------------------------------------------------------------------------------------


def test_a_first_grant_starts_at_the_hit_and_shares_its_pages() -> None:
    m = full()
    run(m, text(12))
    one, two = m.open(text(14)), m.open(text(14))
    for handle in (one, two):
        m.lookup(handle)
        grant = granted(m.allocate(handle, 2))
        assert grant == (12, 12, 14, 0, 0)
    assert m.block_table(one, A)[:3].tolist() == m.block_table(two, A)[:3].tolist()
    assert m.block_table(one, A)[3] != m.block_table(two, A)[3]
    assert m.pool_stats(A).held == 5


def test_a_later_grant_goes_on_from_what_is_committed() -> None:
    m = full()
    handle = m.open(text(14))
    compute(m, handle, 5)
    assert granted(m.allocate(handle, 4)) == (0, 5, 9, 0, 0)
    assert granted(m.allocate(handle, 9)) == (0, 5, 14, 0, 0)  # replaces the grant


def test_attention_alone_may_commit_a_part_of_its_grant() -> None:
    m = full()
    handle = m.open(text(14))
    m.lookup(handle)
    step = m.begin_step()
    m.allocate(handle, 14)
    m.commit(handle, 6)
    m.end_step(step)
    assert m.info(handle)[2:5] == (6, 6, 14)
    assert hit(m, text(9)) == 4
    assert granted(m.allocate(handle, 2)).start == 6


def test_no_space_changes_nothing() -> None:
    m = hybrid(pages=4, states=4)
    run(m, text(9))
    first, second = m.open(text(12, 50)), m.open(text(12))
    compute(m, first, 12)
    before = (m.pool_stats(A), m.pool_stats(S), m.info(second), m.lookup(second))
    assert m.allocate(second, 8) is None  # two blocks, and only one page is left
    assert (m.pool_stats(A), m.pool_stats(S), m.info(second), m.lookup(second)) == before
    m.finish(first)
    assert m.allocate(second, 8)
    m.check()


def test_an_allocation_never_evicts_the_hit_that_it_adopts() -> None:
    m = full(4)
    run(m, text(12))  # the oldest cached pages are this prompt's
    handle = m.open(text(16))
    assert m.lookup(handle).hit_tokens == 12
    assert granted(m.allocate(handle, 4)).hit_tokens == 12
    assert len(set(m.block_table(handle, A).tolist())) == 4


def test_an_allocation_without_a_lookup_adopts_nothing() -> None:
    m = full()
    run(m, text(12))
    assert granted(m.allocate(m.open(text(12)), 12)) == (0, 0, 12, 0, 0)


def test_a_hit_that_shrank_since_the_lookup_is_looked_up_again() -> None:
    m = full(4)
    run(m, text(12))
    handle, other = m.open(text(16)), m.open(text(8, 50))
    assert m.lookup(handle).hit_tokens == 12
    compute(m, other, 8)
    m.finish(other)
    assert granted(m.allocate(handle, 4)).hit_tokens == 8


def test_need_counts_new_pages_only() -> None:
    m = hybrid()
    run(m, text(12))
    handle = m.open(text(24))
    assert m.lookup(handle).hit_tokens == 12
    assert m.need(handle, 0) == [0, 0]
    assert m.need(handle, 4) == [1, 1]  # states: 16 is a stop and the end
    assert m.need(handle, 12) == [3, 2]  # states: the replay boundary 20, and 24
    assert m.need(handle, 11) == [3, 2]  # states: 20, and the working state after 23
    m.allocate(handle, 11)
    assert m.need(handle, 11) == [0, 0]


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
    m = hybrid(states=2)
    handle = m.open(text(9), max_tokens=40)
    for position in range(9, 40):
        compute(m, handle, position)
        m.extend(handle, [position])
        assert m.pool_stats(S).held <= 2
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
    m = hybrid(states=4)
    run(m, text(9, 50))  # state 8, older in time
    handle = m.open(text(9), max_tokens=16)
    compute(m, handle, 9)  # replay boundary 8
    m.extend(handle, text(7, 9))
    compute(m, handle, 16)  # 16 supersedes 8
    m.finish(handle)
    run(m, text(5, 90))  # two states: a page that is new, and one victim
    assert hit(m, text(9, 50)) == 8
    assert hit(m, text(17)) == 16
    assert hit(m, text(9)) == 0


def test_a_declared_state_keeps_its_place_when_superseded() -> None:
    m = hybrid(states=4)
    run(m, text(9, 50))
    handle = m.open(text(9), max_tokens=16, boundaries=[8])
    compute(m, handle, 9)
    m.extend(handle, text(7, 9))
    compute(m, handle, 16)
    m.finish(handle)
    run(m, text(5, 90))
    assert hit(m, text(9)) == 8
    assert hit(m, text(9, 50)) == 0  # the oldest of equals goes first


# ---- steps -----------------------------------------------------------------------------------------


def test_pages_freed_under_an_open_step_are_free_when_it_ends() -> None:
    m = full(4)
    handle = m.open(text(16))
    m.lookup(handle)
    step = m.begin_step()
    m.allocate(handle, 16)
    m.commit(handle, 16)
    m.abort(handle)
    assert m.pool_stats(A)[2:5] == (0, 0, 4)  # free, cached, held
    waiting = m.open(text(4, 50))
    m.lookup(waiting)
    assert m.allocate(waiting, 4) is None
    m.end_step(step)
    assert m.pool_stats(A)[2:5] == (4, 0, 0)
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
    assert m.pool_stats(A).held == 4
    m.end_step(second)
    assert m.pool_stats(A)[2:5] == (2, 2, 0)
    assert hit(m, text(17)) == 8  # what the second step wrote was dropped


def test_a_request_in_no_open_step_frees_its_pages_at_once() -> None:
    m = full()
    handle = m.open(text(8))
    compute(m, handle, 8)
    m.begin_step()
    m.finish(handle)
    assert m.pool_stats(A)[2:5] == (0, 2, 0)


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
    assert m.pool_stats(A)[2:5] == (2, 2, 0)
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
    assert m.info(handle)[2:] == (0, 0, 0, 7, "waiting")
    assert m.lookup(handle).hit_tokens == 12
    assert granted(m.allocate(handle, 18)).start == 12


# ---- tiers -----------------------------------------------------------------------------------------


def all_present(m: Manager, tokens: int) -> list[np.ndarray]:
    return [np.ones(tokens // b, np.uint8) for b in m.geometry.block_tokens]


def test_a_hit_in_a_tier_is_granted_as_a_load() -> None:
    m = hybrid()
    handle = m.open(text(14))
    found = m.lookup(handle, all_present(m, 14))
    assert (found.hit_tokens, found.device_tokens) == (12, 0)
    grant = granted(m.allocate(handle, 2))
    assert grant[:3] == (12, 12, 12)
    assert grant.load > 0
    assert grant.load_pages == 4
    assert m.info(handle).state == "loading"
    items = m.load_items(grant.load)
    chain = m.digests(handle)
    assert items["group"].tolist() == [A, A, A, S]
    assert items["end"].tolist() == [4, 8, 12, 12]
    assert items["page"][:3].tolist() == m.block_table(handle, A).tolist()
    assert [bytes(d) for d in items["digest"]] == [bytes(chain[i]) for i in (0, 1, 2, 2)]
    m.end_load(grant.load, np.ones(4, np.uint8))
    assert m.info(handle)[2:] == (12, 12, 12, 3, "running")
    assert m.state_plan(handle, S).positions.size == 0
    assert granted(m.allocate(handle, 2)) == (0, 12, 14, 0, 0)
    assert m.state_plan(handle, S).source == items["page"][3]
    assert hit(m, text(14)) == 12


def test_a_load_takes_only_what_the_device_lacks() -> None:
    m = hybrid()
    run(m, text(9))  # blocks 4, 8; state 8
    handle = m.open(text(14))
    assert m.lookup(handle, all_present(m, 14))[:2] == (12, 8)
    grant = granted(m.allocate(handle, 2))
    assert m.load_items(grant.load)["end"].tolist() == [12, 12]


def test_a_failed_part_of_a_load_shortens_the_prefix_exactly() -> None:
    m = full()
    handle = m.open(text(17))
    m.lookup(handle, all_present(m, 17))
    grant = granted(m.allocate(handle, 1))
    m.end_load(grant.load, np.array([1, 1, 0, 1], np.uint8))
    assert m.info(handle).state == "waiting"
    assert m.lookup(handle).hit_tokens == 8
    assert m.pool_stats(A)[2:5] == (
        1,
        3,
        0,
    )  # block 16 is there too: a later load need not fetch it
    m.check()


def test_a_twin_sees_a_load_in_flight_as_pending() -> None:
    m = hybrid()
    handle = m.open(text(14))
    m.lookup(handle, all_present(m, 14))
    grant = granted(m.allocate(handle, 2))
    twin = m.open(text(14))
    found = m.lookup(twin)
    assert (found.hit_tokens, found.pending_tokens, found.lost["pending"]) == (0, 12, 12)
    m.end_load(grant.load, np.ones(4, np.uint8))
    assert m.lookup(twin).hit_tokens == 12


def test_an_abandoned_load_keeps_its_pages_out_of_use_until_it_ends() -> None:
    m = full(4)
    handle = m.open(text(13))
    m.lookup(handle, all_present(m, 13))
    grant = granted(m.allocate(handle, 1))
    m.abandon_load(grant.load)
    assert m.info(handle).state == "waiting"
    found = m.lookup(handle)
    assert (found.hit_tokens, found.pending_tokens) == (0, 0)
    assert m.allocate(handle, 13) is None  # 3 of 4 pages are in quarantine
    assert m.pool_stats(A).held == 3
    m.end_load(grant.load, np.zeros(3, np.uint8))
    assert m.pool_stats(A).held == 0
    assert m.allocate(handle, 13)
    m.check()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_request_that_leaves_during_its_load_leaves_the_pages_to_the_load(end: str) -> None:
    m = hybrid()
    handle = m.open(text(14))
    m.lookup(handle, all_present(m, 14))
    grant = granted(m.allocate(handle, 2))
    getattr(m, end)(handle)
    assert [m.pool_stats(g).held for g in (A, S)] == [3, 1]
    assert m.stats().open_loads == 1
    m.end_load(grant.load, np.zeros(4, np.uint8))
    assert [m.pool_stats(g).held for g in (A, S)] == [0, 0]
    assert hit(m, text(14)) == 0
    m.check()


def test_take_keyed_gives_each_new_key_once_with_its_writer() -> None:
    m = hybrid()
    handle = m.open(text(9), max_tokens=10)
    compute(m, handle, 9)
    items = m.take_keyed()
    assert sorted(zip(items["group"].tolist(), items["end"].tolist(), strict=True)) == [
        (A, 4),
        (A, 8),
        (S, 8),
    ]
    assert items["handle"].tolist() == [handle] * 3
    for item in items:
        key = bytes(item["digest"])
        assert m.find_key(int(item["group"]), key) == item["page"]
        assert key == bytes(m.digests(handle)[int(item["end"]) // 4 - 1])
    assert len(m.take_keyed()) == 0


def test_take_keyed_is_bounded_and_counts_what_it_dropped() -> None:
    m = full(4)
    for i in range(100):
        run(m, text(16, 100 * i))
    kept = len(m.take_keyed())
    assert kept <= max(64, 2 * 4)
    assert m.stats().keyed_dropped == 400 - kept


def test_a_pinned_page_is_not_evicted_until_its_last_pin_ends() -> None:
    m = full(2)
    run(m, text(4))
    items = m.take_keyed()
    assert m.pin(items).tolist() == [1]
    assert m.pin(items).tolist() == [1]
    assert m.stats().pinned == 2
    m.unpin(A, items["page"])
    other = m.open(text(8, 50))
    m.lookup(other)
    assert m.allocate(other, 8) is None
    m.unpin(A, items["page"])
    assert m.allocate(other, 8)
    assert m.stats().pinned == 0
    m.check()


def test_a_page_that_has_another_key_by_now_is_not_pinned() -> None:
    m = full(1)
    run(m, text(4))
    items = m.take_keyed()
    run(m, text(4, 50))
    assert m.pin(items).tolist() == [0]
    assert m.stats().pinned == 0


# ---- foreign keys ----------------------------------------------------------------------------------


def foreign(m: Manager, keys: np.ndarray, tokens: int, **options: object) -> int:
    return m.open_foreign(keys, prompt_tokens=tokens, **options)  # type: ignore[arg-type]


def numbers(n: int) -> np.ndarray:
    """Digests as regular as a trace may have: 1, 2, 3."""
    keys = np.zeros((n, 32), np.uint8)
    keys[:, 0] = np.arange(1, n + 1)
    return keys


def test_foreign_keys_hit_each_other_and_are_never_rehashed() -> None:
    m = hybrid()
    handle = foreign(m, numbers(3), 13)
    compute(m, handle, 13)
    assert np.array_equal(m.digests(handle), numbers(3))
    m.finish(handle)
    assert m.lookup(foreign(m, numbers(5), 21)).hit_tokens == 12
    assert m.lookup(foreign(m, numbers(6)[3:], 13)).hit_tokens == 0


def test_foreign_and_native_keys_never_mix() -> None:
    m = full()
    native = m.open(text(12))
    digests = m.digests(native).copy()
    compute(m, native, 12)
    assert m.lookup(foreign(m, digests, 12)).hit_tokens == 0
    assert m.find_key(A, bytes(digests[0])) >= 0
    assert m.find_key(A, bytes(digests[0]), namespace=m.namespaces[1]) == -1
    assert m.find_key(A, bytes(digests[0]), namespace=b"?" * 32) == -1


def test_foreign_namespaces_separate_salts() -> None:
    m = full()
    handle = foreign(m, numbers(3), 12, salt="a")
    compute(m, handle, 12)
    assert m.lookup(foreign(m, numbers(3), 12, salt="b")).hit_tokens == 0
    assert m.lookup(foreign(m, numbers(3), 12, salt="a")).hit_tokens == 8
    assert len(m.namespaces) == 3


def test_foreign_requests_have_no_keys_beyond_the_prompt() -> None:
    m = hybrid()
    handle = foreign(m, numbers(2), 9, max_tokens=20)
    m.extend_foreign(handle, 11)
    compute(m, handle, 20)
    assert [m.pool_stats(g).keyed for g in (A, S)] == [2, 1]
    m.finish(handle)
    assert [m.pool_stats(g).keyed for g in (A, S)] == [2, 1]


# ---- the whole -------------------------------------------------------------------------------------


def test_ten_thousand_random_steps_leak_no_page() -> None:
    rng = random.Random(1)
    m = hybrid(Sparse(8), pages=24, states=12)
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
    assert [m.pool_stats(g).held for g in (A, S)] == [0, 0]
    assert m.pool_stats(A).evictions > 1000
