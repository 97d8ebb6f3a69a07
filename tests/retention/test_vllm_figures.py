"""The figures of vLLM in docs/retention.md, "Beside vLLM 0.33.0": measured anew with vLLM itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SYSTEM, TURN, PARTS = (
    "shared system prompt of 5,000",
    "prompt 6,000, reply 1,500, next turn",
    "20,000, then prompts that part at 12,000, 1,500, 5,000, 8,500, 19,000",
)
WINDOWS, STATES = ("gptoss", "gemma3"), ("kimi_k3", "mixed3")

ROWS = {
    "shared system prompt of 5,000 tokens": (
        "hit by the 3rd request; windows by the 2nd at denser intervals, states at none"
    ),
    "prompt of 6,000, reply of 1,500": (
        "to the end of the *prompt* (5,888 with states); 7,424 if all is kept"
    ),
    "interval of 1,024, prompt of 20,000": "states exist at chunk ends only: 8,192",
}
"""What the page says of vLLM, by the beginning of the row: what is asserted below."""


def test_the_page_says_what_is_measured_here(repo_root: Path) -> None:
    page = (repo_root / "docs" / "retention.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    for scene, figure in ROWS.items():
        (said,) = (theirs.strip() for ours, theirs in rows if ours.strip().startswith(scene))
        assert said == figure


def measured(printed: str) -> dict[tuple[str, str, str], list[int]]:
    """Hits by scene, model and interval."""
    found: dict[tuple[str, str, str], list[int]] = {}
    scene = ""
    for line in printed.splitlines():
        if head := re.fullmatch(r"(.*) \(vLLM 0\.33\.0\): tokens hit by each request", line):
            scene = head[1]
        elif run := re.fullmatch(r"  (\w+), interval (\w+): (\[.*\])", line):
            found[scene, run[1], run[2]] = json.loads(run[3])
    return found


@pytest.mark.timeout(900)
def test_vllm_hits_what_the_page_says(repo_root: Path, require: Callable[[str, str], None]) -> None:
    python = os.environ.get("KVCACHE_VLLM_PYTHON", "")
    if not python:
        require("vllm", "KVCACHE_VLLM_PYTHON names no Python of an environment with vllm 0.33.0")
    done = subprocess.run(
        [sys.executable, "docs/vllm_retention.py", python],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hits = measured(done.stdout)
    assert len(hits) == 3 * len(WINDOWS + STATES) * 3

    for model in WINDOWS + STATES:
        assert hits[SYSTEM, model, "0"] == [0, 0, 4992, 4992]
    for interval in ("None", "1024"):
        assert [hits[SYSTEM, model, interval][1] > 0 for model in WINDOWS] == [True, True]
        assert [hits[SYSTEM, model, interval][1] for model in STATES] == [0, 0]

    assert [hits[TURN, model, "0"][1] for model in WINDOWS] == [5984, 5984]
    assert [hits[TURN, model, "0"][1] for model in STATES] == [5888, 5888]
    assert [hits[TURN, model, "None"][1] for model in STATES] == [7424, 7424]

    assert [hits[PARTS, model, "1024"][1] for model in STATES] == [8192, 8192]


USAGE = "usage: vllm_retention.py PYTHON"
WITHOUT = f'#!/bin/sh\nexec "{sys.executable}" -S -E -s "$@"\n'
BROKEN = """#!/bin/sh
case "$1" in
  -c) echo '{"peer": true}' ;;
  *) echo "ImportError: vllm is broken" >&2; exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("program", "arguments", "status", "reason"),
    [
        (None, [], 2, USAGE),
        (None, ["one", "two"], 2, USAGE),
        (None, ["PATH"], 2, "PYTHON is 'PATH': No such file"),
        ("#!/bin/sh\necho hello\n", ["PATH"], 2, "PYTHON is 'PATH': it is no Python"),
        (WITHOUT, ["PATH"], 2, "PYTHON is 'PATH': it has no module vllm"),
        (
            BROKEN,
            ["PATH"],
            1,
            "ended with status 3 after 0 of 12 runs: ImportError: vllm is broken",
        ),
    ],
    ids=["nothing", "too much", "missing", "no Python", "no vllm", "broken vllm"],
)
def test_a_python_that_will_not_do_is_one_line(
    repo_root: Path,
    tmp_path: Path,
    program: str | None,
    arguments: list[str],
    status: int,
    reason: str,
) -> None:
    path = tmp_path / "python"
    if program is not None:
        path.write_text(program)
        path.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "docs/vllm_retention.py",
            *(a.replace("PATH", str(path)) for a in arguments),
        ],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.count("\n") == 1
    assert reason.replace("PATH", str(path)) in done.stderr
    assert "--peer-python" not in done.stderr
    assert status == 1 or "`make conformance` makes one" in done.stderr
