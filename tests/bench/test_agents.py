"""`kvcache bench agents`: settings, report, command line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcache import cli
from kvcache.bench import agents, agents_peer, peer as peers
from kvcache.bench.agents import AgentsBench, describe, run_agents_bench
from kvcache.bench.agents_presets import PRESETS, Pools, peer_page_bytes
from kvcache.bench.agents_trace import AgentTrace
from kvcache.core.errors import ConfigError

SMALL = AgentTrace(
    sessions=3,
    turns=2,
    system_tokens=256,
    first_tokens=200,
    tool_tokens=150,
    output_tokens=20,
    seed=1,
    max_running=2,
)

PEER = """
import json, sys
asked = json.load(sys.stdin)
print(json.dumps({"vllm": "none"}), flush=True)
for run in asked["runs"]:
    size = 65536
    print(json.dumps({**run, "hit_rate": 0.25, "block_bytes": size}), flush=True)
"""


def pretend_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python finds a module vllm, which must not be imported."""
    (folder / "vllm.py").write_text("raise SystemExit('imported')")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(agents.TRACES, "short", SMALL)


def run(**settings: Any) -> dict[str, Any]:
    return run_agents_bench(AgentsBench(traces=("short",), **settings), lambda _: None)


# ---- geometries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state_bytes", ["block", "spec"])
@pytest.mark.parametrize("name", PRESETS)
def test_our_grid_is_fine_and_nothing_is_padded(name: str, state_bytes: str) -> None:
    geometry = PRESETS[name].geometry(state_bytes)
    assert geometry.grid_tokens <= 128
    assert max(geometry.padding()) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_both_sides_have_the_same_layers_and_bytes_per_token(name: str) -> None:
    preset = PRESETS[name]
    groups = preset.geometry("spec").groups
    assert len(groups) == len(preset.peer_groups)
    for ours, theirs in zip(groups, preset.peer_groups, strict=True):
        assert (ours.kind == "mamba") == (theirs["kind"] == "state")
        if theirs["kind"] == "state":
            assert ours.page_bytes == peer_page_bytes(theirs)
        else:
            peer_rate = peer_page_bytes(theirs) / theirs["block_tokens"]
            assert ours.page_bytes / ours.rules.block_tokens == peer_rate


@pytest.mark.parametrize("name", PRESETS)
def test_a_state_may_take_as_much_as_the_block_of_the_peer(name: str) -> None:
    preset = PRESETS[name]
    for group in preset.geometry("block").groups:
        if group.kind == "mamba":
            assert group.page_bytes == preset.block_bytes


# ---- the report ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_report_has_a_run_for_each_interval_and_declaration() -> None:
    report = run(presets=("mixed3",), blocks=(40,), check=True)
    (row,) = report["traces"]["short"]["pools"]
    assert row["pool_bytes"] == 40 * 524_288
    assert row["slabs"] * row["slab_bytes"] == row["pool_bytes"]
    kinds = [(r["interval"], r["declared"]) for r in row["ours"]]
    assert kinds == [(0, True), (0, False), (4096, True), (4096, False)]
    for figures in row["ours"]:
        ideal = row["ideal_declared" if figures["declared"] else "ideal_undeclared"]
        assert figures["hit_rate"] == pytest.approx(ideal)
        assert sum(figures["hits"]) == figures["hit_tokens"]
    assert json.loads(json.dumps(report)) == report
    lines = describe(report)
    assert len(lines) == 3
    assert "mixed3" in lines[2]


@pytest.mark.usefixtures("small")
def test_the_peer_stands_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    monkeypatch.setitem(agents_peer.ask_peer.__kwdefaults__, "script", script)
    pretend_vllm(tmp_path, monkeypatch)
    peer = {"peer": "vllm", "peer_python": sys.executable}
    report = run(presets=("gptoss",), blocks=(90, 200), **peer)
    assert report["peer"] == {"vllm": "none"}
    for row in report["traces"]["short"]["pools"]:
        assert [r["interval"] for r in row["peer"]] == [None, 0, 128]
    assert describe(report)[1].split()[-6:] == ["vLLM", "None", "vLLM", "0", "vLLM", "N"]
    assert describe(report)[2].split()[-3:] == ["25.00"] * 3
    with pytest.raises(ConfigError, match="the pools would not be equal"):
        run(presets=("mixed3",), blocks=(40,), **peer)


@pytest.mark.usefixtures("small")
def test_a_peer_that_stalled_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    stalled = '"hit_rate": 0.25, "requests": 4, "stalled": run["interval"] == 0'
    script.write_text(PEER.replace('"hit_rate": 0.25', stalled))
    monkeypatch.setitem(agents_peer.ask_peer.__kwdefaults__, "script", script)
    pretend_vllm(tmp_path, monkeypatch)
    report = run(presets=("gptoss",), blocks=(90,), peer="vllm", peer_python=sys.executable)
    (row,) = report["traces"]["short"]["pools"]
    assert [r["hit_rate"] for r in row["peer"]] == [0.25, None, 0.25]
    _, _, line, note = describe(report)
    assert line.split()[-3:] == ["25.00", "stalled", "25.00"]
    assert "gptoss, 90 blocks: vLLM 0 stalled after 4 of 6 requests" in note


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_verb_writes_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trace", "short", "--preset", "gptoss", "--blocks", "99", "--no-declare"]
    assert cli.main(["bench", "agents", *arguments, "--interval", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["traces"]["short"]["pools"]
    (figures,) = row["ours"]
    assert (figures["interval"], figures["declared"]) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gpt"], "--preset is 'gpt' (did you mean 'gptoss'?): choose from gptoss"),
        (
            ["--interval", "0", "--interval", "5"],
            "--interval is 5: it must be 0 or a multiple of gptoss's hit grid of 16 tokens",
        ),
        (["--interval", "-16"], "--interval is -16: it must be 0 or a multiple"),
        (["--peer", "vllm"], "--peer without --peer-python (or KVCACHE_PEER_PYTHON)"),
        (["--peer", "vllm"], "`make conformance` makes one: .venv-vllm/bin/python"),
        (["--peer", "vllm", "--peer-python", ""], "--peer without --peer-python"),
        (["--peer-python", "x"], "--peer-python without --peer"),
        (["--blocks", "99", "--blocks", "0"], "--blocks is 0: it must be above 1"),
        (["--interval", "9223372036854775792"], "--interval is 9223372036854775792: at most"),
        (["--model", "tiny"], "--model is an option of `bench engine`"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVCACHE_PEER_PYTHON", raising=False)
    assert cli.main(["bench", "agents", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [2, 2**31 - 1, 10**20])
@pytest.mark.usefixtures("small", "no_run")
def test_a_pool_that_cannot_be_is_named_with_those_that_can(
    blocks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", "short", "--preset", "gptoss", "--blocks", "99"]
    assert cli.main(["bench", "agents", *arguments, "--blocks", str(blocks)]) == 2
    err = capsys.readouterr().err
    assert f"--blocks is {blocks}: gptoss on the trace short" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_smallest_pool_that_an_error_names_is_enough(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS[preset].pools, "short", Pools((), None))
    monkeypatch.setitem(agents.TRACES, "short", SMALL)
    with pytest.raises(ConfigError, match="--blocks is 2") as error:
        run(presets=(preset,), blocks=(2,))
    named = re.search(r"from (\d+) to", str(error.value))
    assert named is not None
    least = int(named[1])
    with pytest.raises(ConfigError, match=f"--blocks is {least - 1}: .* from {least} to"):
        run(presets=(preset,), blocks=(least - 1,))
    report = run(presets=(preset,), blocks=(least,), intervals=(0,), declare=(True,), check=True)
    (row,) = report["traces"]["short"]["pools"]
    assert row["ours"][0]["requests"] == SMALL.sessions * SMALL.turns


@pytest.mark.parametrize("by", ["option", "environment", "script"])
@pytest.mark.usefixtures("small", "no_run")
def test_what_a_run_needs_is_not_replaced_by_its_output(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, output = tmp_path / "python", tmp_path / "link"
    python.write_text(NO_PYTHON)
    python.chmod(0o755)
    output.symlink_to(python)
    arguments = ["bench", "agents", "--output", str(output)]
    if by == "option":
        arguments += ["--peer", "vllm", "--peer-python", str(python)]
    elif by == "environment":
        monkeypatch.setenv("KVCACHE_PEER_PYTHON", "python")
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        python = tmp_path / "vllm_core.py"
        python.write_text(NO_PYTHON)
        output.unlink()
        output.symlink_to(python)
        monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    assert cli.main(arguments) == 2
    assert f"--output {output} is {python}, which is read" in capsys.readouterr().err
    assert python.read_text() == NO_PYTHON


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own side must not be played."""

    def play(*_: object, **__: object) -> NoReturn:
        raise AssertionError("played before the peer was asked")

    monkeypatch.setattr(agents._Traced, "play", play)


NO_PYTHON = "#!/bin/sh\necho hello\nexit 3\n"
PYTHONS: dict[str, tuple[str | None, str]] = {
    "missing": (None, "No such file"),
    "no program": ("", "Permission denied"),
    "no Python": (NO_PYTHON, "it is no Python (it ended with status 3)"),
    "another JSON": ("#!/bin/sh\necho 7\n", "it is no Python (it ended with status 0)"),
    "no vllm": (f'#!/bin/sh\nexec "{sys.executable}" -S -E -s "$@"\n', "it has no module vllm"),
}


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("case", PYTHONS)
@pytest.mark.usefixtures("small", "no_run")
def test_a_wrong_python_of_the_peer_is_named_in_one_line_before_anything_runs(
    case: str,
    by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, reason = PYTHONS[case]
    path = tmp_path / "python"
    if program is not None:
        path.write_text(program)
        path.chmod(0o755 if program else 0o644)
    option = ["--peer-python", str(path)] if by == "option" else []
    monkeypatch.setenv("KVCACHE_PEER_PYTHON", str(path) if not option else "/nowhere")
    assert cli.main(["bench", "agents", "--peer", "vllm", *option]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"--peer-python (or KVCACHE_PEER_PYTHON) is '{path}': {reason}" in said.err
    assert "give the Python of an environment that has vllm" in said.err
