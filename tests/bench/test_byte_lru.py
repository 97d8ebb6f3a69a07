"""The byte LRU against hand-made examples, a naive LRU, and the manager itself."""

from __future__ import annotations

import pytest
from replays.naive import BLOCK, naive_lru, naive_states, random_trace, serve_all

from kvcache.bench.byte_lru import ByteLru, PageSizes
from kvcache.bench.replay_settings import STEP_TOKENS, ReplaySettings
from kvcache.core.errors import CapacityError
from kvcache.core.layout import Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.retention import Dense, Sparse

KV, STATE = 10, 25
"""Bytes of a block and of a state in the hand-made examples, whose blocks have 4 tokens."""


def small(capacity: int | None = None, policy: RetentionPolicy | None = None) -> ByteLru:
    """Blocks of 4 tokens, steps of 8."""
    return ByteLru(
        PageSizes(4, KV, STATE),
        capacity_bytes=capacity,
        policy=Sparse(0) if policy is None else policy,
        step_tokens=8,
    )


def keys(cache: ByteLru) -> tuple[list[int], list[int]]:
    """Victims and the rest, each oldest first."""
    return list(cache.victims), list(cache.lru)


# ---- the rules, one by one -----------------------------------------------------------------------


def test_a_request_goes_back_tail_first_and_its_state_before_the_block_it_ends_with() -> None:
    cache = small()
    assert cache.serve([0, 1, 2], 13, 0) == 0
    assert keys(cache) == ([], [~2, 2, 1, 0])


def test_the_end_of_a_turn_supersedes_the_replay_boundary() -> None:
    cache = small()
    cache.serve([0, 1, 2], 12, 1)  # replay boundary at 8, end of turn at 12
    assert keys(cache) == ([~1], [~2, 2, 1, 0])


def test_a_next_turn_hits_the_last_one_and_supersedes_its_state() -> None:
    cache = small()
    cache.serve([0, 1], 9, 5)
    assert cache.serve([0, 1, 2, 3], 17, 5) == 8
    assert keys(cache) == ([~1], [~3, 3, 2, 1, 0])


def test_a_state_that_served_two_requests_keeps_its_place() -> None:
    cache = small()
    cache.serve([0, 1], 9, 0)
    assert cache.serve([0, 1, 2], 13, 0) == 8
    assert cache.serve([0, 1, 3], 13, 0) == 8
    assert keys(cache) == ([], [~2, 2, ~1, ~3, 3, 1, 0])


def test_a_junction_is_written_and_kept() -> None:
    cache = small()
    cache.serve([0, 1, 2, 3], 17, 0)
    assert cache.serve([0, 1, 4, 5], 17, 0) == 0
    assert ~1 in cache.kept
    assert keys(cache)[0] == []
    assert keys(cache)[1] == [~3, 3, 2, ~5, 5, 4, ~1, 1, 0]
    assert cache.serve([0, 1, 6], 13, 0) == 8


def test_states_of_an_interval_are_written_and_superseded() -> None:
    cache = small(policy=Sparse(8))
    cache.serve([0, 1, 2, 3, 4], 21, 0)
    assert keys(cache) == ([~1, ~3], [~4, 4, 3, 2, 1, 0])


def test_every_block_has_a_state_under_dense_retention() -> None:
    cache = small(policy=Dense())
    cache.serve([0, 1, 2], 13, 0)
    assert keys(cache) == ([~0, ~1], [~2, 2, 1, 0])


def test_victims_go_first_then_the_oldest_of_any_size() -> None:
    cache = small(capacity=5 * KV + 4 * STATE)
    cache.serve([0, 1], 8, 0)  # the state after 4 tokens is superseded
    cache.serve([2, 3], 9, 0)
    assert keys(cache) == ([~0], [~1, 1, 0, ~3, 3, 2])  # 4 KV + 3 STATE
    cache.serve([4], 5, 0)  # takes two blocks, a state, and a working state
    assert keys(cache) == ([], [1, 0, ~3, 3, 2, ~4, 4])


def test_blocks_give_way_to_states_and_states_to_blocks() -> None:
    cache = small(capacity=5 * KV + 2 * STATE)
    cache.serve([0, 1], 9, 0)
    cache.serve([2, 3], 9, 0)
    assert keys(cache) == ([], [1, 0, ~3, 3, 2])
    cache.serve([4], 5, 0)
    assert keys(cache) == ([], [3, 2, ~4, 4])


def test_what_a_request_holds_must_fit() -> None:
    with pytest.raises(CapacityError, match="raise --pool-tokens"):
        small(capacity=2 * KV + STATE).serve([0, 1, 2], 13, 0)


# ---- against a naive LRU, and a naive infinite cache ---------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_attention_alone_hits_as_a_naive_lru_does(seed: int) -> None:
    requests = random_trace(seed)
    for pages in (16, 24, 60, 400):
        cache = ByteLru(
            PageSizes(BLOCK, KV, 0),
            capacity_bytes=pages * KV,
            policy=Sparse(0),
            step_tokens=STEP_TOKENS,
        )
        hits = [cache.serve(r.blocks.tolist(), r.prompt_tokens, r.output_tokens) for r in requests]
        assert hits == naive_lru(requests, 1, pages)


@pytest.mark.parametrize("interval", [None, 0, BLOCK, 3 * BLOCK])
def test_without_a_bound_it_hits_as_a_naive_model_does(interval: int | None) -> None:
    for seed in range(20):
        requests = random_trace(seed)
        cache = ByteLru(
            PageSizes(BLOCK, KV, STATE),
            capacity_bytes=None,
            policy=Dense() if interval is None else Sparse(interval),
            step_tokens=STEP_TOKENS,
        )
        hits = [cache.serve(r.blocks.tolist(), r.prompt_tokens, r.output_tokens) for r in requests]
        assert hits == naive_states(requests, interval)[0]


# ---- against the manager -------------------------------------------------------------------------


def equal_pages() -> Geometry:
    """A state as large as a block: one size class, so slabs cost nothing."""
    full = FullAttention(name="full", layers=1, kv_heads=1, head_dim=128, block_tokens=BLOCK)
    state = RecurrentState(name="state", layers=1, state_bytes_per_layer=full.page_bytes)
    return Geometry((full, state))


@pytest.mark.parametrize("interval", [None, 0, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("seed", range(8))
def test_with_pages_of_one_size_the_manager_hits_as_the_oracle_does(
    seed: int, interval: int | None
) -> None:
    requests = random_trace(seed)
    for pages in (34, 40, 60, 100):
        settings = ReplaySettings(
            block_tokens=BLOCK,
            pool_tokens=pages * BLOCK,
            retention_tokens=interval,
            oracle=True,
            check=True,
        )
        hits, report = serve_all(requests, settings, geometry=equal_pages())
        assert report["oracle_hit_rate"] == report["hit_rate"]
        assert report["hit_tokens"] == sum(hits)
