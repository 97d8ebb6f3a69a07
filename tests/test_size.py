"""`kvcache size`: the command, from the arguments to the last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache import cli
from kvcache.presets import model, names, preset

KEYS = {"bytes_per_token", "bytes_per_boundary", "window_bytes", "grid_tokens", "padding_waste"}


def size(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["size", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report: dict[str, Any] = json.loads(out)
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["size", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", names())
def test_every_preset_is_reported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for tp in ("1", "8"):
        report = size(capsys, name, "--tp", tp)
        assert set(report) >= KEYS
        assert report["grid_tokens"] <= 128
        assert report["padding_waste"] <= 0.05
        assert report["sources"] == list(model(name).sources)
        assert report["unverified"] == list(model(name).unverified)
        per_group = report["groups"]
        assert sum(g["bytes_per_token"] for g in per_group) == report["bytes_per_token"]
        assert sum(g["boundary_bytes"] for g in per_group) == report["bytes_per_boundary"]
        parts = ("state_bytes", "window_bytes", "pooling_bytes")
        assert sum(report[part] for part in parts) == report["bytes_per_boundary"]


@pytest.mark.parametrize("name", names())
def test_the_tables_fit_in_100_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [],
        ["--tp", "8", "--dcp", "4", "--memory", "141GB", "--interval", "dense"],
        ["--context", "1,10M", "--memory", "16TiB", "--kv-dtype", "fp8"],
    ):
        assert cli.main(["size", name, *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        assert any(line.startswith("suggested interval") for line in lines)
        assert not any(line != line.rstrip() for line in lines)


def test_kimi_k3_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(capsys, "kimi-k3")
    assert report["bytes_per_token"] == 27_648
    assert report["bytes_per_boundary"] == report["state_bytes"] == 449_372_160
    assert report["boundary_as_tokens"] == pytest.approx(16_253, abs=1)
    assert (report["window_bytes"], report["grid_tokens"]) == (0, 128)
    assert report["padding_waste"] == pytest.approx(0.0002, abs=1e-4)
    assert [g["pages_per_slab"] for g in report["groups"]] == [127, 1]


def test_what_a_session_takes_running_and_cached(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(
        capsys, "kimi-k3", "--context", "100000", "--interval", "16384", "--memory", "80GB"
    )
    (session,) = report["contexts"]
    assert session["context_tokens"] == 100_000
    page, state = 128 * 27_648, 449_372_160
    assert session["running"] == {
        "pages": {"mla": 782, "kda": 2},
        "bytes": 782 * page + 2 * state,
    }
    geometry = preset("kimi-k3")
    # 782 pages in slabs of 127, two slabs of one state each
    assert session["smallest_arena_bytes"] == (7 + 2) * geometry.slab_bytes
    # Six multiples of 16,384, and the end of the session
    assert session["cached"] == {
        "pages": {"mla": 781, "kda": 7},
        "boundaries": 7,
        "bytes": 781 * page + 7 * state,
    }
    slabs = 80_000_000_000 // geometry.slab_bytes
    assert report["memory_slabs"] == slabs == 177
    running, cached = (session["sessions_that_fit"][k] for k in ("running", "cached"))
    assert -(-running * 782 // 127) + 2 * running <= slabs
    assert -(-(running + 1) * 782 // 127) + 2 * (running + 1) > slabs
    assert -(-cached * 781 // 127) + 7 * cached <= slabs
    assert -(-(cached + 1) * 781 // 127) + 7 * (cached + 1) > slabs


def test_contexts_are_repeatable_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(capsys, "llama-3-8b", "--context", "8k,128k", "--context", "1M")
    tokens = [session["context_tokens"] for session in report["contexts"]]
    assert tokens == [8_000, 128_000, 1_000_000]
    assert [session["sessions_that_fit"] for session in report["contexts"]] == [None] * 3


def test_ranks_formats_and_blocks_reach_the_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(
        capsys, "kimi-k3", "--tp", "8", "--dcp", "8", "--kv-dtype", "fp8", "--block-tokens", "32"
    )
    assert report["bytes_per_token"] == 13_824 / 8
    assert report["bytes_per_boundary"] == 449_372_160 // 8
    assert (report["block_tokens"], report["grid_tokens"]) == (32, 256)
    assert any("grid is 256 tokens" in note for note in report["notes"])


@pytest.mark.parametrize(("dcp", "block", "grid"), [(1, 128, 128), (4, 32, 128), (16, 16, 256)])
def test_the_default_page_keeps_the_grid_at_128_where_it_can(
    dcp: int, block: int, grid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = size(capsys, "kimi-k3", "--tp", "16", "--dcp", str(dcp))
    assert (report["block_tokens"], report["grid_tokens"]) == (block, grid)
    entries = size(capsys, "deepseek-v4-pro", "--tp", "16", "--dcp", str(dcp))
    assert (entries["block_tokens"], entries["grid_tokens"]) == (128, 128 * dcp)


@pytest.fixture
def all_windows(tmp_path: Path) -> Path:
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_context_parallel_ranks_of_windows_alone_change_nothing(
    all_windows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, four = (size(capsys, str(all_windows), "--dcp", dcp) for dcp in ("1", "4"))
    assert (four["block_tokens"], four["grid_tokens"]) == (128, 128)
    assert [note.split(":")[0] for note in set(four["notes"]) - set(one["notes"])] == [
        "DCP 4 changes nothing"
    ]
    different = {key for key in one if one[key] != four[key]}
    assert different == {"dcp", "notes"}


def test_windows_alone_have_no_junctions(
    all_windows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing tells where prompts part: 18.2 M tokens are lost at interval 0, as `kvcache replay` says,
    and 4,096, the window, saves them all."""
    report = size(capsys, str(all_windows))
    assert report["suggested_interval"] == 4096
    assert report["interval_reasoning"]["reuse"]["distant_requests"] == 1377


def test_the_kv_that_a_config_states_is_sized(
    all_windows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = all_windows / "config.json"
    plain = size(capsys, str(path))
    config = json.loads(path.read_text())
    config["quantization_config"] = {"kv_cache_quant_algo": "FP8"}
    path.write_text(json.dumps(config))
    stated = size(capsys, str(path))
    assert stated["kv_dtype"] == "fp8"
    assert not any("states KV" in note for note in stated["notes"])
    assert 2 * stated["window_bytes"] == plain["window_bytes"]
    asked = size(capsys, str(path), "--kv-dtype", "bf16")
    assert asked["window_bytes"] == plain["window_bytes"]
    assert asked["notes"][0].startswith("the checkpoint states KV of another type, 'FP8'")


def test_context_parallel_ranks_beyond_the_copies_are_said_to_be_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "vLLM takes its context-parallel ranks among those that hold the same KV, {} at TP 8"
    notes = {
        name: size(capsys, name, "--tp", "8", "--dcp", dcp)["notes"]
        for name, dcp in (("kimi-k3", "8"), ("llama-3-8b", "2"), ("qwen3.5-35b", "4"))
    }
    assert not notes["kimi-k3"]
    assert said.format(1) in notes["llama-3-8b"][0]
    assert not any("context-parallel" in note for note in notes["qwen3.5-35b"])
    report = size(capsys, "qwen3.5-35b", "--tp", "8", "--dcp", "8")
    assert said.format(4) in report["notes"][0]


@pytest.mark.parametrize(
    ("name", "tp", "notes"),
    [
        ("llama-3-8b", "8", []),
        ("deepseek-v3", "3", []),
        (
            "llama-3-8b",
            "3",
            [
                (
                    "TP 3 does not divide the 8 KV heads of the group full: bytes are those of the rank"
                    " that has 3 of them, others have fewer; engines refuse such a TP"
                )
            ],
        ),
        (
            "kimi-k3",
            "7",
            [
                (
                    "TP 7 does not divide the 96 heads of the group kda: bytes are those of the rank that"
                    " has 14 of them, others have fewer; engines refuse such a TP"
                )
            ],
        ),
        (
            "llama-3-8b",
            "16",
            [
                (
                    "TP 16 is more than the 8 KV heads of the group full: each rank keeps one, several"
                    " the same, which costs a rank no less than TP 8"
                )
            ],
        ),
        (
            "gpt-oss-20b",
            "12",
            [
                f"TP 12 is more than the 8 KV heads of the group {group}: each rank keeps one,"
                " several the same, which costs a rank no less than TP 8; engines refuse a TP that"
                " 8 does not divide"
                for group in ("full", "window")
            ],
        ),
        (
            "nemotron-3-super",
            "16",
            [
                f"TP 16 is more than the {what}: each rank keeps one, several the same, which costs"
                f" a rank no less than TP {count}"
                for what, count in (
                    ("2 KV heads of the group full", 2),
                    ("8 state groups (n_groups) of the group mamba2", 8),
                )
            ],
        ),
    ],
)
def test_heads_that_ranks_do_not_share_evenly_are_noted(
    name: str, tp: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = size(capsys, name, "--tp", tp)["notes"]
    assert [note for note in found if not note.startswith("a prefill step")] == notes


def test_kv_heads_that_do_not_divide_the_query_heads_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (said,) = size(capsys, str(tmp_path))["unverified"]
    assert said.startswith("num_key_value_heads 5: it does not divide num_attention_heads 32")


def test_formats_are_told_as_they_are_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(capsys, "llama-3-8b")["kv_dtype"] == "bf16"
    assert size(capsys, "deepseek-v4-pro")["kv_dtype"] == "fp8_ds_mla"
    assert size(capsys, "deepseek-v4-pro", "--kv-dtype", "fp8")["kv_dtype"] == "fp8_ds_mla"
    report = size(capsys, "glm-5", "--kv-dtype", "fp8")
    assert report["kv_dtype"] == "fp8"
    assert "sparse MLA in fp8_ds_mla" in report["notes"][0]


def test_a_config_on_disk_is_sized_like_its_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = size(capsys, "llama-3-70b", "--tp", "4", "--memory", "40GB")
    for path in (tmp_path, tmp_path / "config.json"):
        report = size(capsys, str(path), "--tp", "4", "--memory", "40GB")
        assert report["read_from"] == "config"
        assert report["sources"] == [f"{tmp_path / 'config.json'}, model type llama"]
        own = ("model", "read_from", "sources")
        assert {k: v for k, v in report.items() if k not in own} == {
            k: v for k, v in known.items() if k not in own
        }


def test_what_a_config_leaves_open_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert len(size(capsys, str(path))["unverified"]) == 3
    assert cli.main(["size", str(path)]) == 0
    assert "not verified: head_dim 256: the file has none" in capsys.readouterr().out


def test_the_suggestion_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(capsys, "deepseek-v4-pro", "--tp", "8")
    reasoning = report["interval_reasoning"]
    assert report["suggested_interval"] == 4096
    assert reasoning["reuse"]["source"] == "500 recorded Claude Code sessions"
    assert reasoning["reuse"]["reuse_distance_tokens"] == {"p50": 768, "p90": 15360, "p99": 182144}
    assert [c["interval"] for c in reasoning["candidates"]] == [128 * 2**n for n in range(13)]
    assert "as large as 1,050 tokens of KV" in reasoning["text"]
    attention = size(capsys, "llama-3-8b")
    assert attention["suggested_interval"] == "dense"
    assert "dense costs nothing" in attention["interval_reasoning"]["text"]


def test_a_trace_decides_the_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of 64 blocks of 512, and others that leave it after 8, 16, ...: states each 4,096."""
    trunk = list(range(64))
    prompts = [trunk] + [[*trunk[:at], 1000 + at] for at in range(8, 64, 8)]
    lines = [
        json.dumps(
            {
                "timestamp": i,
                "input_length": 512 * len(ids),
                "output_length": 1,
                "hash_ids": ids,
            }
        )
        for i, ids in enumerate(prompts)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    report = size(capsys, "qwen3.5-9b", "--trace", str(path), "--memory", "80GB")
    reasoning = report["interval_reasoning"]
    assert reasoning["reuse"]["source"] == str(path)
    assert reasoning["reuse"]["requests"] == 8
    assert reasoning["reuse"]["distant_requests"] == 7
    assert reasoning["memory_bytes"] == 80_000_000_000
    assert report["suggested_interval"] == 4096
    assert reasoning["candidates"][0]["interval"] == 512


@pytest.mark.parametrize(
    ("block", "steps"), [("128", None), ("512", None), ("1024", None), ("96", "1,536")]
)
def test_reuse_on_another_grid_than_the_traces_is_said(
    block: str, steps: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [0, 1, 2, 3]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line) + "\n")
    report = size(capsys, "qwen3.5-9b", "--trace", str(path), "--block-tokens", block)
    found = [note for note in report["notes"] if "reuse is counted in steps" in note]
    assert len(found) == (steps is not None)
    assert steps is None or f"steps of {steps} tokens" in found[0]


def test_numbers_follow_from_the_trace_that_is_recorded(
    trace_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_dir / "mooncake_conversation.jsonl.gz"
    report = size(capsys, "kimi-k3", "--tp", "8", "--trace", str(path))
    reuse = report["interval_reasoning"]["reuse"]
    assert reuse["hit_tokens"] / reuse["prompt_tokens"] == pytest.approx(0.3734, abs=1e-4)


def test_a_memory_too_small_for_one_session_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = size(capsys, "kimi-k3", "--context", "1M", "--memory", "2GiB")
    assert report["contexts"][0]["sessions_that_fit"] == {"running": 0, "cached": 0}
    assert "no session of 1,000,000 tokens can run in this memory" in report["notes"][0]


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("80 GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("1.5GB", 1_500_000_000)],
)
def test_memory_has_units(text: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert size(capsys, "smollm2-135m", "--memory", text)["memory_bytes"] == count
    assert size(capsys, "smollm2-135m", "--memory", str(count))["memory_bytes"] == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["gpt-17"], "there is no preset 'gpt-17', and no config.json or folder of that path"),
        ([""], "there is no preset ''"),
        (["\0"], "there is no preset"),
        (["x" * 10_000], "there is no preset"),
        (["kimi-k3", "--tp", "0"], "tp is 0"),
        (["kimi-k3", "--tp", "x"], "argument --tp: 'x' is not a whole number"),
        (["kimi-k3", "--dcp", "-4"], "dcp is -4"),
        (["kimi-k3", "--kv-dtype", "fp4"], "invalid choice: 'fp4'"),
        (["llama-3-8b", "--kv-dtype", "fp8_ds_mla"], "fp8_ds_mla is a format of latent (MLA) rows"),
        (["kimi-k3", "--block-tokens", "0"], "is not a number of tokens"),
        (["deepseek-v4-pro", "--block-tokens", "64"], "multiple of the ratio, 128"),
        (
            ["kimi-k3", "--interval", "100"],
            "--interval 100 is neither dense, nor 0, nor a multiple",
        ),
        (["kimi-k3", "--interval", "-1"], "is not a number of tokens"),
        (["kimi-k3", "--context", "0"], "is not a number of tokens"),
        (["kimi-k3", "--context", "8k,,"], "is not a number of tokens"),
        (
            ["kimi-k3", "--context", "1000G"],
            "--context 1000000000000: a session has 1 to 1000000000 tokens",
        ),
        (["kimi-k3", "--memory", "80"], "is less than one slab"),
        (["kimi-k3", "--memory", "much"], "is not a number of bytes"),
        (["kimi-k3", "--memory", "9" * 40], "is not a number of bytes"),
        (["kimi-k3", "--memory", "1GB1"], "is not a number of bytes"),
        (["kimi-k3", "--trace", "missing.jsonl"], "missing.jsonl cannot be opened"),
        (["kimi-k3", "--trace", "trace.txt"], "the name must end in .jsonl"),
    ],
)
def test_what_does_not_work_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_broken_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "is not JSON" in refused(capsys, str(path))
    path.write_text(json.dumps({"model_type": "gpt-17"}))
    assert "model type 'gpt-17': what can be read is" in refused(capsys, str(path))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    assert "line 1" in refused(capsys, "kimi-k3", "--trace", str(trace))


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from kvcache.cli import main; main(['size', 'kimi-k3', '--json']);"
        " sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=120, text=True
    )
    assert json.loads(done.stdout)["bytes_per_token"] == 27_648
