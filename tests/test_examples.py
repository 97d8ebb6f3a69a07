from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EMBED = Path("examples") / "embed.py"
HYBRID = Path("examples") / "hybrid.py"


def toy_output(tokens: list[int], count: int) -> list[int]:
    """What the example's engine says if every KV number is the right one."""
    tokens = list(tokens)
    for _ in range(count):
        kv = [t * 31 % 1009 for t in tokens]
        tokens.append(sum(v * (i + 1) for i, v in enumerate(kv)) % 1000)
    return tokens[-count:]


@pytest.mark.parametrize("flags", [[], ["-O"]])  # -O: without asserts
def test_embed_gives_the_right_tokens_from_restored_pages(
    repo_root: Path, flags: list[str]
) -> None:
    run = subprocess.run(
        [sys.executable, *flags, str(repo_root / EMBED)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr == ""
    line = r"turn (\d) session (\d): (\d+) of (\d+) tokens cached, (\d+) of them .*output \[(.*)\]"
    found = re.findall(line, run.stdout)
    assert len(found) == len(run.stdout.splitlines()) == 9
    sessions = [[100 * s + i for i in range(80)] for s in range(3)]
    for turn, number, hit, length, restored, output in found:
        history = sessions[int(number)]
        wanted = toy_output(history, 4)
        assert [int(t) for t in output.split(",")] == wanted
        assert int(length) == len(history)
        assert (int(hit), int(restored)) == ((80, 80) if int(turn) else (0, 0))
        history += [*wanted, 7, 8, 9]


def test_embed_is_short_and_uses_the_public_api_alone(repo_root: Path) -> None:
    text = (repo_root / EMBED).read_text()
    assert len(text.splitlines()) < 80
    modules = set(re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE))
    assert modules == {
        "__future__",
        "numpy",
        "kvcache",
        "kvcache.connectors.cpu",
        "kvcache.connectors.driver",
    }
    assert "._" not in text
    assert "assert " not in text  # what a user meets is an error with a text


def test_events_keep_the_index_equal_to_the_manager(repo_root: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(repo_root / "examples" / "events.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr == ""
    hits = re.findall(r"session \d: (\d+) of 114 tokens", run.stdout)
    assert hits == ["0", "64", "64"]
    assert "BlockRemoved" in run.stdout
    found = re.search(r"the index knows (\d+) keys, the manager holds (\d+)", run.stdout)
    assert found
    assert found[1] == found[2] != "0"


def hybrid_output(tokens: list[int], count: int) -> list[int]:
    """What the hybrid example's engine says if every entry and state is the right one."""
    tokens = list(tokens)
    for _ in range(count):
        entries, state = [t * 31 % 1009 for t in tokens], 0
        for entry in entries:
            state = (state * 7 + entry) % 10_007
        full = sum(v * (i + 1) for i, v in enumerate(entries))
        tokens.append((full + 3 * sum(entries[-40:]) + state) % 1000)
    return tokens[-count:]


def test_hybrid_gives_the_right_tokens_though_pages_move_and_requests_are_preempted(
    repo_root: Path,
) -> None:
    run = subprocess.run(
        [sys.executable, str(repo_root / HYBRID)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert len(lines) == 3 + 12 + 1
    assert "state: pages of 1024 bytes, 1024 apart, 1 to a slab" in lines
    system = list(range(900, 948))
    sessions = [[*system, *range(100 * s, 130 * s + 20)] for s in range(4)]
    for line in lines[3:-1]:
        found = re.fullmatch(r"turn \d session (\d): (\d+) tokens, the last \[(.*)\]", line)
        assert found, line
        history = sessions[int(found[1])]
        wanted = hybrid_output(history, 20)
        assert [int(t) for t in found[3].split(",")] == wanted
        assert int(found[2]) == len(history) + 20
        history += [*wanted, 7, 8, 9]
    counts = dict(re.findall(r"([a-z()]+[a-z() ]*): (\d+)", lines[-1]))
    for what in ("pages moved", "tokens hit", "refused (preempt)", "refused (wait)"):
        assert int(counts[what]) > 0, lines[-1]


def test_hybrid_stands_on_the_public_api_alone(repo_root: Path) -> None:
    text = (repo_root / HYBRID).read_text()
    assert set(re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)) == {
        "__future__",
        "collections",
        "dataclasses",
        "numpy",
        "kvcache",
    }
    assert "manager._" not in text
    assert "assert " not in text
