"""Replay against naive models of the cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replays.naive import BLOCK, naive_lru, naive_states, random_trace, serve_all

from kvcache.bench.ideal import IdealCache
from kvcache.bench.replay import Replay, foreign_digests
from kvcache.bench.replay_settings import (
    ReplaySettings,
    arena_bytes,
    arena_slabs,
    page_sizes,
    tokens_of_slabs,
)
from kvcache.bench.traces import TraceRequest
from kvcache.core.errors import CapacityError, ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.native_manager import most_slabs
from kvcache.core.specs import FullAttention, RingBuffer, SlidingWindow

# ---- against naive models ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_a_bounded_pool_hits_as_a_naive_lru_does(seed: int) -> None:
    requests = random_trace(seed)
    for merge in (1, 2):
        # The smallest pool that takes the longest random request, and larger ones.
        for pages in (16 // merge, 24 // merge, 60 // merge, 400 // merge):
            settings = ReplaySettings(
                block_tokens=BLOCK * merge, pool_tokens=pages * BLOCK * merge, check=True
            )
            hits, report = serve_all(requests, settings)
            assert hits == naive_lru(requests, merge, pages)
            assert report["leaked_blocks"] == 0
            assert report["peak_used_bytes"] <= pages * report["bytes_per_page"]["full"]


@pytest.mark.parametrize("seed", range(25))
def test_an_unbounded_pool_hits_as_the_ideal_cache_does(seed: int) -> None:
    requests = random_trace(seed)
    for merge in (1, 3):
        _, report = serve_all(requests, ReplaySettings(block_tokens=BLOCK * merge, check=True))
        assert report["hit_tokens"] == sum(naive_lru(requests, merge, 10**6))
        assert report["hit_rate"] == report["ideal_hit_rate"]
        assert report["lost_tokens_by_cause"]["evicted"] == 0


@pytest.mark.parametrize("pool_tokens", [None, 1000 * BLOCK])
def test_without_full_attention_what_was_not_kept_is_not_taken_for_evicted(
    pool_tokens: int | None,
) -> None:
    window = SlidingWindow(
        name="w", layers=1, kv_heads=1, head_dim=8, window=BLOCK + 1, block_tokens=BLOCK
    )
    paths = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 8, 9])
    requests = [
        TraceRequest(n, float(n), "", 0, len(path) * BLOCK + 1, 1, np.array(path, np.int64))
        for n, path in enumerate(paths)
    ]
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=pool_tokens, retention_tokens=0)
    hits, report = serve_all(requests, settings, geometry=Geometry((window,)))
    assert hits == [0, 0]
    lost = report["lost_tokens_by_cause"]
    assert (lost["evicted"], lost["no_state"]) == (0, 3 * BLOCK)


@pytest.mark.parametrize("interval", [None, 0, BLOCK, 3 * BLOCK])
def test_kept_states_hit_as_a_naive_model_does(interval: int | None) -> None:
    for seed in range(20):
        requests = random_trace(seed)
        settings = ReplaySettings(
            block_tokens=BLOCK, preset="qwen3.5-9b", retention_tokens=interval, check=True
        )
        hits, report = serve_all(requests, settings)
        expected, states, at_end = naive_states(requests, interval)
        assert hits == expected
        assert report["checkpoints_per_request"] == states / len(requests)
        assert report["end_of_turn_checkpoints_per_request"] == at_end / len(requests)
        assert report["leaked_blocks"] == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("interval", [None, 0, 2 * BLOCK])
def test_hit_and_lost_tokens_add_up_to_the_prompts(seed: int, interval: int | None) -> None:
    requests = random_trace(seed)
    for pool in (32 * BLOCK, 64 * BLOCK, None):
        for preset in ("llama-3-8b", "qwen3.5-9b"):
            settings = ReplaySettings(
                block_tokens=BLOCK,
                pool_tokens=pool,
                preset=preset,
                retention_tokens=interval,
                check=True,
            )
            _, report = serve_all(requests, settings)
            lost = report["lost_tokens_by_cause"]
            assert report["prompt_tokens"] == sum(r.prompt_tokens for r in requests)
            assert report["hit_tokens"] + sum(lost.values()) == report["prompt_tokens"]
            assert report["hit_rate"] <= report["ideal_hit_rate"]
            assert report["leaked_blocks"] == 0


def test_a_prompt_of_many_steps_leaves_the_same_keys_as_one_of_one() -> None:
    blocks = np.arange(100, dtype=np.int64)
    long = TraceRequest(1, 0.0, "", 0, 100 * BLOCK + 7, 20_000, blocks)
    hits, report = serve_all([long, long], ReplaySettings(block_tokens=BLOCK, check=True))
    assert hits == [0, 100 * BLOCK]
    pages = -(-(100 * BLOCK + 7 + 19_999) // BLOCK)
    assert report["peak_used_bytes"] == pages * report["bytes_per_page"]["full"]


def test_the_last_token_is_recomputed() -> None:
    blocks = np.arange(3, dtype=np.int64)
    request = TraceRequest(1, 0.0, "", 0, 3 * BLOCK, 0, blocks)
    hits, report = serve_all([request, request], ReplaySettings(block_tokens=BLOCK))
    assert hits == [0, 2 * BLOCK]
    assert report["ideal_hit_rate"] == 2 / 6


def test_requests_of_the_warm_up_are_served_but_not_counted() -> None:
    blocks = np.arange(3, dtype=np.int64)
    request = TraceRequest(1, 0.0, "", 0, 3 * BLOCK + 1, 5, blocks)
    _, report = serve_all(
        [request._replace(counted=False), request], ReplaySettings(block_tokens=BLOCK)
    )
    assert report["requests"] == 1
    assert report["prompt_tokens"] == report["hit_tokens"] + 1 == 3 * BLOCK + 1


def test_the_ideal_cache_agrees_with_a_set() -> None:
    for seed in range(20):
        ideal, seen = IdealCache(BLOCK), set[int]()
        for request in random_trace(seed):
            run = 0
            while run < len(request.blocks) and int(request.blocks[run]) in seen:
                run += 1
            seen |= set(request.blocks.tolist())
            limit = (request.prompt_tokens - 1) // BLOCK
            hit = ideal.hit_tokens(request.blocks, request.prompt_tokens)
            assert hit == min(run, limit) * BLOCK


def test_foreign_digests_differ_where_numbers_do() -> None:
    keys = np.array([0, 1, 256, 2**40, 2**62], np.int64)
    digests = foreign_digests(keys)
    assert digests.shape == (5, 32)
    assert [int.from_bytes(d.tobytes(), "little") for d in digests] == keys.tolist()


# ---- checks --------------------------------------------------------------------------------------


def test_a_small_trace_is_checked_at_every_request_and_at_the_end() -> None:
    requests = random_trace(1)
    for check, expected in ((True, len(requests) + 1), (False, 0)):
        replay = Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=BLOCK, check=check))
        for request in requests:
            replay.serve(request)
        assert replay.report()["checks"] == expected


def test_a_leak_is_counted() -> None:
    replay = Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=BLOCK))
    manager = replay._manager
    handle = manager.open_foreign(np.zeros((0, 32), np.uint8), prompt_tokens=100)
    manager.lookup(handle)
    step = manager.begin_step()
    assert manager.allocate(handle, 100) is not None
    manager.commit(handle, 100)
    manager.end_step(step)
    assert replay.report()["leaked_blocks"] == 1


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "llama"}, "llama-3-8b, .*qwen3"),
        ({"block_tokens": 0}, "--block-tokens is 0"),
        ({"pool_tokens": 511}, "--pool-tokens 511 is less than one block of 512"),
        ({"pool_tokens": -1}, "--pool-tokens -1"),
        ({"retention_tokens": 100}, "--retention 100 .* multiple of the hit grid of 512"),
        ({"retention_tokens": -512}, "--retention -512"),
        ({"tp": 0}, "--tp is 0"),
    ],
)
def test_impossible_settings_name_their_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplaySettings(**{"block_tokens": BLOCK} | changes)


def test_a_block_that_cuts_the_traces_blocks_is_refused() -> None:
    for block in (100, 768, 64):
        with pytest.raises(
            ConfigError, match=rf"--block-tokens {block} .*is not a multiple .* 512"
        ):
            Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=block))


def test_a_request_larger_than_the_pool_is_named_with_the_size_that_takes_it() -> None:
    blocks = np.arange(4, dtype=np.int64)
    requests = [
        TraceRequest(3, 0.0, "", 0, 600, 1, blocks[:1]),
        TraceRequest(17, 0.0, "", 0, 4 * BLOCK + 9, 900, blocks),
    ]
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=5 * BLOCK)
    with pytest.raises(
        CapacityError,
        match=r"line 17: 2057 prompt and 900 output .* --pool-tokens to 3072",
    ):
        serve_all(requests, settings)
    _, report = serve_all(requests, ReplaySettings(block_tokens=BLOCK, pool_tokens=3072))
    assert report["requests"] == 2


HYBRIDS = [
    ("llama-3-8b", 1),
    ("qwen3.5-9b", 1),
    ("kimi-k3", 1),
    ("kimi-k3", 8),
    ("gpt-oss-120b", 1),
]


@pytest.mark.parametrize(("preset", "tp"), HYBRIDS)
def test_an_arena_has_at_most_the_bytes_of_its_tokens_and_lacks_less_than_a_slab(
    preset: str, tp: int
) -> None:
    geometry = ReplaySettings(block_tokens=BLOCK, preset=preset, tp=tp).geometry
    for blocks in (64, 100, 5000):
        tokens = blocks * BLOCK
        spare = arena_bytes(tokens, geometry)
        spare -= arena_slabs(tokens, geometry) * geometry.slab_bytes
        assert 0 <= spare < geometry.slab_bytes


@pytest.mark.parametrize(("preset", "tp"), HYBRIDS)
@pytest.mark.parametrize("tokens", [1, 3 * BLOCK, 40 * BLOCK + 1, 900 * BLOCK])
def test_the_pool_that_an_error_asks_for_is_enough(preset: str, tp: int, tokens: int) -> None:
    geometry = ReplaySettings(block_tokens=BLOCK, preset=preset, tp=tp).geometry
    slabs = geometry.slabs_needed(tokens)
    enough = tokens_of_slabs(slabs, geometry)
    assert arena_slabs(enough, geometry) >= slabs
    assert arena_bytes(enough - geometry.grid_tokens, geometry) < slabs * geometry.slab_bytes


@pytest.mark.parametrize(("preset", "tp"), HYBRIDS)
def test_the_largest_pool_is_the_one_that_an_error_names(preset: str, tp: int) -> None:
    geometry = ReplaySettings(block_tokens=BLOCK, preset=preset, tp=tp).geometry
    with pytest.raises(ConfigError, match="--pool-tokens 1000000000000000 takes") as error:
        arena_slabs(10**15, geometry)
    named = re.search(r"give (\d+) or less", str(error.value))
    assert named is not None
    most = int(named[1])
    assert arena_slabs(most, geometry) == most_slabs(geometry)
    with pytest.raises(ConfigError, match=f"give {most} or less, or inf"):
        arena_slabs(most + geometry.grid_tokens, geometry)


def test_a_pool_of_less_than_one_slab_is_refused() -> None:
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=BLOCK, preset="qwen3.5-9b")
    with pytest.raises(ConfigError, match=f"--pool-tokens {BLOCK} is less than one slab takes"):
        Replay(Path("t"), BLOCK, settings)


def test_the_oracle_refuses_groups_that_it_does_not_know() -> None:
    ring = RingBuffer(name="ring", layers=1, ring_tokens=4, token_bytes=8)
    full = FullAttention(name="full", layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK)
    with pytest.raises(ConfigError, match=r"--oracle bytes knows .*: mine has the group 'ring'"):
        page_sizes(Geometry((full, ring)), "mine")
