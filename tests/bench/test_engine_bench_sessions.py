from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcache.bench.sessions import play_sessions, shuffled
from kvcache.bench.sessions_report import compare, reference_gap, sessions_report
from kvcache.bench.sessions_settings import WAYS, SessionsBench
from kvcache.bench.sessions_way import Played, Turn, Way
from kvcache.cli import main
from kvcache.core.errors import ConfigError
from kvcache.engine.chunk import Chunk
from kvcache.engine.model import Model
from kvcache.engine.request import Usage
from kvcache.engine.runner import TorchRunner
from kvcache.engine.smollm2 import load_model
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)

SMALL = SessionsBench(
    sessions=3,
    turns=2,
    start_tokens=64,
    turn_tokens=16,
    output_tokens=3,
    budget_tokens=64,
    allow_tmpfs=True,
)
KEYS = (
    "throughput_vs_recompute", "latency_vs_recompute", "host_vs_unlimited", "disk_vs_unlimited",
    "prefill_vs_dense", "decode_vs_padded", "outputs_equal",
)  # fmt: skip


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """A report of three sessions on the tiny model."""
    model = build_model()
    return sessions_report(SMALL, model, *play_sessions(SMALL, model, quiet))


def test_sizes_follow_from_the_sessions() -> None:
    bench = SessionsBench()
    assert bench.session_tokens == 1024 + 5 * 128 + 6 * 64 == 2048
    assert bench.working_set_tokens == 12 * 2048 == 3 * bench.pool_tokens
    assert bench.running == 4
    alone = SessionsBench(sessions=1)
    assert (alone.running, alone.pool_tokens) == (1, 2048)


def test_each_way_reuses_what_its_memory_allows(small: dict[str, Any]) -> None:
    ways = small["ways"]
    assert tuple(ways) == WAYS
    prompts = 3 * (64 + 64 + 3 + 16)
    for figures in ways.values():
        assert figures["prompt_tokens"] == prompts
        assert figures["output_tokens"] == 3 * 2 * 3
        found = figures["device_tokens"] + figures["restored_tokens"]
        assert figures["computed_tokens"] == prompts - found
        assert figures["failed_loads"] == 0
        assert figures["steps"] > 0
        assert 0 < figures["scheduler_and_manager_share"] < 1
        assert figures["hit_rate"] == found / prompts
    unlimited, host, disk, recompute, unthrottled = ways.values()
    assert unlimited["device_tokens"] == 3 * 64
    assert unlimited["restored_tokens"] == recompute["restored_tokens"] == 0
    for tier in (host, disk):
        assert tier["restored_tokens"] > 0
        assert tier["computed_tokens"] == unlimited["computed_tokens"]
        assert tier["tier"]["stored_bytes"] > 0
        assert tier["tier"]["loaded_bytes"] > 0
        assert tier["tier"]["failed_pages"] == 0
    assert unthrottled["device_tokens"] == unlimited["device_tokens"]
    assert unthrottled["steps"] < unlimited["steps"]
    assert unthrottled["device_pool_bytes"] == unlimited["device_pool_bytes"]
    assert recompute["computed_tokens"] > unlimited["computed_tokens"]
    assert unlimited["device_pool_bytes"] > host["device_pool_bytes"] > 0
    assert host["device_pool_bytes"] == disk["device_pool_bytes"] == recompute["device_pool_bytes"]


def test_sessions_ask_in_another_order_each_round_and_all_ways_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SessionsBench(sessions=8, seed=3)
    orders = [shuffled(bench, number) for number in range(6)]
    assert orders == [shuffled(bench, number) for number in range(6)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert shuffled(SessionsBench(sessions=8, seed=4), 0) != orders[0]
    asked: dict[str, list[Sequence[int]]] = {}
    ask = Way.ask

    def noted(way: Way, prompts: Sequence[NDArray[np.int32]], order: Sequence[int]) -> None:
        asked.setdefault(way.played.way, []).append(order)
        ask(way, prompts, order)
        assert list(way._open.values()) == order

    monkeypatch.setattr(Way, "ask", noted)
    play_sessions(SMALL, build_model(), quiet)
    assert asked == {way: [shuffled(SMALL, 0), shuffled(SMALL, 1)] for way in WAYS}


def test_ratios_are_those_of_the_figures(small: dict[str, Any]) -> None:
    ways = small["ways"]
    speed = {way: figures["output_tokens_per_second"] for way, figures in ways.items()}
    latency = {way: figures["mean_latency_seconds"] for way, figures in ways.items()}
    assert small["throughput_vs_recompute"] == pytest.approx(speed["host"] / speed["recompute"])
    assert small["latency_vs_recompute"] == pytest.approx(latency["host"] / latency["recompute"])
    assert small["host_vs_unlimited"] == pytest.approx(speed["host"] / speed["unlimited"])
    assert small["disk_vs_unlimited"] == pytest.approx(speed["disk"] / speed["unlimited"])
    assert small["host_vs_unthrottled"] == pytest.approx(speed["host"] / speed["unthrottled"])
    assert small["outputs_equal"] is True
    assert [o["way"] for o in small["outputs"]] == ["host", "disk", "recompute", "unthrottled"]


def test_an_engine_that_computes_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = TorchRunner.run
    slabs: list[int] = []

    def wrong(self: TorchRunner, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        best = compute(self, chunks)
        slabs.append(len(self.storage.arena))
        return best ^ 1 if len(self.storage.arena) < max(slabs) else best

    monkeypatch.setattr(TorchRunner, "run", wrong)
    model = build_model()
    report = sessions_report(SMALL, model, *play_sessions(SMALL, model, quiet))
    assert report["outputs_equal"] is False
    *small, unthrottled = report["outputs"]
    assert all(outputs["differences"] for outputs in small)
    assert not unthrottled["differences"]


def test_guesses_of_the_first_layers_change_no_output() -> None:
    weights = build_model().weights
    weights = replace(weights, layers=[weights.layers[i] for i in (1, 0, 3, 2)])
    for kv_dtype in ("fp32", "bf16"):
        model = Model(weights, kv_dtype=kv_dtype)
        bench = replace(SMALL, draft=1, output_tokens=8)
        asked, played, found = play_sessions(bench, model, quiet)
        report = sessions_report(bench, model, asked, played, found)
        assert (report["kv_dtype"], report["draft_layers"]) == (kv_dtype, 1)
        assert report["outputs_equal"] is True
        for figures in report["ways"].values():
            assert figures["proposed_tokens"] > 0
            assert figures["failed_loads"] == 0
            assert 0 < figures["scheduler_and_manager_share"] < 1
        assert report["ways"]["host"]["restored_tokens"] > 0
        plain, _, _ = play_sessions(replace(bench, draft=0), model, quiet)
        assert [p.tolist() for p in plain[1]] == [p.tolist() for p in asked[1]]


def play(way: str, output: list[int]) -> Played:
    return Played(way, 0, rounds=[[Turn(0, output, Usage(8, 2, 0, 0, 0), 0.1, 0.2)]])


def test_a_first_difference_counts_by_the_gap_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps: list[float] = [0.0009, 0.0011]
    seen: list[list[int]] = []

    def gap(model: Model, tokens: NDArray[np.int32]) -> float:
        seen.append(tokens.tolist())
        return gaps.pop(0)

    monkeypatch.setattr("kvcache.bench.sessions_report.reference_gap", gap)
    model, asked = build_model(), [[np.arange(3, dtype=np.int32)]]
    reference = play("unlimited", [5, 6])
    same = compare(model, asked, reference, play("host", [5, 6]))
    assert same == {"way": "host", "ties": [], "differences": []}
    tie = compare(model, asked, reference, play("host", [5, 7]))
    assert [(t["token"], t["reference_gap"]) for t in tie["ties"]] == [(1, 0.0009)]
    assert not tie["differences"]
    fault = compare(model, asked, reference, play("host", [9, 6]))
    assert [d["token"] for d in fault["differences"]] == [0]
    assert seen == [[0, 1, 2, 5], [0, 1, 2]]


def test_the_reference_gap_is_that_of_its_two_best_tokens() -> None:
    model = build_model()
    tokens = np.arange(40, dtype=np.int32)
    runner = Way("unlimited", SMALL, model, None, "")
    runner.ask([tokens], [0])
    engine_runner = runner._runner._runner
    while runner.left:
        runner._step()
        break  # the first step computes the whole prompt
    assert reference_gap(model, tokens) == pytest.approx(
        float(engine_runner.last_gaps[0]), abs=1e-4
    )


def test_one_json_object_with_all_keys(
    tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "tiny", "--tokens", "40", "--repeats", "1", "--threads", "1"]
    sizes = ["--sessions", "3", "--turns", "1", "--start-tokens", "48", "--output-tokens", "2"]
    folder = ["--folder", str(tmp_path), "--allow-tmpfs", "--json"]
    assert main(["bench", "engine", *arguments, *sizes, *folder]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(key in report for key in KEYS)
    assert report["outputs_equal"] is True
    assert list(tmp_path.iterdir()) == []
    output = tmp_path / "engine.json"
    output.write_text(json.dumps(report))
    script = repo_root / "docs" / "engine_table.py"
    done = subprocess.run(
        [sys.executable, script, output], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert "Outputs equal: yes." in lines[0]
    for name in KEYS[:-1]:
        (line,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        assert f"| {report[name]:.3f} |" in line
        assert ("missed" in line) is any(text.startswith(name) for text in report["missed"])
    assert f"| | {' | '.join(WAYS)} |" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sessions", "0"], "--sessions is 0: it must be 1 to 256"),
        (["--turns", "9999"], "--turns is 9999: it must be 1 to 256"),
        (["--start-tokens", "99999"], "the context of tiny-hybrid-0 is 32768"),
        (["--output-tokens", "0"], "--output-tokens is 0"),
        (["--draft", "1"], "--draft 1: group 'gdn' of the draft model is of kind 'mamba'"),
        (["--kv-dtype", "fp8", "--part", "all"], "--kv-dtype is fp8: the dense forward keeps fp32"),
        (["--part", "some"], "invalid choice: 'some'"),
        (["--folder", "/nowhere/at/all"], "--folder /nowhere/at/all cannot be used"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["bench", "engine", "--model", "tiny", "--part", "sessions", "--threads", "1"]
    assert main([*tiny, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_in_use_by_another_is_left_and_one_of_a_dead_process_is_not(
    tmp_path: Path,
) -> None:
    from kvcache.bench.folder import LOCK, PREFIX, temporary_folder  # noqa: PLC0415

    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / LOCK).touch()
    (dead / "page").write_bytes(b"left")
    strange = tmp_path / f"{PREFIX}strange"
    strange.mkdir()
    with temporary_folder(str(tmp_path)) as first:
        assert not dead.exists()
        with temporary_folder(str(tmp_path)) as second:
            assert first.is_dir()
            assert second.is_dir()
            assert first != second
    assert list(tmp_path.iterdir()) == [strange]
    with pytest.raises(ConfigError, match="cannot be used"), temporary_folder("/nowhere/at/all"):
        pass


def test_smollm2_is_restored_and_says_the_same(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    bench = SessionsBench(
        sessions=3,
        turns=2,
        start_tokens=48,
        turn_tokens=16,
        output_tokens=2,
        budget_tokens=64,
        allow_tmpfs=True,
    )
    report = sessions_report(bench, model, *play_sessions(bench, model, quiet))
    assert report["outputs_equal"] is True
    for way in ("host", "disk"):
        assert report["ways"][way]["restored_tokens"] > 0
        computed = report["ways"][way]["computed_tokens"]
        assert computed == report["ways"]["unlimited"]["computed_tokens"]
