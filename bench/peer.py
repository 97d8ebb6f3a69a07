"""A peer: a program that runs beside ours, is told in lines of JSON what to do, and answers in them.

vLLM runs under the Python of an environment of its own; `bench/peers/` has the programs. Whatever
the program does (it dies, hangs, prints something else), the conversation ends with a named error.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcache.core.errors import ConfigError, KVCacheError
from kvcache.core.values import shown

PEERS = ("vllm",)
PYTHON_VARIABLE = "KVCACHE_PEER_PYTHON"
PYTHON_SETTING = f"--peer-python (or {PYTHON_VARIABLE})"
SCRIPTS = Path(__file__).parent / "peers"

PEER_SECONDS = 3600.0
"""The longest conversation, from the start of the program to its end."""

PROBE = """
import importlib.util, json, sys
print(json.dumps({"peer": importlib.util.find_spec(sys.argv[1]) is not None}))
"""
PROBE_SECONDS = 60.0

MAX_LINE_BYTES = 1 << 26
"""Longer lines are no answers."""
_LAST_WORDS_BYTES = 1 << 16


def peer_python(peer: str | None, python: str | None) -> str:
    """The Python of the peer: as given, else by the environment; empty without a peer.

    Raises:
        ConfigError: an unknown peer, a Python without a peer, or a peer without a Python.
    """
    if peer is None:
        if python is not None:
            raise ConfigError("--peer-python without --peer: name the peer, or leave both out")
        return ""
    if peer not in PEERS:
        raise ConfigError(f"--peer is {peer!r}: choose from {', '.join(PEERS)}")
    if found := python or os.environ.get(PYTHON_VARIABLE, ""):
        return found
    raise ConfigError(f"--peer without {PYTHON_SETTING}: {python_advice(peer)}")


def check_seconds(seconds: float) -> None:
    """`ConfigError` unless a conversation can be that long."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--peer-seconds is {seconds:g}: give a number above 0")


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


class Conversation:
    """One run of a program that answers in JSON, one object a line. A context manager.

    Lines that are no JSON object are passed over: libraries print. The program and all that it
    started in its process group are killed at the end, whatever happened.

    Args:
        command: the program and its arguments.
        name: what errors call it.
        deadline_seconds: for the whole conversation.
        setting: what gives it more time.

    Raises:
        ConfigError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        deadline_seconds: float,
        setting: str = "--peer-seconds gives it more time",
    ) -> None:
        self.name, self._seconds, self._setting = name, deadline_seconds, setting
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(  # noqa: S603 (the program is the user's own choice)
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._complaints.close()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{name} cannot be started: {reason}: give the Python of an environment that has it"
                f" by {PYTHON_SETTING}"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)
        self._end = time.monotonic() + deadline_seconds
        self._read = bytearray()
        self.doing = "before its first answer"
        """When errors happened, in their words; the caller keeps it up to date."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()
        self._process.wait()
        for stream in (self._input, self._output, self._complaints):
            with suppress(OSError):
                stream.close()

    def tell(self, question: dict[str, Any], *, last: bool = False) -> None:
        """Write one line. `last`: and end the program's input. A dead program is `hear`'s to name."""
        line = memoryview((json.dumps(question) + "\n").encode())
        try:
            while line:
                self._wait(self._input.fileno(), select.POLLOUT)
                line = line[os.write(self._input.fileno(), line) :]
            if last:
                self._input.close()
        except BrokenPipeError:
            pass

    def hear(self) -> dict[str, Any]:
        """The next object.

        Raises:
            KVCacheError: the program ended instead, or the deadline passed.
        """
        while True:
            line = self._line()
            if line is None:
                raise self._ended()
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(answer, dict):
                return answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Tell, then hear."""
        self.tell(question)
        return self.hear()

    def finish(self) -> None:
        """End the input and see the program end well; what it still says is passed over.

        Raises:
            KVCacheError: it ended with another status than 0, or not before the deadline.
        """
        with suppress(OSError):
            self._input.close()
        while self._line() is not None:
            pass
        if self._status():
            raise self._ended()

    # ---- bytes ---------------------------------------------------------------------------------

    def _wait(self, fileno: int, event: int) -> None:
        poll = select.poll()
        poll.register(fileno, event)
        left = self._end - time.monotonic()
        if left <= 0 or not poll.poll(math.ceil(1000 * left)):
            raise KVCacheError(
                f"{self.name} was given up {self.doing}: its {self._seconds:g} s were over;"
                f" {self._setting}"
            )

    def _line(self) -> bytes | None:
        """None: the program closed its output."""
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > MAX_LINE_BYTES:
                raise KVCacheError(
                    f"{self.name} wrote a line of more than {MAX_LINE_BYTES} bytes {self.doing}:"
                    " it is no peer of this benchmark"
                )
            self._wait(self._output.fileno(), select.POLLIN)
            part = os.read(self._output.fileno(), 1 << 16)
            if not part:
                return None
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    # ---- the end -------------------------------------------------------------------------------

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _status(self) -> int:
        """Of a program that has closed its output: it may still be cleaning up."""
        left = max(0.0, self._end - time.monotonic())
        try:
            return self._process.wait(left)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _ended(self) -> KVCacheError:
        return KVCacheError(
            f"{self.name} ended with status {self._status()} {self.doing}: {self._last_words()}"
        )

    def _last_words(self) -> str:
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _LAST_WORDS_BYTES))
        text = self._complaints.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def number(answer: dict[str, Any], key: str, who: str) -> float:
    """A number of 0 or more in an answer. `KVCacheError` if there is none under `key`."""
    value = answer.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise KVCacheError(f"{who} answered {shown(answer)}: {key!r} must be a number of 0 or more")
    return value
