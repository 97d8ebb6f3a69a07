"""Messages to a prompt, in the ChatML form that the chat template inside SmolLM2's file produces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InputError
from kvcache.engine.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the template puts before a conversation that has no system message."""


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


def _pieces(messages: Sequence[Message], *, answer: bool) -> Iterator[tuple[str, str]]:
    """(special token or "", plain text after it)."""
    if not messages:
        raise InputError("a chat needs at least one message")
    if messages[0].role != "system":
        messages = [Message("system", DEFAULT_SYSTEM), *messages]
    for role, content in messages:
        yield START, f"{role}\n{content}"
        yield END, "\n"
    if answer:
        yield START, "assistant\n"


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True
) -> NDArray[np.int32]:
    """The prompt as tokens. Special tokens inside a message's content are plain text.

    `answer`: ends where the assistant's answer begins.

    Raises:
        InputError: no message, a text without a UTF-8 form, or a tokenizer without the special
            tokens of ChatML.
    """
    parts = []
    for special, text in _pieces(messages, answer=answer):
        parts.append(np.array([_special(tokenizer, special)], np.int32))
        parts.append(tokenizer.encode(text))
    return np.concatenate(parts)


def encode_reply(tokenizer: Tokenizer, text: str, *, ended: bool) -> NDArray[np.int32]:
    """What follows an answer in its own tokens: its end, the user's next message, a new answer.

    `ended`: the answer has its end already. A conversation goes on from the tokens that it was made
    of: text that is encoded anew may give others, and they would share no prefix with what is cached.
    """
    close = () if ended else (_special(tokenizer, END),)
    message = encode_chat(tokenizer, [Message("system", ""), Message("user", text)])
    empty = encode_chat(tokenizer, [Message("system", "")], answer=False)
    line = tokenizer.encode("\n")
    return np.concatenate([np.array(close, np.int32), line, message[len(empty) :]])


def end_of_answer(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens at which an answer ends."""
    return frozenset(_special(tokenizer, text) for text in (END, "<|endoftext|>"))


def _special(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.specials.get(text)
    if token is None:
        raise InputError(
            f"the tokenizer has no special token {text!r}: this model cannot be talked to in ChatML"
        )
    return token
