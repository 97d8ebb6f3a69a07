"""`kvcache explain TRACE`: sums, the requests that lost most, one request, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from replays.command import run
from replays.naive import random_trace, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.jsonl", random_trace(5))


def test_json_has_the_replays_figures_and_the_requests_that_lost_most(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--pool-tokens", "10.24k", "--json")
    status, out, err = run(capsys, "explain", trace, "--top", 3, *flags)
    assert (status, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    replayed = json.loads(run(capsys, "replay", trace, *flags)[1])
    for field in ("requests", "prompt_tokens", "hit_tokens", "lost_tokens_by_cause"):
        assert report[field] == replayed[field]
    assert len(report["shown"]) == 3
    lost = []
    for request in report["shown"]:
        assert request["losses"][0]["start"] == request["hit_tokens"]
        assert request["losses"][-1]["end"] == request["prompt_tokens"]
        assert all(loss["words"] for loss in request["losses"])
        lost.append(
            sum(
                loss["end"] - loss["start"]
                for loss in request["losses"]
                if loss["cause"] != "last_block" and loss["evidence"].get("why") != "new"
            )
        )
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] > 0


def test_one_request_is_shown_by_its_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", trace, "--request", 7, "--json")
    report = json.loads(out)
    assert status == 0
    assert [request["line"] for request in report["shown"]] == [7]
    assert report["requests"] == 7
    status, out, err = run(capsys, "explain", trace, "--request", 10_000)
    assert (status, out) == (2, "")
    assert "--request 10000: none of the 60 replayed requests" in err


def test_without_json_it_is_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", trace, "--pool-tokens", "10.24k", "--top", 1)
    assert (status, err) == (0, "")
    assert "evicted" in out
    assert out.count("\nline ") == 1
    assert run(capsys, "explain", trace, "--top", 0)[1].count("line ") == 0


@pytest.mark.parametrize("top", ["-1", "10001"])
def test_a_wild_number_of_requests_is_refused(
    top: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "explain", trace, f"--top={top}")
    assert status == 2
    assert f"--top is {top}: it must be from 0 to 10000" in err


def test_other_requests_are_named_by_their_lines(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "explain", trace, "--json", "--top", 60)
    assert status == 0
    report = json.loads(out)
    evidence = [loss["evidence"] for shown in report["shown"] for loss in shown["losses"]]
    others = [e["other"]["handle"] for e in evidence if e.get("other")]
    assert len(others) > 5
    assert all(1 <= line <= report["requests"] for line in others)
