"""Ours and a peer under the same stopwatch: two programs that take turns, one measurement at a time.

Both programs have the same questions (`kvcache.bench.manager_work`, `bench/peers/vllm_manager.py`)
and read the same tokens from a file. A peer's time is only compared with ours of the same run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.bench.agents_presets import comparison_model
from kvcache.bench.manager_work import TOKEN_DTYPE
from kvcache.bench.peer import SCRIPTS, Conversation, number
from kvcache.core.errors import KVCacheError
from kvcache.core.values import shown

OURS, PEER = "ours", "peer"
VOCABULARY = 150_000
_OUR_PROGRAM = (sys.executable, "-m", "kvcache.bench.manager_work")


class Side:
    """One of the two programs."""

    def __init__(self, name: str, conversation: Conversation) -> None:
        self.name, self._conversation = name, conversation

    @property
    def title(self) -> str:
        """What errors call it."""
        return self._conversation.name

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """One measurement. The peer is told a model as its groups, ours by name."""
        if self.name == PEER and "preset" in fields:
            fields["groups"] = comparison_model(fields.pop("preset")).peer_groups
        self._conversation.doing = f"when it was asked for {what!r}"
        return self._conversation.ask({"do": what, **fields})

    def require(self, answer: dict[str, Any], key: str, expected: int) -> None:
        """`KVCacheError` unless the side did what was asked of it: only equal work is compared."""
        if answer.get(key) != expected:
            raise KVCacheError(
                f"{self.title} answered {shown(answer)}: {key!r} must be {expected}; it did other"
                " work than it was asked for"
            )

    def number(self, answer: dict[str, Any], key: str) -> float:
        """A number of 0 or more in an answer. `KVCacheError` if there is none."""
        return number(answer, key, self.title)

    def seconds(self, answer: dict[str, Any], key: str = "seconds") -> float:
        """A time in an answer. `KVCacheError` if there is none, or it is 0."""
        if (seconds := self.number(answer, key)) == 0:
            raise KVCacheError(f"{self.title} answered {shown(answer)}: nothing takes no time")
        return seconds

    def list_of_seconds(self, answer: dict[str, Any], key: str) -> list[float]:
        """The same for several."""
        values = answer.get(key)
        if not isinstance(values, list) or not values:
            raise KVCacheError(f"{self.title} answered {shown(answer)}: {key!r} must be a list")
        return [self.seconds({key: value}, key) for value in values]


class Sides:
    """Ours, and the peer if there is one. `environments`: what each says of itself, by name."""

    def __init__(self, sides: Sequence[Side], tokens: Path) -> None:
        self._sides, self._turn = sides, 0
        self.environments = {side.name: side.ask("tokens", path=str(tokens)) for side in sides}

    @property
    def names(self) -> list[str]:
        """`OURS`, then `PEER` if there is one."""
        return [side.name for side in self._sides]

    def in_turn(self) -> list[Side]:
        """Every side once; the first one changes from call to call."""
        self._turn += 1
        return list(self._sides if self._turn % 2 else reversed(self._sides))

    def ask(self, what: str, **fields: Any) -> list[tuple[Side, dict[str, Any]]]:
        """The same measurement on each side, one after the other."""
        return [(side, side.ask(what, **fields)) for side in self.in_turn()]


@contextmanager
def open_sides(python: str, *, tokens: int, seed: int, deadline_seconds: float) -> Iterator[Sides]:
    """Start both programs, with a file of `tokens` random tokens; they end with the block.

    Args:
        python: the peer's; empty: no peer.
        deadline_seconds: for each program, from its start to its end.

    Raises:
        KVCacheError: a program failed or was not done in time, here or in the block.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-bench-"))
        path = Path(folder) / "tokens"
        draw = np.random.default_rng(seed)
        draw.integers(0, VOCABULARY, tokens, dtype=np.int32).astype(TOKEN_DTYPE).tofile(path)
        programs: dict[str, tuple[str, ...]] = {OURS: _OUR_PROGRAM}
        if python:
            programs[PEER] = (python, str(SCRIPTS / "vllm_manager.py"))
        conversations = {
            side: stack.enter_context(
                Conversation(
                    command,
                    name=_title(side, command),
                    deadline_seconds=deadline_seconds,
                )
            )
            for side, command in programs.items()
        }
        yield Sides(
            [Side(name, conversation) for name, conversation in conversations.items()], path
        )
        for conversation in conversations.values():
            conversation.doing = "at its end"
            conversation.finish()


def _title(side: str, command: Sequence[str]) -> str:
    return f"the peer ({command[0]} {Path(command[1]).name})" if side == PEER else "our own program"


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, mean, extremes and number of some measurements of one thing.

    A mean well above the median: something is paid for now and then, as when a table grows.
    """
    return {
        "median": statistics.median(samples),
        "mean": statistics.fmean(samples),
        "min": min(samples),
        "max": max(samples),
        "repeats": len(samples),
    }
