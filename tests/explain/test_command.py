"""`kvcache explain TRACE`: sums, the requests that lost most, one request, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replays.command import run
from replays.files import SESSION_0504, csv
from replays.naive import random_trace, write_trace

from kvcache.bench.traces import TraceRequest


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


def test_requests_are_chosen_by_a_cause(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--pool-tokens", "10.24k", "--top", 60, "--json")
    everything = json.loads(run(capsys, "explain", trace, *flags)[1])["shown"]

    def evicted(request: dict[str, Any]) -> int:
        return sum(
            loss["end"] - loss["start"] for loss in request["losses"] if loss["cause"] == "evicted"
        )

    expected = sorted(
        (-evicted(request), request["request"]) for request in everything if evicted(request)
    )
    assert 1 < len(expected) < 60
    shown = json.loads(run(capsys, "explain", trace, *flags, "--cause", "evicted")[1])["shown"]
    assert [(-evicted(request), request["request"]) for request in shown] == expected
    status, out, _ = run(capsys, "explain", trace, "--cause", "elsewhere", "--json")
    assert (status, json.loads(out)["shown"]) == (0, [])


def test_one_request_is_shown_by_its_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "explain", trace, "--request", 7, "--json")
    report = json.loads(out)
    assert status == 0
    assert [(r["request"], r["line"]) for r in report["shown"]] == [(7, 7)]
    assert report["requests"] == 7
    status, out, err = run(capsys, "explain", trace, "--request", 10_000)
    assert (status, out) == (2, "")
    assert f"--request 10000: {trace} has 60 requests to replay" in err


def test_without_json_it_is_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", trace, "--pool-tokens", "10.24k", "--top", 1)
    assert (status, err) == (0, "")
    assert "evicted" in out
    assert out.count("\nrequest ") == 1
    assert run(capsys, "explain", trace, "--top", 0)[1].count("(line ") == 0


@pytest.mark.parametrize("top", ["-1", "10001"])
def test_a_wild_number_of_requests_is_refused(
    top: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "explain", trace, f"--top={top}")
    assert status == 2
    assert f"--top is {top}: it must be from 0 to 10000" in err


def test_other_requests_are_named_by_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ([0, 1, 2], [5, 6], [0, 1, 3], [5, 7])
    requests = [
        TraceRequest(line, float(line), "", 0, 512 * len(path) + 1, 1, np.array(path, np.int64))
        for line, path in enumerate(paths, 1)
    ]
    trace = write_trace(tmp_path / "t.jsonl", requests)
    shown = json.loads(run(capsys, "explain", trace, "--json")[1])["shown"]
    others = {r["request"]: [loss["evidence"].get("other") for loss in r["losses"]] for r in shown}
    named = {n: {o["request"] for o in found if o} for n, found in others.items()}
    assert named == {1: set(), 2: set(), 3: {1}, 4: {2}}
    words = run(capsys, "explain", trace, "--request", 4)[1]
    assert "request 4 (line 4): 512 of 1,025 tokens were hit" in words
    assert "request 2 (closed" in words


def test_a_line_that_is_played_twice_is_two_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = csv(tmp_path, SESSION_0504)
    flags = ("--lanes", 1, "--hours", 4, "--top", 60, "--json")
    shown = json.loads(run(capsys, "explain", trace, *flags)[1])["shown"]
    lines = [request["line"] for request in sorted(shown, key=lambda r: r["request"])]
    assert lines.count(4) > 2
    differs = [r for r in shown if any(loss["evidence"].get("other") for loss in r["losses"])]
    assert [r["line"] for r in differs] == [4] * len(differs)
    assert len(differs) > 2
    for request in differs:  # from another row of the same play, not of an earlier one
        (other,) = {
            loss["evidence"]["other"]["request"]
            for loss in request["losses"]
            if loss["evidence"].get("other")
        }
        assert other in (request["request"] - 1, request["request"] - 2)


def test_requests_of_the_warm_up_are_said_to_be_numbered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = csv(tmp_path, SESSION_0504)
    flags = ("--lanes", 1, "--hours", 4)
    report = json.loads(run(capsys, "explain", trace, *flags, "--json")[1])
    warm_up = report["played_requests"] - report["requests"]
    assert warm_up > 0
    first = run(capsys, "explain", trace, *flags)[1].splitlines()[0]
    assert first == f"{warm_up} requests of the warm-up are numbered too, and in no sum"
    assert "warm-up" not in run(capsys, "explain", trace)[1]
