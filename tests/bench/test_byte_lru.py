"""The byte LRU against hand-made examples, a naive LRU, and the manager itself."""

from __future__ import annotations

import pytest
from replays.naive import BLOCK, naive_lru, naive_states, random_trace, serve_all

from kvcache.bench.byte_lru import ByteLru
from kvcache.bench.byte_lru_pages import PageSizes, SpanPages
from kvcache.bench.replay_settings import STEP_TOKENS, ReplaySettings
from kvcache.core.errors import CapacityError
from kvcache.core.layout import Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.core.specs import FullAttention, PoolingState, RecurrentState, SlidingWindow
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
    return list(cache.order.victims), list(cache.order.lru)


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
    assert ~1 in cache.order.kept
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


# ---- windows and pooling states ------------------------------------------------------------------

WINDOW = SpanPages(block_tokens=2, chunk_tokens=1, lead_tokens=2, page_bytes=3)
POOL = SpanPages(block_tokens=2, chunk_tokens=2, lead_tokens=2, page_bytes=3, transient=True)


def with_span(span: SpanPages, capacity: int | None = None, interval: int = 0) -> ByteLru:
    """Blocks of 4 tokens, steps of 8; a hit reads the last half of its last block."""
    return ByteLru(
        PageSizes(4, KV, 0, (span,)),
        capacity_bytes=capacity,
        policy=Sparse(interval),
        step_tokens=8,
    )


@pytest.mark.parametrize("span", [WINDOW, POOL])
def test_what_a_boundary_reads_goes_back_before_the_block_that_it_ends_with(
    span: SpanPages,
) -> None:
    cache = with_span(span)
    assert cache.serve([0, 1, 2], 13, 0) == 0
    assert keys(cache) == ([], [(0, 2, 1), 2, 1, 0])
    assert cache.serve([0, 1, 2, 3], 17, 0) == 12
    assert keys(cache) == ([(0, 2, 1)], [(0, 3, 1), 3, 2, 1, 0])


@pytest.mark.parametrize("span", [WINDOW, POOL])
def test_a_junction_keeps_what_it_reads(span: SpanPages) -> None:
    cache = with_span(span)
    cache.serve([0, 1, 2, 3], 17, 0)
    assert cache.serve([0, 1, 4, 5], 17, 0) == 0
    assert cache.serve([0, 1, 6], 13, 0) == 8


def test_a_step_takes_a_page_for_each_block_of_a_window_and_few_of_a_pooling_state() -> None:
    for span, pages in ((WINDOW, 4), (POOL, 2)):  # of four halves: before 4 and before 8
        with_span(span, 2 * KV + pages * 3).serve([0, 1], 8, 0)
        with pytest.raises(CapacityError):
            with_span(span, 2 * KV + pages * 3 - 1).serve([0, 1], 8, 0)


# ---- against the manager -------------------------------------------------------------------------


FULL = FullAttention(name="full", layers=2, kv_heads=1, head_dim=128, block_tokens=BLOCK)


def pool(ratio: int, block_tokens: int, *, overlap: bool = True) -> PoolingState:
    """A page of as many bytes as a block of full attention."""
    row = FULL.page_bytes // block_tokens
    return PoolingState(
        name=f"pool{ratio}",
        layers=1,
        ratio=ratio,
        token_bytes=row,
        block_tokens=block_tokens,
        overlap=overlap,
    )


def window(tokens: int, block_tokens: int) -> SlidingWindow:
    return SlidingWindow(
        name="window",
        layers=2 * BLOCK // block_tokens,
        kv_heads=1,
        head_dim=128,
        window=tokens,
        block_tokens=block_tokens,
    )


STATE_GROUP = RecurrentState(name="state", layers=1, state_bytes_per_layer=FULL.page_bytes)
EQUAL_PAGES = {
    "state": (FULL, STATE_GROUP),
    "window": (FULL, window(1100, BLOCK)),
    "half blocks": (FULL, window(700, BLOCK // 2)),
    "pool": (FULL, pool(128, 128)),
    "chunks": (FULL, pool(1536, BLOCK, overlap=False)),
    "all": (FULL, window(1100, BLOCK), pool(128, 64), pool(1024, BLOCK), STATE_GROUP),
}
"""Pages of one size: one size class, so slabs cost nothing."""


@pytest.mark.parametrize("name", EQUAL_PAGES)
@pytest.mark.parametrize("interval", [None, 0, BLOCK, 3 * BLOCK])
def test_with_pages_of_one_size_the_manager_hits_as_the_oracle_does(
    name: str, interval: int | None
) -> None:
    geometry = Geometry(EQUAL_PAGES[name])
    assert len(geometry.pages_per_slab) == 1
    least = 90 if name == "all" else 60
    for seed in range(4):
        requests = random_trace(seed)
        for pages in (least, 2 * least, 3 * least):
            settings = ReplaySettings(
                block_tokens=BLOCK,
                pool_tokens=pages * BLOCK,
                retention_tokens=interval,
                oracle=True,
                check=True,
            )
            hits, report = serve_all(requests, settings, geometry=geometry)
            assert report["oracle_hit_rate"] == report["hit_rate"]
            assert report["hit_tokens"] == sum(hits)
