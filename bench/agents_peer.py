"""The peer of the agent benchmark: vLLM's block manager, in an environment of its own.

`bench/peers/vllm_core.py` is run by the Python that has vLLM. It is told the trace, token by token,
and the runs; it answers with a line for each of them as it is done.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from kvcache.bench.agents_trace import AgentRequest
from kvcache.core.errors import ConfigError, KVCacheError

PYTHON_VARIABLE = "KVCACHE_PEER_PYTHON"
PYTHON_SETTING = f"--peer-python (or {PYTHON_VARIABLE})"

SCRIPT = Path(__file__).parent / "peers" / "vllm_core.py"


PROBE = """
import importlib.util, json, sys
print(json.dumps({"peer": importlib.util.find_spec(sys.argv[1]) is not None}))
"""
PROBE_SECONDS = 60.0


def python_advice(module: str) -> str:
    """Where a Python that has the peer comes from."""
    return (
        f"give the Python of an environment that has {module} (`make conformance` makes one:"
        " .venv-vllm/bin/python)"
    )


def check_peer(python: str, module: str, *, setting: str = PYTHON_SETTING) -> None:
    """Asks `python` whether it finds the peer's module, without importing it. Under a second.

    Args:
        python: the program.
        module: what it must have.
        setting: what the user gave `python` by.

    Raises:
        ConfigError: it cannot be started, is no Python, or has no such module.
    """
    setting, advice = f"{setting} is {python!r}", python_advice(module)
    try:
        done = subprocess.run(  # noqa: S603 (the program is the user's own choice)
            [python, "-c", PROBE, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting}: {reason}; {advice}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{setting}: it did not answer within {PROBE_SECONDS:g} s; {advice}"
        ) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])["peer"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{setting}: it is no Python (it ended with status {done.returncode}); {advice}"
        ) from None
    if answer is not True:
        raise ConfigError(f"{setting}: it has no module {module}; {advice}")


def ask_peer(
    python: str,
    requests: Sequence[AgentRequest],
    runs: Sequence[dict[str, Any]],
    *,
    max_running: int,
    step_tokens: int,
    progress: Callable[[dict[str, Any]], None],
    script: Path = SCRIPT,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let the peer play a trace once for each run; returns its environment and its figures.

    Blocks until the peer has ended. `progress` gets each run's figures as they arrive.

    Raises:
        ConfigError: `python` is no program that can be started.
        KVCacheError: the peer failed; the message ends with the last line it wrote.
    """
    question = {
        "trace": [[r.session, r.prompt.tolist(), r.output.tolist()] for r in requests],
        "max_running": max_running,
        "step_tokens": step_tokens,
        "runs": list(runs),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
        try:
            peer = subprocess.Popen(  # noqa: S603 (the program is the user's own choice)
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                encoding="utf-8",
            )
        except OSError as error:
            raise ConfigError(
                f"the peer's Python {python!r}: {error.strerror or error}; {python_advice('vllm')}"
            ) from error
        with peer:
            try:
                answers = _converse(peer, json.dumps(question), progress)
            except BaseException:
                peer.kill()
                raise
        if peer.returncode or len(answers) != len(runs) + 1:
            raise KVCacheError(
                f"the peer ({python} {script.name}) ended with status {peer.returncode} after"
                f" {max(0, len(answers) - 1)} of {len(runs)} runs: {_last_line(complaints)}"
            )
    return answers[0], answers[1:]


def _converse(
    peer: subprocess.Popen[str], question: str, progress: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Ask, then read one object a line; the first is the environment."""
    answers: list[dict[str, Any]] = []
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        peer.stdin.write(question)  # the peer reads all of it before it does anything else
        peer.stdin.close()
    except BrokenPipeError:
        return answers
    for line in peer.stdout:
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # libraries that the peer loads may print
        if isinstance(answer, dict):
            answers.append(answer)
            if len(answers) > 1:
                progress(answer)
    return answers


def _last_line(complaints: IO[str]) -> str:
    complaints.seek(0)
    lines = [line.strip() for line in complaints if line.strip()]
    return lines[-1] if lines else "it said nothing"
