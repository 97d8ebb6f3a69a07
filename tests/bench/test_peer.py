"""Conversations with programs that run beside ours: those that answer, and those that do not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvcache.bench import peer
from kvcache.bench.peer import Conversation, check_peer, check_seconds, number, peer_python
from kvcache.core.errors import ConfigError, KVCacheError

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"echo": json.loads(line)}), flush=True)
"""


def converse(text: str, *, seconds: float = 30) -> Conversation:
    command = [sys.executable, "-c", text]
    return Conversation(command, name="the program", deadline_seconds=seconds)


def to_the_end(program: Conversation, question: dict[str, Any]) -> None:
    program.ask(question)
    program.finish()


def said_by(text: str, *, seconds: float = 30, question: dict[str, Any] | None = None) -> str:
    """What the conversation ends with."""
    with converse(text, seconds=seconds) as program:
        program.doing = "at its question"
        with pytest.raises(KVCacheError) as caught:
            to_the_end(program, question or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_questions_and_answers_take_turns() -> None:
    with converse(ECHO) as program:
        for n in range(3):
            assert program.ask({"n": n}) == {"echo": {"n": n}}
        program.finish()


def test_what_is_no_json_object_is_passed_over() -> None:
    noise = r"""
import sys
out = sys.stdout.buffer
out.write(b"loading\n\n[1, 2]\n7\n{broken\n\xff\xfe\n" + b"[" * 100_000 + b"\n" + b'{"a": 1}\n')
"""
    with converse(noise) as program:
        assert program.hear() == {"a": 1}
        program.finish()


def test_a_long_question_and_a_long_answer_arrive() -> None:
    with converse(ECHO) as program:
        question = {"tokens": list(range(300_000))}
        assert program.ask(question) == {"echo": question}


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", "ended with status 0 at its question: it said nothing"),
        ("import sys; sys.exit(3)", "ended with status 3 at its question: it said nothing"),
        ("raise MemoryError('too many blocks')", "status 1 at its question: MemoryError: too many"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9 at its question"),
        (ECHO.replace("\n    print", "\n    sys.exit('tired')\n    print"), "its question: tired"),
        (
            "import sys; sys.stderr.buffer.write(b'bad \\xff byte\\n'); sys.exit(2)",
            "status 2 at its question: bad \N{REPLACEMENT CHARACTER} byte",
        ),
    ],
)
def test_a_program_that_ends_too_soon_is_named_with_its_last_words(text: str, end: str) -> None:
    assert end in said_by(text)


def test_a_program_that_fails_after_its_last_answer_has_failed() -> None:
    assert "status 1 at its question: late" in said_by(ECHO + "sys.exit('late')")


HANGS = {
    "says nothing": "import time; time.sleep(60)",
    "reads nothing": "import time; time.sleep(60) ",
    "prints for ever": "import sys\nwhile True: print('still loading')",
    "closed its output": "import os, time; os.close(1); time.sleep(60)",
    "left a child": (
        "import subprocess, sys;"
        " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    ),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_program_that_hangs_is_given_up_at_the_deadline(case: str) -> None:
    started = time.monotonic()
    question = {"much": "x" * (1 << 20 if case == "reads nothing" else 1)}
    error = said_by(HANGS[case], seconds=1.5, question=question)
    assert time.monotonic() - started < 30
    if case == "closed its output":
        assert "ended with status -9 at its question" in error
    else:
        assert "was given up at its question: its 1.5 s were over; --peer-seconds" in error


def test_a_line_without_an_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MAX_LINE_BYTES", 1 << 17)
    flood = "import sys\nwhile True: sys.stdout.write('{' * 65536)"
    assert "a line of more than 131072 bytes at its question" in said_by(flood)


def gone(pid: int) -> bool:
    """No process any more; one that nobody has waited for yet counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_program_and_its_children_end_with_the_conversation() -> None:
    text = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"pids": [os.getpid(), child.pid]}), flush=True)
time.sleep(60)
"""
    with converse(text) as program:
        pids = program.hear()["pids"]
        assert not any(map(gone, pids))
    deadline = time.monotonic() + 20
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert all(map(gone, pids))


@pytest.mark.parametrize("command", ["/nowhere/python", "py\0thon"])
def test_a_program_that_is_not_there_is_a_setting_to_change(command: str) -> None:
    with pytest.raises(ConfigError, match="--peer-python"):
        Conversation([command], name="the peer", deadline_seconds=1)


# ---- settings ------------------------------------------------------------------------------------


def test_the_environment_names_the_peers_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_PEER_PYTHON", "/env/python")
    assert peer_python("vllm", None) == "/env/python"
    assert peer_python("vllm", "/given/python") == "/given/python"
    assert peer_python(None, None) == ""
    with pytest.raises(ConfigError, match="--peer is 'sglang': choose from vllm"):
        peer_python("sglang", None)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_a_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--peer-seconds"):
        check_seconds(seconds)


@pytest.mark.parametrize("value", ["1", None, True, -1, float("nan"), float("inf"), [1]])
def test_a_figure_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(KVCacheError, match=r"the peer answered .*'seconds' must be a number"):
        number({"seconds": value}, "seconds", "the peer")


# ---- is the peer there ---------------------------------------------------------------------------


def test_a_python_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setattr(peer, "PROBE_SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.05 s"):
        check_peer(str(path), "vllm")


def test_a_python_with_the_module_is_taken_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit('imported')")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    check_peer(sys.executable, "vllm")
    with pytest.raises(ConfigError, match="no module vllm_of_nobody"):
        check_peer(sys.executable, "vllm_of_nobody")
    with pytest.raises(ConfigError, match="null byte"):
        check_peer("py\0thon", "vllm")
