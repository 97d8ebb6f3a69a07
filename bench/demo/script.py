"""What is played: the settings, the model, and what the users of all sessions say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvcache
from kvcache.core.errors import ConfigError, InputError
from kvcache.engine import smollm2, tiny
from kvcache.engine.chat import END, START, Message, encode_chat
from kvcache.engine.model import Model
from kvcache.engine.tokenizer import ByteTokenizer, Tokenizer

OPENING = "What is this text about? Answer in one sentence."
FOLLOW_UP = "Why?"
TEXT_SUFFIXES = {".py", ".md"}


def option(name: str) -> str:
    """A setting as the command line has it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What is played. Counts in tokens; pools of None are sized by the sessions."""

    sessions: int = 3
    turns: int = 2
    """Of each session; after the restart it has one more."""
    restart: bool = True
    """Whether a second process goes on at the end."""
    prompt_tokens: int = 1024
    """Of a session's first turn."""
    new_tokens: int = 32
    """Of the user's next message, with the marks around it."""
    output_tokens: int = 8
    device_tokens: int | None = None
    host_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "prompt_tokens", "new_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)} is {getattr(self, name)}: it must be above 0")
        for name, most in (("sessions", 1000), ("turns", 1000), ("prompt_tokens", 10**6)):
            if getattr(self, name) > most:
                raise ConfigError(f"{option(name)} is {getattr(self, name)}: at most {most}")
        for name in ("device_tokens", "host_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 10**9:
                raise ConfigError(f"{option(name)} is {value}: it must be 1 to 10^9")

    @property
    def session_tokens(self) -> int:
        """Context of a session at the end of its last turn."""
        between = (self.turns - 1) * (self.output_tokens + self.new_tokens)
        return self.prompt_tokens + between + self.output_tokens

    @property
    def session_tokens_after_restart(self) -> int:
        """Its context after the one turn more."""
        return self.session_tokens + self.new_tokens + self.output_tokens


MOST_TEXT_BYTES = 16 << 20
"""A file that is played is read whole; a device would never end."""


class Kit(NamedTuple):
    """A model with its tokenizer."""

    model: Model
    tokenizer: Tokenizer
    note: str
    """Why it is not the model that was hoped for, or empty."""
    choice: str = "smollm2"
    """Or `tiny`."""


class Script(NamedTuple):
    """What the users say: tokens, so that all modes are given the same."""

    openings: list[NDArray[np.int32]]
    follow_ups: list[list[NDArray[np.int32]]]
    """For each session, what is said in its second, third, ... turn, and after the restart."""


def load_kit(choice: str, seed: int) -> Kit:
    """`smollm2`, `tiny`, or `auto`: SmolLM2 where it is installed, else the tiny hybrid."""
    note = ""
    if choice != "tiny":
        try:
            return Kit(smollm2.load_model(), smollm2.load_tokenizer(), "")
        except (ConfigError, ModuleNotFoundError) as error:
            if choice == "smollm2":
                raise
            note = f"{error}; going on with the tiny hybrid, whose answers mean nothing"
    return Kit(tiny.build_model(seed), ByteTokenizer(), note, "tiny")


def own_texts() -> list[Path]:
    """This package's sources, and the documents beside them in a checkout."""
    package = Path(kvcache.__file__).resolve().parent
    found = [*package.rglob("*"), *package.parent.glob("*.md"), *package.parent.glob("docs/*")]
    return sorted(p for p in found if p.suffix in TEXT_SUFFIXES and p.is_file())


def read_text(path: Path) -> str:
    """`OSError` if it cannot be read, `InputError` if it is too large or no UTF-8 text."""
    with path.open("rb") as stream:
        data = stream.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        raise InputError(
            f"{path} has more than {MOST_TEXT_BYTES >> 20} MiB: give smaller files to --files"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start}"
        ) from error


def write_script(settings: DemoSettings, kit: Kit, files: Sequence[Path]) -> Script:
    """Each session opens with a text of its own and asks on about lines of it.

    Raises:
        InputError: the files are too short for all sessions.
        ConfigError: a turn is too short for its question, or a session longer than the context.
    """
    tokenizer, context = kit.tokenizer, kit.model.context_tokens
    if settings.session_tokens_after_restart > context:
        raise ConfigError(
            f"a session has {settings.session_tokens_after_restart} tokens at its end, the context of"
            f" {kit.model.name} is {context}: lower --prompt-tokens, --new-tokens or"
            " --turns"
        )
    order = list(files)
    random.Random(settings.seed).shuffle(order)
    texts = (tokenizer.encode(read_text(path)) for path in order)
    openings, follow_ups = [], []
    for session in range(settings.sessions):
        head = encode_chat(tokenizer, [Message("user", "")], answer=False)
        head = head[: -1 - len(tokenizer.encode("\n"))]  # the message is still open
        tail = _close_message(tokenizer, f"\n\n{OPENING}")
        room = _room(settings.prompt_tokens, len(head) + len(tail), "prompt_tokens")
        text = _take(texts, room, session, settings)
        openings.append(np.concatenate([head, text[:room], tail]))
        follow_ups.append(
            [_follow_up(tokenizer, text, turn, settings) for turn in range(1, settings.turns + 1)]
        )
    return Script(openings, follow_ups)


def _take(
    texts: Iterator[NDArray[np.int32]], room: int, session: int, settings: DemoSettings
) -> NDArray[np.int32]:
    parts: list[NDArray[np.int32]] = []
    while sum(map(len, parts)) < room:
        part = next(texts, None)
        if part is None:
            raise InputError(
                f"the files end in session {session + 1} of {settings.sessions}, which needs {room}"
                " tokens of text: give more or longer --files, or lower --sessions or"
                " --prompt-tokens"
            )
        parts.append(part)
    return np.concatenate(parts)


def _room(total: int, marks: int, name: str) -> int:
    if total <= marks:
        raise ConfigError(
            f"{option(name)} is {total}: the question and its marks take {marks} tokens, give more"
        )
    return total - marks


def _close_message(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """End of the user's message, and the beginning of the answer."""
    specials = tokenizer.specials
    return np.concatenate(
        [
            tokenizer.encode(text),
            np.array([specials[END]], np.int32),
            tokenizer.encode("\n"),
            np.array([specials[START]], np.int32),
            tokenizer.encode("assistant\n"),
        ]
    )


def _follow_up(
    tokenizer: Tokenizer, text: NDArray[np.int32], turn: int, settings: DemoSettings
) -> NDArray[np.int32]:
    head = _close_message(tokenizer, "")[: -len(tokenizer.encode("assistant\n"))]
    head = np.concatenate([head, tokenizer.encode("user\n")])
    tail = _close_message(tokenizer, f"\n{FOLLOW_UP}")
    room = _room(settings.new_tokens, len(head) + len(tail), "new_tokens")
    quote = np.take(text, np.arange(turn * 97, turn * 97 + room), mode="wrap")
    return np.concatenate([head, quote, tail])
