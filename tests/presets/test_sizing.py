"""What sessions cost, against counting pages one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcache import Manager, Sparse
from kvcache.bench.sizing import (
    boundary_bytes,
    boundary_pages,
    bytes_per_token,
    kept_session,
    sessions_that_fit,
    spaced_boundary_bytes,
)
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.records import UNLIMITED
from kvcache.core.specs import (
    ChunkedLocal,
    FullAttention,
    LatentAttention,
    PoolingState,
    RecurrentState,
    RingBuffer,
    SlidingWindow,
)
from kvcache.presets import names, preset

HEADS = {"layers": 2, "kv_heads": 2, "head_dim": 8}
MIXED = Geometry(
    (
        FullAttention(name="full", block_tokens=16, **HEADS),
        SlidingWindow(name="window", block_tokens=8, window=41, **HEADS),
        ChunkedLocal(name="chunks", block_tokens=16, chunk_tokens=96, **HEADS),
        PoolingState(name="pool", layers=2, ratio=4, token_bytes=64, block_tokens=4, overlap=True),
        RecurrentState(name="state", layers=2, state_bytes_per_layer=4096),
        RingBuffer(name="ring", layers=2, ring_tokens=8, token_bytes=64),
    )
)


def pages_one_by_one(
    geometry: Geometry, tokens: int, positions: list[int]
) -> tuple[tuple[int, ...], int]:
    """Pages that hits at these positions read, as sets of block numbers."""
    counts = []
    for rules in geometry.rules:
        if rules.kind == "full":
            counts.append(tokens // rules.block_tokens)
        elif rules.kind == "state":
            counts.append(len(positions))
        elif rules.kind == "private":
            counts.append(0)
        else:
            read: set[int] = set()
            for p in positions:
                read |= {t // rules.block_tokens for t in range(rules.need_begin(p), p)}
            counts.append(len(read))
    return tuple(counts), len(positions)


@settings(max_examples=150)
@given(tokens=st.integers(1, 2_000), interval=st.integers(0, 12))
def test_a_kept_session_has_the_pages_that_hits_at_its_positions_read(
    tokens: int, interval: int
) -> None:
    grid = MIXED.grid_tokens
    step = interval * grid
    positions = set(range(step, tokens + 1, step)) if step else set()
    positions |= {tokens // grid * grid} - {0}
    found = kept_session(MIXED, tokens, step)
    assert tuple(found) == pages_one_by_one(MIXED, tokens, sorted(positions))
    dense = kept_session(MIXED, tokens, None)
    every = list(range(grid, tokens + 1, grid))
    assert tuple(dense) == pages_one_by_one(MIXED, tokens, every)


@settings(max_examples=60)
@given(at=st.integers(1, 400))
def test_a_boundary_never_reads_more_than_its_pages(at: int) -> None:
    position = at * MIXED.grid_tokens
    for rules, most in zip(MIXED.rules, boundary_pages(MIXED), strict=True):
        if rules.kind == "span":
            begin = rules.need_begin(position)
            assert -(-position // rules.block_tokens) - begin // rules.block_tokens <= most


def test_boundary_pages_are_reached() -> None:
    """The chunks of 96 on a grid of 16: 80 tokens at most, at 176 for one."""
    assert MIXED.grid_tokens == 16
    assert boundary_pages(MIXED) == (0, 5, 5, 1, 1, 0)
    one = boundary_bytes(MIXED)
    sizes = [group.page_bytes for group in MIXED.groups]
    assert tuple(one) == (sizes[4], 5 * sizes[1] + 5 * sizes[2], sizes[3])
    assert one.total == sum(one)


@pytest.mark.parametrize("name", names())
def test_a_boundary_of_a_preset_has_what_one_kept_position_has(name: str) -> None:
    geometry = preset(name)
    far = 64 * geometry.grid_tokens
    kept = kept_session(geometry, far, 0)
    beside = [n if r.kind != "full" else 0 for n, r in zip(kept.pages, geometry.rules, strict=True)]
    assert geometry.pool_bytes(beside) == boundary_bytes(geometry).total
    full = geometry.pool_bytes(kept.pages) - geometry.pool_bytes(beside)
    assert full == bytes_per_token(geometry) * far


@pytest.mark.parametrize("name", ["kimi-linear-48b", "gpt-oss-20b", "deepseek-v4-flash"])
def test_a_finished_session_leaves_in_the_manager_what_is_computed_here(name: str) -> None:
    """A prompt of 10,000 tokens: the end of the turn is that of the prompt."""
    geometry = preset(name)
    manager = Manager(geometry, slabs=UNLIMITED, retention=Sparse(4096))
    handle = manager.open(np.arange(10_000, dtype=np.int32), max_tokens=10_000)
    manager.lookup(handle)
    while (done := manager.info(handle).committed) < 10_000:
        step = manager.begin_step()
        grant = manager.allocate(handle, min(2048, 10_000 - done))
        assert grant
        manager.commit(handle, grant.end)
        manager.end_step(step)
    manager.finish(handle)
    kept = kept_session(geometry, 10_000, 4096)
    assert kept.boundaries == 3
    keyed = [manager.group_stats(g).keyed for g in range(len(geometry.groups))]
    assert keyed == list(kept.pages)


@settings(max_examples=100)
@given(
    pages=st.lists(st.integers(0, 50), min_size=2, max_size=2).filter(any),
    slabs=st.integers(0, 500),
)
def test_as_many_sessions_fit_as_their_pages_have_slabs(pages: list[int], slabs: int) -> None:
    geometry = Geometry(
        (
            LatentAttention(name="mla", layers=2, block_tokens=16),
            RecurrentState(name="state", layers=2, state_bytes_per_layer=100_000),
        )
    )
    of_class = dict.fromkeys(geometry.class_of_group, 0)
    for n, c in zip(pages, geometry.class_of_group, strict=True):
        of_class[c] += n
    fit = 0
    while (
        sum(math.ceil((fit + 1) * n / geometry.pages_per_slab[c]) for c, n in of_class.items())
        <= slabs
    ):
        fit += 1
    assert sessions_that_fit(geometry, slabs, pages) == fit


def test_running_sessions_have_two_state_pages() -> None:
    geometry = preset("kimi-k3")
    assert geometry.pages_needed(131_072) == (1024, 2)
    assert geometry.pool_bytes((1024, 2)) == 131_072 * 27_648 + 2 * 449_372_160


def test_neighbouring_boundaries_share_the_blocks_of_a_window() -> None:
    geometry = preset("gemma-3-27b")
    window = boundary_bytes(geometry).windows
    assert spaced_boundary_bytes(geometry, 4096) == window
    assert spaced_boundary_bytes(geometry, 1024) == window
    assert spaced_boundary_bytes(geometry, 128) == window / 8
    dense = kept_session(geometry, 102_400, None)
    assert dense.pages[1] == 800
    assert dense.boundaries == 800


def test_without_states_and_windows_nothing_is_a_boundary() -> None:
    geometry = preset("llama-3-8b")
    assert boundary_bytes(geometry).total == 0
    assert kept_session(geometry, 100_000, None) == ((781,), 0)


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match="an interval of 100 tokens is neither 0 nor a multiple"):
        kept_session(MIXED, 1_000, 100)
    with pytest.raises(ConfigError, match="--context 0: a session has 1 to"):
        kept_session(MIXED, 0, 0)
    with pytest.raises(ConfigError, match="without any page"):
        sessions_that_fit(MIXED, 10, [0] * 6)
