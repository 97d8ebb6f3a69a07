"""Opening, lookup and allocation, one fact a test. The laws: `tests/laws`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from core.managing import (
    FULL,
    HYBRID,
    A,
    attention,
    compute,
    full,
    granted,
    held,
    hit,
    hybrid,
    run,
    text,
)

from kvcache import CapacityError, ConfigError, Geometry, Manager, RecurrentState, Sparse
from kvcache.core.hashing import Fingerprint, as_tokens, hash_chain, root_digest
from kvcache.core.records import LOSS_CAUSES, UNLIMITED

# ---- opening and reading ----------------------------------------------------------------------------


def test_an_opened_request_waits_with_no_pages() -> None:
    m = full()
    handle = m.open(text(10), max_tokens=20)
    assert m.info(handle) == (10, 10, 0, 0, 0, 2, "waiting", bytes(32), 0)
    assert m.block_table(handle, A).size == 0
    assert m.stats().open_requests == 1
    assert m.arena_stats().created == 0


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
    m = Manager(geometry, slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(25))
    chain = m.digests(handle)
    assert [len(d) for d in m.group_digests(handle)] == [12, 6, 4]
    assert np.array_equal(m.group_digests(handle)[1], chain[1::2])
    assert np.array_equal(m.group_digests(handle)[2], chain[2::3])
    m.abort(handle)
    short = m.open([1])
    assert m.digests(short).shape == (0, 32)
    assert [len(d) for d in m.group_digests(short)] == [0, 0, 0]


@pytest.mark.parametrize(("slabs", "steps"), [(0, 2), (-2, 2), (2**31, 2), (4.5, 2), (4, 0)])
def test_a_manager_that_cannot_work_is_a_named_error(slabs: int, steps: int) -> None:
    with pytest.raises(ConfigError):
        Manager(HYBRID, slabs=slabs, retention=Sparse(), max_open_steps=steps)


def test_a_chain_that_is_read_as_it_grows_is_copied_now_and_then() -> None:
    m = full()
    handle = m.open(text(9), max_tokens=4096)
    read = [m.digests(handle)]
    for first in range(9, 4096):
        m.extend(handle, [first])
        if first % 4 == 0:
            read.append(m.digests(handle))
    whole = hash_chain(m._namespaces.entries[0].root, as_tokens(text(4096)), 4)
    assert len(read[-1]) == 1023
    for chain in read:
        assert np.array_equal(chain, whole[: len(chain)])
        assert not chain.flags.writeable
    copies = sum(not np.shares_memory(a[:1], b[:1]) for a, b in pairwise(read))
    assert copies <= 10
    assert np.shares_memory(m.digests(handle), m.digests(handle))


def test_a_policy_off_the_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"6.*4"):
        hybrid(Sparse(6))


def test_a_request_too_long_for_the_arena_is_refused_at_open_and_the_longest_is_not() -> None:
    m = hybrid(slabs=5)
    with pytest.raises(CapacityError, match="13"):
        m.open(text(4), max_tokens=13)
    m.open(text(4), max_tokens=12)
    with pytest.raises(CapacityError):
        hybrid(slabs=2).open(text(4))


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
    m = Manager(geometry, slabs=UNLIMITED, retention=Sparse())
    assert (geometry.hash_unit_tokens, geometry.grid_tokens) == (2, 12)
    run(m, text(40))
    assert hit(m, text(36)) == 24
    assert hit(m, text(37)) == 36


def test_the_hit_grid_does_not_depend_on_the_size_of_a_state() -> None:
    for state_bytes in (1, 100_000):
        state = RecurrentState(name="s", layers=8, state_bytes_per_layer=state_bytes)
        m = Manager(Geometry((attention(), state)), slabs=8, retention=Sparse())
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
        m = Manager(FULL, slabs=8, retention=Sparse(), fingerprint=Fingerprint(model=model))
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
    assert held(m) == 5


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
    m = hybrid(slabs=8)
    run(m, text(9))
    first, second = m.open(text(12, 50)), m.open(text(12))
    compute(m, first, 12)
    before = (m.arena_stats(), m.info(second), m.lookup(second))
    assert m.allocate(second, 4) is None  # a block and a state, and one page is left
    assert (m.arena_stats(), m.info(second), m.lookup(second)) == before
    m.finish(first)
    assert m.allocate(second, 4)
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


def test_a_hit_that_grew_since_the_lookup_is_granted_as_it_was_looked_up() -> None:
    m = full()
    first, second = m.open(text(19)), m.open(text(19))
    compute(m, first, 9)
    assert m.lookup(second).hit_tokens == 8
    compute(m, first, 19)
    assert granted(m.allocate(second, 11))[:3] == (8, 8, 19)
    m.preempt(second)
    assert m.lookup(second).hit_tokens == 16


def test_a_hit_that_an_open_step_evicted_is_looked_up_again() -> None:
    m = full(4)
    run(m, text(12))
    handle, other = m.open(text(16)), m.open(text(8, 50))
    assert m.lookup(handle).hit_tokens == 12
    assert m.allocate(other, 8)  # evicts block 12 and gives nobody a key
    assert m.allocate(handle, 8) is None
    m.abort(other)
    assert granted(m.allocate(handle, 8)).hit_tokens == 8


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
