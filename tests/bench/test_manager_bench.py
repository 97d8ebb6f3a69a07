"""`kvcache bench manager` and `bench hash`: reports, peers that fail, the command line. No timings."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from peers import pretended as pretended_peer

from kvcache import cli
from kvcache.bench import hash as hash_bench, manager, sides
from kvcache.bench.hash import HashBench, run_hash_bench
from kvcache.bench.manager import ManagerBench, blocks_needed, run_manager_bench
from kvcache.bench.manager_report import ABOUT, LIMITS, TARGETS, describe
from kvcache.bench.manager_work import Work, decode_step, hash_with_hashlib
from kvcache.core.errors import ConfigError, KVCacheError
from kvcache.core.hashing import hash_chain

pytestmark = pytest.mark.long

TINY = {"tokens": 1024, "requests": 3, "repeats": 2}
DECODE = [f"decode_step_{name}" for name in manager.DECODE_PRESETS]
OURS_ALONE = {"chunked_prefill_2m_dsv4"}


def run(**settings: Any) -> dict[str, Any]:
    said: list[str] = []
    report = run_manager_bench(ManagerBench(**{**TINY, **settings}), said.append)
    assert said
    assert json.loads(json.dumps(report)) == report
    return report


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Settings of a run beside our own manager, which this Python takes for vLLM."""

    def install(question: str = "", fault: str = "") -> dict[str, Any]:
        pretended_peer.install(tmp_path, question, fault)
        (tmp_path / "vllm.py").write_text("raise SystemExit('imported')")
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setattr(sides, "SCRIPTS", tmp_path)
        return {"peer": "vllm", "peer_python": sys.executable}

    return install


# ---- reports -------------------------------------------------------------------------------------


def test_without_a_peer_all_of_ours_is_measured() -> None:
    report = run()
    assert (report["tokens"], report["pool_blocks"]) == (1024, 1024)
    assert (report["ratios"], report["peer"]) == ({}, None)
    assert set(report["work"]) == set(ABOUT)
    for name, row in report["work"].items():
        assert set(row) == {"unit", "ours"}
        figures = row["ours"]
        assert 0 < figures["min"] <= figures["median"] <= figures["max"], name
    repeats = {name: row["ours"]["repeats"] for name, row in report["work"].items()}
    assert repeats["allocate_commit_1m_b16"] == repeats["free_1m_b16"] == manager.PROMPTS
    assert repeats["bytes_per_cached_block"] == repeats["bytes_per_held_block"] == 1
    assert repeats["lookup_hit_1m_b16"] == repeats["lookup_blocked_1m"] == 2
    assert report["linearity"] > 0
    assert report["lookup_blocked_1m_ms"] > 0
    assert set(report["bytes_per_block"]["ours"]) == {
        "pool", "records", "keys_and_tables", "closed",
    }  # fmt: skip


def test_the_peer_stands_beside_ours(pretended: Callable[..., dict[str, Any]]) -> None:
    report = run(**pretended())
    expected = set(ABOUT) - OURS_ALONE | {"decode_step_256"}
    assert set(report["ratios"]) == expected
    assert set(TARGETS) < expected
    assert report["targets"] == TARGETS
    assert report["limits"] == LIMITS
    for name in set(ABOUT) - OURS_ALONE:
        row = report["work"][name]
        assert report["ratios"][name] == row["peer"]["median"] / row["ours"]["median"]
        assert row["peer"]["repeats"] == row["ours"]["repeats"]
    assert report["ratios"]["decode_step_256"] == min(report["ratios"][name] for name in DECODE)
    assert report["peer"]["sha256"] == report["ours"]["sha256"]


def test_people_get_a_line_for_each_work(pretended: Callable[..., dict[str, Any]]) -> None:
    report = run(**pretended())
    report = {**report, "peer": {"vllm": "0.0"}}
    lines = describe(report)
    assert lines[1].split() == ["ours", "vLLM", "0.0", "ratio"]
    for line, text in zip(lines[2:], ABOUT.values(), strict=False):
        assert line.startswith(text)
    assert lines[-1].startswith("bytes for each block, peer: pool ")
    assert any("as long as N (no aim at this size)" in line for line in lines)


def test_only_a_run_of_full_size_is_held_against_what_is_aimed_at(
    pretended: Callable[..., dict[str, Any]],
) -> None:
    report = run(**pretended())
    ratios = {**report["ratios"], "lookup_hit_1m_b16": 20.0, "free_1m_b16": 19.9}
    full = {**report, "peer": {"vllm": "0.0"}, "ratios": ratios, "tokens": 1_000_000}
    full |= {"linearity": 2.1, "lookup_blocked_1m_ms": 0.25}
    lines = describe(full)
    assert lines[1].split() == ["ours", "vLLM", "0.0", "ratio", "at", "least"]
    (lookup,) = (line for line in lines if line.startswith("full-hit"))
    (free,) = (line for line in lines if line.startswith("free"))
    assert lookup.split()[-2:] == ["20.0", "20"]
    assert free.split()[-3:] == ["19.9", "20", "missed"]
    (verdict,) = (line for line in lines if line.startswith("2N"))
    assert verdict.endswith("as long as N (at most 2.2)")
    (verdict,) = (line for line in lines if line.startswith("a blocked request"))
    assert verdict.endswith("in 0.250 ms (at most 0.2, missed)")
    (decode,) = (line for line in lines if line.startswith("decode step"))
    assert "40" not in decode.split()  # of another batch
    lines = describe({**full, "decode_requests": 256})
    (decode,) = (line for line in lines if line.startswith("decode step"))
    assert "40" in decode.split()


def test_a_run_without_a_peer_has_no_columns_of_one() -> None:
    lines = describe(run(requests=1, repeats=1))
    assert lines[1].split() == ["ours"]
    (lookup,) = (line for line in lines if line.startswith("full-hit"))
    assert re.fullmatch(r"full-hit .* hashes known +[0-9.]+ [mun]?s", lookup)


def test_the_least_number_of_requests_fits() -> None:
    assert run(requests=1, repeats=1)["decode_requests"] == 1


def test_hashes_are_measured_for_every_block_size(
    pretended: Callable[..., dict[str, Any]],
) -> None:
    report = run_hash_bench(HashBench(tokens=1000, repeats=2, **pretended()), lambda _: None)
    names = [f"{n}_b{b}" for n in hash_bench.NAMES for b in (4, 16, 128, 256)]
    assert list(report["rates"]) == names
    assert list(report["ratios"]) == [n for n in names if not n.startswith("kvcache")]
    for name, ratio in report["ratios"].items():
        ours = report["rates"][f"kvcache_b{name.rpartition('_b')[2]}"]
        assert ratio == report["rates"][name]["median"] / ours["median"]
        assert report["rates"][name]["tokens_per_second"] == 1000 / report["rates"][name]["median"]
    lines = hash_bench.describe(report)
    assert [line.split()[0] for line in lines[2:]] == list(hash_bench.NAMES)


def test_hashlib_alone_is_the_baseline_without_a_peer() -> None:
    report = run_hash_bench(HashBench(tokens=256, repeats=1), lambda _: None)
    assert list(report["ratios"]) == [f"hashlib_b{b}" for b in (4, 16, 128, 256)]
    assert report["peer"] is None


# ---- the work ------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Work:
    path = tmp_path / "tokens"
    np.random.default_rng(1).integers(0, 1000, 60_000).astype("<i4").tofile(path)
    work = Work()
    work.tokens(str(path))
    return work


def test_a_pool_fills_hits_evicts_and_blocks(work: Work) -> None:
    work.open_pool("full16", 256)
    for number in range(4):
        assert work.prefill(number * 1024, 1024)["evicted"] == 0
    assert [work.lookup(n * 1024, 1024)["hit_tokens"] for n in range(5)] == [1008] * 4 + [0]
    assert work.prefill(8 * 1024, 1024)["evicted"] == 64
    work.churn(8, 256, 16)
    assert work.lookup(8 * 1024, 1024)["hit_tokens"] == 0
    assert work.prefill(9 * 1024, 1024)["evicted"] == 64
    holders = [(20_000, 16 * 99), (30_000, 16 * 98 + 1)]  # 198 of 256 pages
    answer = work.blocked(9 * 1024, 1024, holders, 3)
    assert answer["hit_tokens"] == 16 * (58 - 3)
    assert len(answer["seconds"]) == len(answer["evicting_seconds"]) == 3
    pool = work._pool
    pool.check()
    assert pool.stats().open_requests == 0


@pytest.mark.parametrize("preset", manager.DECODE_PRESETS)
def test_a_decode_step_moves_every_request_on_by_one_token(work: Work, preset: str) -> None:
    prompts = [(n * 1000, 300 + n) for n in range(3)]
    blocks = 3 * blocks_needed(preset, 2000)
    work.open_batch(preset, blocks, prompts)
    pool, batch = work._pool, work._batch
    work.decode(5)
    decode_step(pool, np.array(batch), np.ones(3, np.int64), np.zeros(3, np.int32))
    for handle, (_, count) in zip(batch, prompts, strict=True):
        info = pool.info(handle)
        assert (info.tokens, info.computed) == (count + 7, count + 6)
    pool.check()


@pytest.mark.parametrize("count", [1024, 5000])
def test_a_prompt_in_chunks_is_computed_to_its_end(work: Work, count: int) -> None:
    work.chunked("dsv4", blocks_needed("dsv4", count), 0, count, 512)
    pool = work._pool
    assert pool.stats().open_requests == 1
    handle = pool.open(work._prompt(0, count))
    assert pool.lookup(handle).hit_tokens >= (count - 1) // 512 * 512
    pool.check()


def test_memory_counts_a_full_pool(work: Work) -> None:
    found = work.memory("full16", 192, [(n * 1024, 1024) for n in range(3)])
    assert found["keys"] == 192
    assert work._pool.arena_stats().classes[0].cached == 192


def test_the_plain_chain_hashes_the_tokens_of_every_full_block() -> None:
    tokens = np.arange(100, dtype=np.int32)
    chain = hash_with_hashlib(tokens, 16)
    assert len(set(chain)) == len(chain) == 6
    assert hash_with_hashlib(tokens[:96], 16) == chain
    assert chain[1:] != hash_with_hashlib(tokens[16:], 16)
    assert len(hash_chain(bytes(32), tokens, 16)) == 6


# ---- peers that fail -----------------------------------------------------------------------------


FAULTS = [
    (
        "tokens",
        "die",
        "ended with status 1 when it was asked for 'tokens': the pretended peer dies",
    ),
    ("prefill", "die", "ended with status 1 when it was asked for 'prefill'"),
    ("build", "garbage", "'seconds' must be a number of 0 or more"),
    ("build", "zero", "nothing takes no time"),
    ("decode", "empty", "'seconds' must be a number"),
    ("blocked", "garbage", "'hit_tokens' must be 896; it did other work"),
    ("lookup", "more", "'hit_tokens' must be 1008; it did other work"),
    ("prefill", "more", "'evicted' must be 0"),
    ("memory", "more", "'keys' must be 1024"),
]


@pytest.mark.parametrize(("question", "fault", "message"), FAULTS)
def test_a_peer_that_fails_is_a_named_error(
    question: str, fault: str, message: str, pretended: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(KVCacheError) as caught:
        run(**pretended(question, fault))
    assert "the peer (" in str(caught.value)
    assert message in str(caught.value)


def test_a_peer_that_hangs_is_given_up(pretended: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(KVCacheError, match=r"was given up when it was asked for 'hash'.*5 s"):
        run_hash_bench(
            HashBench(tokens=256, repeats=1, peer_seconds=5, **pretended("hash", "hang")),
            lambda _: None,
        )


def test_a_peer_that_hashes_less_is_not_compared(pretended: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(KVCacheError, match="'blocks' must be 64; it did other work"):
        run_hash_bench(
            HashBench(tokens=256, repeats=1, **pretended("hash", "more")), lambda _: None
        )


# ---- vLLM ----------------------------------------------------------------------------------------


def test_vllm_does_the_same_work(require: Callable[[str, str], NoReturn]) -> None:
    python = os.environ.get("KVCACHE_VLLM_PYTHON") or os.environ.get("KVCACHE_PEER_PYTHON")
    if not python:
        require("vllm", "KVCACHE_VLLM_PYTHON names no Python of an environment with vllm 0.33.0")
    peer = {"peer": "vllm", "peer_python": python}
    report = run(**peer)
    assert report["peer"]["vllm"] == "0.33.0"
    assert set(TARGETS) < set(report["ratios"])
    hashes = run_hash_bench(HashBench(tokens=1024, repeats=1, **peer), lambda _: None)
    assert {f"vllm_sha256_b{b}" for b in (4, 16, 128, 256)} < set(hashes["ratios"])


# ---- the command line ----------------------------------------------------------------------------


def test_the_verb_writes_one_json_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    small = ["--quick", "--tokens", "1024", "--requests", "2", "--repeats", "1"]
    assert cli.main(["bench", "manager", *small, "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == report
    assert (report["tokens"], report["decode_requests"], report["repeats"]) == (1024, 2, 1)
    assert cli.main(["bench", "hash", "--tokens", "256", "--repeats", "1", "--seed", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_quick_run_is_small_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def keep(bench: object, _: object) -> NoReturn:
        seen.append(bench)
        raise ConfigError("enough")

    monkeypatch.setattr(manager, "run_manager_bench", keep)
    assert cli.main(["bench", "manager", "--quick", "--tokens", "2048", "--seed", "3"]) == 2
    assert seen == [ManagerBench(tokens=2048, requests=64, repeats=3, seed=3)]
    monkeypatch.setattr(hash_bench, "run_hash_bench", keep)
    assert cli.main(["bench", "hash", "--quick", "--repeats", "2"]) == 2
    assert seen[1:] == [hash_bench.HashBench(tokens=65_536, repeats=2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["manager", "--tokens", "0"], "--tokens is 0: give a number from 1024 to 1048576"),
        (["manager", "--tokens", "1025"], "--tokens is 1025: give a multiple of 16"),
        (["manager", "--requests", "0"], "--requests is 0"),
        (["manager", "--repeats", "99"], "--repeats is 99: give a number from 1 to 50"),
        (["manager", "--peer", "vllm"], "--peer without --peer-python (or KVCACHE_PEER_PYTHON)"),
        (["manager", "--peer-seconds", "0"], "--peer-seconds is 0: give a number above 0"),
        (["manager", "--preset", "dsv4"], "--preset is an option of `bench agents`, not of"),
        (["hash", "--tokens", "8"], "--tokens is 8: give a number from 256"),
        (["hash", "--repeats", "0"], "--repeats is 0"),
        (["hash", "--peer-python", "x"], "--peer-python without --peer"),
        (
            ["agents", "--quick"],
            "--quick is an option of `bench copy` and `bench engine` and `bench hash`",
        ),
        (["engine", "--peer", "vllm"], "`bench agents` and `bench hash` and `bench manager`"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVCACHE_PEER_PYTHON", raising=False)
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["hash", "manager"])
def test_a_python_without_vllm_is_named_before_anything_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E -s "$@"\n')
    path.chmod(0o755)
    assert cli.main(["bench", name, "--peer", "vllm", "--peer-python", str(path)]) == 2
    assert f"is '{path}': it has no module vllm" in capsys.readouterr().err
