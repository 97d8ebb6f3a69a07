"""`kvcache replay`: its flags, its JSON, its table, its exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replays.command import run
from replays.files import SESSION_0504, csv
from replays.naive import BLOCK, naive_lru, random_trace, write_trace

from kvcache.bench.replay_settings import fitting_block
from kvcache.bench.traces import TraceRequest
from kvcache.commands.numbers import pool_size, retention, token_count

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 128,
}
"""A config.json."""


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "nan",
        "",
        "1.5",
        "0.0001k",
        "1e9",
        "12Q",
        "k",
        "_1",
        "\u0665",
        "1" * 40,
        "infinity",
    ],
)
def test_other_token_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a number of tokens.*or inf"):
        pool_size(text)


def test_inf_dense_and_zero_are_words_of_their_flags_only() -> None:
    assert pool_size("inf") is None
    assert retention("dense") is None
    assert retention("0") == 0
    for text in ("inf", "dense", "0"):
        with pytest.raises(argparse.ArgumentTypeError):
            token_count(text)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.jsonl", random_trace(5))


def test_json_is_one_object_with_all_figures(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("replay", trace, "--pool-tokens", "10.24k", "--check", "--json", "--seed", 7)
    status, out, err = run(capsys, *argv)
    report = json.loads(out)
    assert (status, err) == (0, "")
    expected: dict[str, Any] = {
        "requests": 60,
        "block_tokens": 512,
        "pool_tokens": 10_240,
        "leaked_blocks": 0,
    }
    expected |= {"retention": 0, "seed": 7, "checks": 61, "preemptions": 0}
    assert report == report | expected
    assert report["hit_tokens"] == sum(naive_lru(random_trace(5), 1, 20))
    assert report["hit_rate"] == report["hit_tokens"] / report["prompt_tokens"]
    assert report["hit_rate_by_source"] == {"device": report["hit_rate"]}
    assert report["peak_used_bytes"] == 20 * BLOCK * 128 * 1024
    assert 0 < report["manager_seconds"] < report["cpu_seconds"]
    assert report["explain_seconds"] + report["manager_seconds"] < report["cpu_seconds"]
    assert report["wall_seconds"] > 0
    for field in ("ideal_hit_rate", "lost_tokens_by_cause", "checkpoints_per_request", "trace"):
        assert field in report


def test_no_moves_leaves_cached_pages_where_they_are(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("replay", trace, "--preset", "qwen3.5-9b", "--retention", 0, "--pool-tokens", "30k")
    moved = [json.loads(run(capsys, *argv, "--json", *flags)[1]) for flags in ((), ("--no-moves",))]
    assert [report["movable"] for report in moved] == [True, False]
    assert moved[0]["moved_pages"] > 0
    assert moved[1]["moved_pages"] == 0


def test_a_preset_may_be_a_config_and_has_the_ranks_and_formats_of_size(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    rates, bytes_ = {}, {}
    for preset in ("llama-3-8b", tmp_path):
        for dtype in ("auto", "fp8"):
            argv = ("replay", trace, "--preset", preset, "--kv-dtype", dtype, "--tp", 2, "--dcp", 2)
            status, out, _ = run(capsys, *argv, "--pool-tokens", "20k", "--json")
            assert status == 0
            report = json.loads(out)
            assert (report["dcp"], report["kv_dtype"]) == (2, "bf16" if dtype == "auto" else dtype)
            rates[preset, dtype], bytes_[preset, dtype] = report["hit_rate"], report["slab_bytes"]
    assert len(set(rates.values())) == 1
    assert bytes_["llama-3-8b", "auto"] == 2 * bytes_["llama-3-8b", "fp8"]
    assert bytes_["llama-3-8b", "auto"] == bytes_[tmp_path, "auto"]


def test_without_json_a_table_is_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("replay", trace, "--preset", "qwen3.5-9b", "--retention", 0, "--pool-tokens", "20k")
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    assert "hit rate" in out
    assert "states kept" in out
    assert len(out.splitlines()) < 20


@pytest.mark.parametrize(
    ("preset", "tokens"), [("llama-3-8b", 64), ("deepseek-v4-pro", 128), ("kimi-k3", 64)]
)
def test_pages_are_as_small_as_the_trace_and_the_model_allow(preset: str, tokens: int) -> None:
    assert fitting_block(64, preset=preset) == tokens


def test_output_is_the_same_json_as_on_stdout(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", trace, "--json", "--output", tmp_path / "o.json")
    assert status == 0
    assert (tmp_path / "o.json").read_text() == out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-tokens", "100"), "--block-tokens 100 .*is not a multiple of the trace's block"),
        (("--tp", "0"), "--tp is 0: it must be from 1 to 4096"),
        (("--tp", "4097"), "--tp is 4097: it must be from 1 to 4096"),
        (("--tp", "1000000000"), "--tp is 1000000000: it must be from 1 to 4096"),
        (
            ("--block-tokens", "512G"),
            r"with pages of 512000000000 tokens \(--block-tokens\): group",
        ),
        (("--tp", "x"), "--tp: 'x' is not a whole number"),
        (("--oracle", "lru"), "--oracle: invalid choice"),
        (("--pool-tokens", "-1"), "'-1' is not a number of tokens"),
        (("--pool-tokens", "0"), "'0' is not a number of tokens"),
        (("--pool-tokens", "nan"), "'nan' is not a number of tokens"),
        (
            ("--pool-tokens", "2k"),
            "line 3: 2048 prompt and 99 output tokens need .* raise --pool-tokens to",
        ),
        (("--preset", "x"), "there is no preset 'x', and no config.json .*llama-3-8b, .*qwen3"),
        (("--preset", "llama3-8b"), "there is no preset 'llama3-8b' .did you mean 'llama-3-8b'"),
        (("--dcp", "0"), "--dcp is 0: it must be from 1 to 4096"),
        (("--kv-dtype", "fp8_ds_mla"), "fp8_ds_mla is a format of latent"),
        (("--retention", "100"), "--retention 100"),
        (("--retention", "some"), "'some' is not"),
        (("--retention", "1000000000000000"), "--retention 1000000000000000 is neither .* up to"),
        (("--pool-tokens", "1000000000000000"), "--pool-tokens 1000000000000000 takes .* give"),
        (("--hours", "1"), "--hours 1.0 needs --lanes"),
        (("--lanes", "2"), "--lanes replays live sessions"),
        (("--lanes", "0"), "--lanes is 0"),
        (("--lanes", "x"), "--lanes: 'x' is not a whole number"),
        (("--output",), "expected one argument"),
    ],
)
def test_wrong_usage_ends_with_two_one_line_and_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    blocks = np.arange(4, dtype=np.int64)
    sizes = ((1, 512, 1), (2, 512, 1), (3, 2048, 99))
    requests = [TraceRequest(i, 0.0, "", 0, n, o, blocks[: n // 512]) for i, n, o in sizes]
    trace = write_trace(tmp_path / "t.jsonl", requests)
    status, out, err = run(capsys, "replay", trace, "--json", *flags)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


@pytest.mark.parametrize("read", ["t.jsonl", "link.jsonl"])
@pytest.mark.parametrize("written", ["t.jsonl", "link.jsonl", "hard.jsonl", "x/../t.jsonl"])
def test_the_trace_is_not_replaced_by_the_output(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], read: str, written: str
) -> None:
    (tmp_path / "link.jsonl").symlink_to(trace)
    (tmp_path / "hard.jsonl").hardlink_to(trace)
    (tmp_path / "x").mkdir()
    before, argv = trace.read_bytes(), ("replay", tmp_path / read, "--output", tmp_path / written)
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert "which is read and would be replaced: give another file" in err
    assert err.startswith("kvcache: --output ")
    assert err.count("\n") == 1
    assert trace.read_bytes() == before


def test_a_broken_trace_ends_with_two_and_leaves_the_output_file_alone(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace.open("a") as stream:
        stream.write('{"timestamp": 99, "input_length": -4}\n')
    output = tmp_path / "o.json"
    output.write_text("old")
    status, out, err = run(capsys, "replay", trace, "--json", "--output", output)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvcache: {trace}, line 61: no field 'output_length'")
    assert output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json", "t.jsonl"]


@pytest.mark.parametrize("flags", [("--json",), ()])
def test_a_reader_who_has_left_does_not_take_the_output_file_along(
    flags: tuple[str, ...], trace: Path, tmp_path: Path
) -> None:
    output = tmp_path / "o.json"
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "kvcache.cli", "replay", str(trace), "--output", str(output)]
    done = subprocess.run(
        [*argv, *flags], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    assert json.loads(output.read_text())["requests"] == 60


def test_a_full_disk_under_the_output_file_ends_with_two(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "replay", trace, "--json", "--output", "/dev/full")
    assert status == 2
    assert json.loads(out)["requests"] == 60
    assert "/dev/full: No space left on device" in err


def test_the_kv_of_a_config_is_followed_or_noted(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(algorithm: str) -> tuple[dict[str, Any], str]:
        quantised = SMALL | {"quantization_config": {"kv_cache_quant_algo": algorithm}}
        (tmp_path / "config.json").write_text(json.dumps(quantised))
        flags = ("replay", trace, "--preset", tmp_path)
        return json.loads(run(capsys, *flags, "--json")[1]), run(capsys, *flags)[1]

    report, text = replay("FP8")
    assert (report["kv_dtype"], report["notes"]) == ("fp8", [])
    assert report["bytes_per_page"] == {"full": 2 * 2 * 2 * 64 * 512}
    assert "TP 1, KV fp8," in text
    report, text = replay("NVFP4")
    assert report["kv_dtype"] == "bf16"
    assert report["bytes_per_page"] == {"full": 2 * 2 * 2 * 64 * 512 * 2}
    (note,) = report["notes"]
    assert "'NVFP4' (kv_cache_quant_algo)" in note
    assert re.search(rf"^note +{re.escape(note)}$", text, re.MULTILINE)


def test_the_output_is_none_of_the_files_that_the_preset_is_read_from(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text("{}")
    for preset in (tmp_path, config):
        for output in (config, beside):
            argv = ("replay", trace, "--preset", preset, "--output", output)
            status, out, err = run(capsys, *argv)
            assert (status, out) == (2, "")
            assert f"--output {output} is" in err
    assert json.loads(config.read_text()) == SMALL


def test_a_pool_that_is_too_small_is_told_what_is_enough_for_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        TraceRequest(n, float(n), "", 0, 512 * blocks + 1, 1, np.arange(blocks, dtype=np.int64))
        for n, blocks in enumerate((1, 3, 9, 2), 1)
    ]
    trace = write_trace(tmp_path / "t.jsonl", requests)
    status, _, err = run(capsys, "replay", trace, "--preset", "qwen3.5-9b", "--pool-tokens", "5k")
    assert status == 2
    assert (
        "line 2: 1537 prompt and 1 output tokens need 4 slabs with their windows and states" in err
    )
    least = re.search(r"or more, (\d+) for the largest request of the trace", err)
    assert least
    argv = ("replay", trace, "--preset", "qwen3.5-9b", "--json", "--pool-tokens")
    assert run(capsys, *argv, least[1])[0] == 0
    assert run(capsys, *argv, int(least[1]) - 512)[0] == 2
    assert (
        f", {least[1]} for the largest request"
        in run(capsys, "explain", *argv[1:], int(least[1]) - 512)[2]
    )


def test_conditions_of_a_replay_in_lanes_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = csv(tmp_path, SESSION_0504)
    flags = ("--lanes", 1, "--hours", 4, "--dcp", 3)
    report = json.loads(run(capsys, "replay", trace, *flags, "--json")[1])
    text = run(capsys, "replay", trace, *flags)[1]
    warm_up = report["played_requests"] - report["requests"]
    assert warm_up > 0
    assert f"in 1 lanes and 4 hours, lines played again among them; {warm_up} before" in text
    assert "blocks of 64 tokens, hits on multiples of 192" in text
    plain = run(capsys, "replay", trace)[1]
    assert "lanes" not in plain
    assert "checks" not in plain
    assert "hits on multiples" not in plain
