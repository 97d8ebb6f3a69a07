"""Figures on the real traces, beside those of other simulators and of the byte LRU."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvcache.bench.ideal import IdealCache
from kvcache.bench.replay import Replay
from kvcache.bench.replay_settings import ReplaySettings
from kvcache.bench.traces import LaneSettings, open_trace

pytestmark = pytest.mark.long

AGENTS = "claude_code_sessions_500.csv.gz"
MOONCAKE = "mooncake_conversation.jsonl.gz"
soak = pytest.mark.skipif(
    int(os.environ.get("KVCACHE_TEST_SCALE", "1")) < 10, reason="a long one: KVCACHE_TEST_SCALE=10"
)


def replay(path: Path, lanes: LaneSettings | None = None, **settings: Any) -> dict[str, Any]:
    """The report of one run."""
    trace = open_trace(path)
    run = Replay(trace.path, trace.block_tokens, ReplaySettings(**settings))
    for request in trace.requests(lanes):
        run.serve(request)
    report = run.report()
    assert report["leaked_blocks"] == 0
    return report


# ---- one session after another -------------------------------------------------------------------


def test_the_mooncake_trace_hits_as_an_infinite_cache(trace_dir: Path) -> None:
    report = replay(trace_dir / MOONCAKE, block_tokens=512, check=True)
    assert report["hit_rate"] == pytest.approx(0.3734, abs=0.0003)
    assert report["hit_rate"] == report["ideal_hit_rate"]
    assert report["checks"] > 100


def test_the_mooncake_trace_hits_as_lru_in_five_million_tokens(trace_dir: Path) -> None:
    """The reference simulator of `REFERENCE_LRU`, with `--policies lru --caps-mtok 5.12`: 0.2157; for a
    cache without bound it gives 0.3736, as it never recomputes a last token.
    """
    report = replay(trace_dir / MOONCAKE, block_tokens=512, pool_tokens=5_120_000)
    assert report["hit_rate"] == pytest.approx(0.2157, abs=0.006)


def test_agent_sessions_hit_as_an_infinite_cache(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / AGENTS)
    run = Replay(trace.path, 64, ReplaySettings(block_tokens=64))
    for request in islice(trace.requests(), 3000):
        run.serve(request)
    report = run.report()
    assert report["hit_rate"] == report["ideal_hit_rate"] > 0.9


def test_the_ideal_hit_rate_of_the_claude_code_sample_is_known(trace_dir: Path) -> None:
    ideal, hit, prompt = IdealCache(64), 0, 0
    for request in open_trace(trace_dir / AGENTS).requests():
        hit += ideal.hit_tokens(request.blocks, request.prompt_tokens)
        prompt += request.prompt_tokens
    assert hit / prompt == pytest.approx(0.96374, abs=0.00001)


@pytest.mark.parametrize(
    ("interval", "share", "states"),
    [
        (0, 0.9945, 1.1),
        pytest.param(16_384, 0.998, 1.4, marks=soak),
        pytest.param(4_096, 0.999, 2.2, marks=soak),
    ],
)
def test_few_states_keep_nearly_all_that_attention_alone_would_hit(
    trace_dir: Path, interval: int, share: float, states: float
) -> None:
    report = replay(
        trace_dir / AGENTS, block_tokens=64, preset="qwen3.5-9b", retention_tokens=interval
    )
    assert report["ideal_hit_rate"] == pytest.approx(0.96374, abs=0.00001)
    assert report["hit_rate"] >= share * report["ideal_hit_rate"]
    assert report["checkpoints_per_request"] <= states


# ---- sessions side by side -----------------------------------------------------------------------


REFERENCE_LRU = [
    (16, 1_000_000, 0.6440),
    (16, 2_000_000, 0.9083),
    (16, 3_000_000, 0.9498),
    (64, 2_000_000, 0.1774),
    (64, 4_000_000, 0.6090),
    (64, 8_000_000, 0.8777),
]
"""Lanes, pool, and the hit rate of a cache-policy simulator that shares no code with this project:

    replay.py claude_code_sessions_500.csv.gz --policies lru --lanes 16 --hours 1 --caps-mtok 1,2,3
    replay.py claude_code_sessions_500.csv.gz --policies lru --lanes 64 --hours 1 --caps-mtok 2,4,8

run on 2026-12-01 with its defaults: blocks of 8 units of 64 tokens, a session's idle time capped at
300 s, seed 0. It inserts the blocks of a request deepest first, and running requests pin nothing.
"""
REFERENCE_IDEAL = {16: 0.9528, 64: 0.9466}
"""What the same runs give for a cache without bound."""


@pytest.mark.parametrize(("lanes", "pool_tokens", "lru"), REFERENCE_LRU)
def test_live_sessions_hit_as_the_reference_simulation_of_lru(
    trace_dir: Path, lanes: int, pool_tokens: int, lru: float
) -> None:
    report = replay(
        trace_dir / AGENTS,
        LaneSettings(lanes=lanes, hours=1),
        block_tokens=512,
        pool_tokens=pool_tokens,
    )
    assert report["hit_rate"] == pytest.approx(lru, abs=0.002)
    assert report["ideal_hit_rate"] == pytest.approx(REFERENCE_IDEAL[lanes], abs=0.0001)


@pytest.mark.parametrize(
    ("pool_tokens", "tp"),
    [
        (8_000_000, 1),
        (6_000_000, 8),
        pytest.param(6_000_000, 1, marks=soak),
        pytest.param(8_000_000, 8, marks=soak),
    ],
)
def test_an_arena_of_slabs_hits_as_a_page_exact_lru_by_bytes(
    trace_dir: Path, pool_tokens: int, tp: int
) -> None:
    report = replay(
        trace_dir / AGENTS,
        LaneSettings(lanes=64, hours=1),
        block_tokens=128,
        pool_tokens=pool_tokens,
        preset="kimi-k3",
        tp=tp,
        retention_tokens=0,
        oracle=True,
    )
    assert report["hit_rate"] == pytest.approx(report["oracle_hit_rate"], abs=0.005)
    assert report["reclaimed_slabs"] > 0
