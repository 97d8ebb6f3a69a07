"""What outlives the first process: its sessions go on in a second one, asked from here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.demo.script import DemoSettings, Kit
from kvcache.bench.demo.turn import Turn
from kvcache.bench.peer import Conversation
from kvcache.core.errors import KVCacheError
from kvcache.core.values import shown
from kvcache.engine.request import Usage

PROGRAM = (sys.executable, "-m", "kvcache.bench.demo.second_process")
SECONDS = 1800.0
"""The second process at its longest."""


class Restart(NamedTuple):
    """One turn more of every session: restored by a new process, and recomputed."""

    process: int
    """Its number, as the system has it."""
    disk_bytes: int
    """Of the pages that the disk had when the process opened it."""
    device_bytes: int
    start_seconds: float
    """From the start of its program until the model was loaded and the folder open."""
    restarted: list[Turn]
    recomputed: list[Turn]


class SecondProcess:
    """A context manager: the process ends with it, whatever happened.

    Raises:
        KVCacheError: it failed, or took too long.
    """

    def __init__(self, settings: DemoSettings, kit: Kit, folder: Path) -> None:
        self._talk = Conversation(
            PROGRAM,
            name="the second process",
            deadline_seconds=SECONDS,
            setting="lower --prompt-tokens or --sessions",
        )
        self._question = {
            "settings": asdict(settings),
            "choice": kit.choice,
            "folder": str(folder),
        }
        self._model = kit.model.name
        self.turns: list[Turn] = []
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._talk.__enter__()
        try:
            self._talk.doing = "when it opened the disk"
            self.ready = self._talk.ask(self._question)
            self._require_model()
        except BaseException:
            self._talk.__exit__(None, None, None)
            raise
        return self

    def _require_model(self) -> None:
        if self.ready.get("model") != self._model:
            raise KVCacheError(f"the second process has another model: {shown(self.ready)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._talk.__exit__(kind, error, trace)

    def ask(self, prompt: NDArray[np.int32], session: int, number: int, shared: int) -> Turn:
        """One turn there."""
        self._talk.doing = f"in turn {number + 1} of session {session + 1}"
        answer = self._talk.ask({"prompt": prompt.tolist()})
        self.turns.append(
            Turn(
                session,
                number,
                shared,
                Usage(*answer["usage"]),
                answer["first_token_seconds"],
                answer["output"],
                answer["gaps"],
            )
        )
        return self.turns[-1]

    def end(self, recomputed: Sequence[Turn]) -> Restart:
        """See it end well; what it did, beside the same turns recomputed."""
        self._talk.doing = "at its end"
        self._talk.finish()
        figures = {
            name: self.ready[name]
            for name in ("process", "disk_bytes", "device_bytes", "start_seconds")
        }
        return Restart(**figures, restarted=self.turns, recomputed=list(recomputed))
