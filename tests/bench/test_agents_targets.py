"""What the agent traces must hit, with pools as large as those in which vLLM 0.33.0 was measured."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.bench.agents import AgentsBench, run_agents_bench
from kvcache.bench.agents_presets import PRESETS

VLLM_SMALLEST_SHORT = {"gemma3": 34.65, "qwen3next": 71.77, "mixed3": 71.09}
"""The best of vLLM's intervals, in percent: `kvcache bench agents --peer vllm` measures it anew."""


def rows(trace: str, preset: str, blocks: int, interval: int) -> list[dict[str, Any]]:
    """The runs with the system prompt declared, and undeclared."""
    bench = AgentsBench(traces=(trace,), presets=(preset,), blocks=(blocks,), intervals=(interval,))
    found: list[dict[str, Any]] = run_agents_bench(bench, lambda _: None)["traces"][trace]["pools"][
        0
    ]["ours"]
    assert [run["leaked_pages"] for run in found] == [0, 0]
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_short_contexts_in_an_ample_pool(preset: str) -> None:
    declared, undeclared = rows("short", preset, PRESETS[preset].pools["short"].blocks[-1], 0)
    assert declared["hit_rate"] >= 0.866
    assert undeclared["hit_rate"] >= 0.862


@pytest.mark.parametrize("interval", [0, 4096])
@pytest.mark.parametrize("preset", [name for name in PRESETS if "long" in PRESETS[name].pools])
def test_long_contexts_in_the_smaller_pool(preset: str, interval: int) -> None:
    blocks = PRESETS[preset].pools["long"].blocks[0]
    declared, undeclared = rows("long", preset, blocks, interval)
    assert declared["hit_rate"] >= 0.754
    assert undeclared["hit_rate"] >= 0.748


@pytest.mark.parametrize("preset", VLLM_SMALLEST_SHORT)
def test_a_small_pool_holds_more_than_vllm_does_in_equal_bytes(preset: str) -> None:
    declared, undeclared = rows("short", preset, PRESETS[preset].pools["short"].blocks[0], 0)
    for run in (declared, undeclared):
        assert 100 * run["hit_rate"] >= VLLM_SMALLEST_SHORT[preset] + 10
