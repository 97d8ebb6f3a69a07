"""Every request of the real traces is explained, and all losses add up: `Replay.serve` checks each."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvcache.bench.replay import Replay
from kvcache.bench.replay_settings import ReplaySettings
from kvcache.bench.traces import LaneSettings, open_trace
from kvcache.core.explanation import CAUSES

pytestmark = pytest.mark.long

AGENTS = "claude_code_sessions_500.csv.gz"
MOONCAKE = "mooncake_conversation.jsonl.gz"


def replay(path: Path, lanes: LaneSettings | None = None, **settings: Any) -> dict[str, Any]:
    trace = open_trace(path)
    run = Replay(trace.path, trace.block_tokens, ReplaySettings(**settings))
    lost = dict.fromkeys(CAUSES, 0)
    for request in islice(trace.requests(lanes), 40_000):
        explanation = run.serve(request)
        if request.counted:
            for cause, tokens in explanation.lost().items():
                lost[cause] += tokens
    report = run.report()
    assert report["lost_tokens_by_cause"] == lost
    assert report["hit_tokens"] + sum(lost.values()) == report["prompt_tokens"]
    return report


def test_the_mooncake_trace_adds_up(trace_dir: Path) -> None:
    report = replay(trace_dir / MOONCAKE, block_tokens=512, pool_tokens=5_120_000)
    assert report["requests"] == 12_031
    lost = report["lost_tokens_by_cause"]
    assert min(lost["evicted"], lost["not_stored"], lost["tokens_differ"], lost["last_block"]) > 0


@pytest.mark.timeout(600)
def test_all_agent_sessions_add_up(trace_dir: Path) -> None:
    report = replay(trace_dir / AGENTS, block_tokens=64)
    assert report["requests"] == 35_320
    lost = report["lost_tokens_by_cause"]
    assert lost["evicted"] == lost["no_state"] == 0
    assert lost["tokens_differ"] > 0


def test_live_sessions_with_states_in_a_small_arena_add_up(trace_dir: Path) -> None:
    report = replay(
        trace_dir / AGENTS,
        LaneSettings(lanes=16, hours=0.2, seed=0),
        block_tokens=64,
        preset="qwen3.5-9b",
        retention_tokens=0,
        pool_tokens=600_000,
    )
    lost = report["lost_tokens_by_cause"]
    assert min(lost["evicted"], lost["no_state"], lost["not_stored"]) > 0


NEW = ("not_stored", "tokens_differ")


def test_what_is_new_does_not_grow_as_the_pool_shrinks(trace_dir: Path) -> None:
    """What the table of evicted keys has forgotten is known from the trace."""
    news = {}
    for pool_tokens in (None, 5_120_000, 400_000):
        report = replay(trace_dir / MOONCAKE, block_tokens=512, pool_tokens=pool_tokens)
        news[pool_tokens] = sum(report["lost_tokens_by_cause"][cause] for cause in NEW)
    assert news[400_000] == news[5_120_000] == news[None] > 0
