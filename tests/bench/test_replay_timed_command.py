"""`kvcache replay --hardware`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from replays.command import run
from replays.files import SESSION_0504, csv
from replays.naive import random_trace, write_trace

from kvcache.cli import main

KEYS = (
    "hardware", "token_budget", "max_requests", "host_tokens", "ttft_seconds", "latency_seconds",
    "queue_seconds", "seconds_per_output_token", "requests_per_second", "output_tokens_per_second",
    "simulated_seconds", "busy_share", "steps", "preemptions", "recomputed_tokens", "host",
    "hit_rate_by_source", "lost_tokens_by_cause", "leaked_blocks", "manager_seconds",
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    requests = [r._replace(output_tokens=r.output_tokens % 20) for r in random_trace(1, 30)]
    return write_trace(tmp_path / "t.jsonl", requests)


def test_times_stand_beside_hit_rates(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "replay", trace, "--hardware", "h100,step_seconds=0.001", "--host-tokens", "1M",
        "--pool-tokens", "10k", "--check", "--json",
    )  # fmt: skip
    assert status == 0
    report = json.loads(out)
    assert set(KEYS) <= set(report)
    assert report["requests"] == 30
    assert report["hardware"] == "h100,step_seconds=0.001"
    assert set(report["hit_rate_by_source"]) == {"device", "host"}
    assert 0 < report["ttft_seconds"]["p50"] <= report["ttft_seconds"]["max"]
    assert report["steps"] * 0.001 < report["simulated_seconds"]


def test_the_pool_is_that_of_the_hardware_unless_it_is_given(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "replay", trace, "--hardware", "h100", "--json")
    assert json.loads(out)["pool_tokens"] == 426_496
    _, out, _ = run(capsys, "replay", trace, "--hardware", "h100", "--pool-tokens", "inf", "--json")
    assert json.loads(out)["pool_tokens"] == "inf"
    _, out, _ = run(capsys, "replay", trace, "--json")
    assert json.loads(out)["pool_tokens"] == "inf"


def test_people_read_times_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "replay", trace, "--hardware", "h100", "--speed", "10", "--host-tokens", "1M"
    )
    assert status == 0
    for row in ("simulated ", "first token ", "in the queue ", "preemptions ", "host tier "):
        assert re.search(f"^{row}", out, re.MULTILINE), row


def test_a_model_of_ones_own_brings_its_weights(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    fields = {
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "hidden_size": 512,
    }  # fmt: skip
    config.write_text(json.dumps(fields))
    argv = ("replay", trace, "--hardware", "h100", "--preset", config)
    status, _, err = run(capsys, *argv)
    assert status == 2
    assert "which is no preset: give --weights parameters=" in err
    status, _, _ = run(capsys, *argv, "--weights", "parameters=1G,query_heads=8")
    assert status == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host-tokens", "1M"), "--host-tokens needs --hardware"),
        (("--speed", "2"), "--speed needs --hardware"),
        (("--hardware", "x100"), "there is no hardware 'x100' .*choose one of a100, h100"),
        (("--hardware", "h100", "--speed", "0"), "--speed is 0.0: it must be above 0"),
        (("--hardware", "h100", "--speed", "nan"), "--speed is nan: it must be above 0"),
        (("--hardware", "h100", "--oracle", "bytes"), "not with --hardware"),
        (("--hardware", "h100", "--max-requests", "0"), "--max-requests is 0"),
        (("--hardware", "h100", "--preset", "deepseek-v3"), "no room beside the weights"),
        (("--hardware", "h100", "--pool-tokens", "2k"), "raise --pool-tokens to"),
        (
            ("--hardware", "h100", "--host-tokens", "1"),
            "capacity_bytes is 131072: one page of each",
        ),
        (("--hardware", "h100", "--weights", "parameters=1"), "has no query_heads"),
    ],
)
def test_what_cannot_be_ends_with_two_and_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "replay", trace, "--json", *flags)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def test_sessions_need_lanes_and_lanes_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = csv(tmp_path, SESSION_0504)
    status, _, err = run(capsys, "replay", sessions, "--hardware", "h100")
    assert status == 2
    assert "give --lanes" in err
    status, _, err = run(
        capsys, "replay", sessions, "--hardware", "h100", "--lanes", "1", "--speed", "2"
    )
    assert status == 2
    assert "whose sessions wait for their answers" in err
    status, out, _ = run(
        capsys, "replay", sessions, "--hardware", "h100", "--lanes", "1", "--hours", "1", "--json"
    )
    assert status == 0
    assert json.loads(out)["requests"] > 3


def test_the_help_says_when_a_scheduler_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Without --hardware there is no scheduler: each request is served alone" in text
    assert "With --hardware the engine's own scheduler serves them in simulated time" in text
