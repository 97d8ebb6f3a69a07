"""The conversation with the peer's process; with vLLM where there is one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcache.bench.agents_peer import ask_peer
from kvcache.bench.agents_presets import PRESETS
from kvcache.bench.agents_trace import TRACES, AgentTrace
from kvcache.core.errors import ConfigError, KVCacheError

TRACE = AgentTrace(
    sessions=2,
    turns=1,
    system_tokens=8,
    first_tokens=4,
    tool_tokens=0,
    output_tokens=2,
    seed=0,
    max_running=2,
)
RUNS = [{"preset": "gptoss", "groups": [], "blocks": n, "interval": None} for n in (10, 20)]

ANSWERS = """
import json, sys
asked = json.load(sys.stdin)
print("a library greets")
print(json.dumps({"vllm": "0"}))
for run in asked["runs"]:
    tokens = sum(len(prompt) for _, prompt, _ in asked["trace"])
    print(json.dumps({"blocks": run["blocks"], "tokens": tokens}))
"""
FAILS_LATE = ANSWERS.replace('asked["runs"]', 'asked["runs"][:1]') + "\nsys.exit('no more blocks')"


def ask(script: Path, python: str = sys.executable) -> tuple[Any, ...]:
    seen: list[dict[str, Any]] = []
    answers = ask_peer(
        python,
        TRACE.generate(),
        RUNS,
        max_running=2,
        step_tokens=64,
        progress=seen.append,
        script=script,
    )
    return (*answers, seen)


def program(folder: Path, text: str) -> Path:
    path = folder / "peer.py"
    path.write_text(text)
    return path


def test_the_peer_is_told_every_token_and_answers_run_by_run(tmp_path: Path) -> None:
    environment, results, seen = ask(program(tmp_path, ANSWERS))
    assert environment == {"vllm": "0"}
    tokens = sum(len(r.prompt) for r in TRACE.generate())
    assert results == [{"blocks": n, "tokens": tokens} for n in (10, 20)]
    assert seen == results


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FAILS_LATE, "after 1 of 2 runs: no more blocks"),
        ("raise ImportError('no module vllm')", "after 0 of 2 runs: ImportError: no module vllm"),
        ("", "after 0 of 2 runs: it said nothing"),
    ],
)
def test_a_peer_that_fails_is_named_with_its_last_words(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(KVCacheError) as caught:
        ask(program(tmp_path, text))
    assert reason in str(caught.value)


def test_a_python_that_is_not_there_is_a_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer-python"):
        ask(program(tmp_path, ANSWERS), python=str(tmp_path / "python"))


VLLM_FIGURES = {
    ("gemma3", 11933): {None: 34.65, 0: 33.63},
    ("qwen3next", 418): {None: 71.77, 0: 62.98},
}
"""Hit rates of vLLM 0.33.0 on the short trace, in percent."""


def test_vllm_hits_what_it_did_when_the_targets_were_set(
    require: Callable[[str, str], NoReturn],
) -> None:
    python = os.environ.get("KVCACHE_VLLM_PYTHON")
    if not python:
        require("vllm", "KVCACHE_VLLM_PYTHON names no Python of an environment with vllm 0.33.0")
    runs = [
        {
            "preset": preset,
            "groups": PRESETS[preset].peer_groups,
            "blocks": blocks,
            "interval": interval,
        }
        for (preset, blocks), rates in VLLM_FIGURES.items()
        for interval in rates
    ]
    trace = TRACES["short"]
    environment, results = ask_peer(
        python,
        trace.generate(),
        runs,
        max_running=trace.max_running,
        step_tokens=8192,
        progress=lambda _: None,
    )
    assert environment["vllm"] == "0.33.0"
    for run, result in zip(runs, results, strict=True):
        expected = VLLM_FIGURES[run["preset"], run["blocks"]][run["interval"]]
        assert round(100 * result["hit_rate"], 2) == expected
        assert result["block_bytes"] == PRESETS[run["preset"]].block_bytes
        assert result["leaked_blocks"] == 0
    assert json.dumps(results)
