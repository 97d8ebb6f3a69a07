"""Conversations in a folder: their file, and who may use it. Pages of the disk tier lie beside it.

FOLDER/chat.json     all conversations, in tokens and in words; written whole after every turn
FOLDER/pages/        the folder of the disk tier
FOLDER/lock          held while a chat has the folder open
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcache.commands.output import write_atomically
from kvcache.core.errors import ConfigError, InputError
from kvcache.engine.chat import Message
from kvcache.engine.conversation import Conversation

SCHEMA = "kvcache/chat/1"
MOST_BYTES = 64 << 20


class ChatHistory:
    """The conversations of one folder. A context manager: the folder is its alone inside.

    Raises:
        ConfigError: the folder cannot be used, is in use, or holds conversations of another model.
        InputError: its file is no such file.
    """

    def __init__(self, folder: str, model: str, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self.folder = Path(folder)
        self.file = self.folder / "chat.json"
        self.pages = self.folder / "pages"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _plain_file(self.folder / "lock")
        except OSError as error:
            raise ConfigError(f"--disk {folder}: {error.strerror}: give another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--disk {folder} is in use by another chat: end it, or give another folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def load(self) -> tuple[list[Conversation], int]:
        """All conversations, and the index of the one that goes on; none of a new folder."""
        if not self.file.exists():
            return [], 0
        if not self.file.is_file():
            raise self._bad("no plain file")
        with self.file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise self._bad(f"more than {MOST_BYTES >> 20} MiB")
        try:
            stored = json.loads(data)
            schema, model, current = stored["schema"], stored["model"], stored["current"]
            entries = stored["conversations"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._bad(f"{type(error).__name__}: {error}") from error
        if schema != SCHEMA:
            raise self._bad(f"schema {schema!r}, not {SCHEMA!r}")
        if model != self._model:
            raise ConfigError(
                f"{self.file} has conversations with {model}, this is {self._model}: give --disk"
                " another folder"
            )
        try:
            found = [self._conversation(entry) for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad(f"{type(error).__name__}: {error}") from error
        if type(current) is not int or not 0 <= current < max(1, len(found)):
            raise self._bad(f"the current conversation is {current!r} of {len(found)}")
        return found, current

    def _bad(self, why: str) -> InputError:
        return InputError(
            f"{self.file} is no file of conversations ({why}): remove it, or give --disk another"
            " folder"
        )

    def _conversation(self, entry: dict[str, Any]) -> Conversation:
        tokens, ended = entry["tokens"], entry["ended"]
        if not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
            raise ValueError("tokens that the model does not have")
        if type(ended) is not bool:
            raise ValueError(f"'ended' is {ended!r}")
        messages = [Message(str(role), str(content)) for role, content in entry["messages"]]
        return Conversation(list(tokens), messages, ended)

    def save(self, conversations: list[Conversation], current: int) -> None:
        """The whole file, or the old one stays. `OSError` if it cannot be written."""
        stored = {
            "schema": SCHEMA,
            "model": self._model,
            "current": current,
            "conversations": [
                {"tokens": c.tokens, "ended": c.ended, "messages": [list(m) for m in c.messages]}
                for c in conversations
            ],
        }
        write_atomically(self.file, json.dumps(stored) + "\n", mode=0o600)


def _plain_file(path: Path) -> int:
    """A descriptor of it, made where it is not there. `OSError` also where it is something else."""
    # Read and write: so that a pipe keeps nobody waiting.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"its {path.name} is no plain file")
    return descriptor
