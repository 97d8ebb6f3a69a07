"""Aims of benchmarks: what is missed or failed is said, and decides how the command ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcache import cli
from kvcache.bench import aims, engine, manager_report, offload
from kvcache.commands import bench

LEAST, MOST = {"speed": 1.5, "other": 9.0}, {"latency": 0.5}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"speed": 1.5, "latency": 0.5}, []),
        ({"speed": 1.4994, "latency": 0.4}, ["speed 1.499, aim: at least 1.5"]),
        ({"latency": 0.501}, ["latency 0.501, aim: at most 0.5"]),
        ({}, []),
    ],
)
def test_missed_is_what_is_beyond_its_aim(figures: dict[str, float], expected: list[str]) -> None:
    assert aims.missed(figures, LEAST, MOST) == expected


@pytest.mark.parametrize(
    ("report", "status", "required", "last"),
    [
        ({}, 0, 0, ["a line"]),
        ({"missed": []}, 0, 0, ["a line", "All aims are reached."]),
        ({"missed": ["x", "y"], "failed": []}, 0, 1, ["a line", "missed: x", "missed: y"]),
        ({"missed": [], "failed": ["z"]}, 1, 1, ["failed: z", "All aims are reached."]),
    ],
)
def test_what_fails_ends_with_1_and_what_misses_only_where_that_is_required(
    report: dict[str, Any],
    status: int,
    required: int,
    last: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(bench.BENCHES, "copy", lambda *_: (report, ["a line"]))
    assert cli.main(["bench", "copy"]) == status
    assert capsys.readouterr().out.splitlines()[-len(last) :] == last
    assert cli.main(["bench", "copy", "--require", "--json"]) == required
    assert json.loads(capsys.readouterr().out) == report


def test_a_quick_run_is_not_held_against_the_aims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.BENCHES, "copy", lambda *_: ({"missed": ["x"]}, ["a line"]))
    assert cli.main(["bench", "copy", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a line"
    assert "missed: x" not in lines
    assert "for full size" in lines[-1]
    assert cli.main(["bench", "copy", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}
    assert cli.main(["bench", "copy", "--quick", "--require"]) == 2
    assert "leave out --quick" in capsys.readouterr().err


def test_only_what_has_aims_can_be_required_to_reach_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "disk", "--require"]) == 2
    owners = "`bench copy` and `bench engine` and `bench manager` and `bench offload`"
    assert f"--require is an option of {owners}, not of" in capsys.readouterr().err


def test_the_engine_fails_by_other_outputs_and_misses_by_its_figures() -> None:
    part = {"same_next_tokens": True, "max_logit_difference": 0.5}
    report: dict[str, Any] = {
        "prefill": part,
        "decode": part | {"same_next_tokens": False},
        "outputs": [{"way": "host", "differences": []}, {"way": "disk", "differences": [{}, {}]}],
    }
    assert engine._failed(report) == [
        (
            "decode: the paged engine has other next tokens than the dense forward, logits differ by up"
            " to 5.0e-01"
        ),
        "2 outputs over disk differ from those of the reference",
    ]
    assert engine._failed({}) == []
    assert engine.TARGETS == {
        "throughput_vs_recompute": 1.82,
        "host_vs_unlimited": 0.95,
        "disk_vs_unlimited": 0.9,
        "prefill_vs_dense": 0.85,
        "decode_vs_padded": 0.8,
    }
    assert engine.LIMITS == {
        "latency_vs_recompute": 0.53,
        "scheduler_and_manager_share": 0.02,
        "overload_share": 0.02,
    }


def test_a_repeated_lookup_of_up_to_a_million_tokens_has_an_aim() -> None:
    taken = {"host": {"repeated_seconds": 2.0e-4}, "disk": {"repeated_seconds": 2.1e-4}}
    missed = offload._missed_lookups(1_000_000, taken)
    assert missed == ["disk: repeated lookup of 1,000,000 tokens 210 us, aim: at most 200"]
    assert offload._missed_lookups(1_000_001, taken) == []


def test_the_manager_has_aims_at_the_full_size_alone() -> None:
    report: dict[str, Any] = {
        "tokens": 1_000_000,
        "decode_requests": 256,
        "ratios": {"free_1m_b16": 19.9, "decode_step_256": 39.0, "build_pool_1m": 50.0},
        "linearity": 2.2,
        "lookup_blocked_1m_ms": 0.25,
    }
    free, decode = (
        "free_1m_b16 19.900, aim: at least 20",
        "decode_step_256 39.000, aim: at least 40",
    )
    lookup = "lookup_blocked_1m_ms 0.250, aim: at most 0.2"
    assert manager_report.missed_aims(report) == [free, decode, lookup]
    assert manager_report.missed_aims(report | {"decode_requests": 255}) == [free, lookup]
    assert manager_report.missed_aims(report | {"tokens": 999_999}) == []
