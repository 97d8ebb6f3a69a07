"""Text to tokens and back: raw bytes for the tiny model, BPE from a GGUF file's metadata.

Special tokens never come out of `encode`: a text that contains `<|im_end|>` cannot end a message,
unless the file's own merges spell it: such a file is refused.
They have no bytes, so that decoded text holds none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InputError
from kvcache.engine.gguf import GGUF
from kvcache.engine.gguf_parse import show

CONTROL = 3
"""`token_type` of special tokens in GGUF metadata."""

MAX_TOKENS = 1 << 20


class Tokenizer(Protocol):
    """Text to tokens and back."""

    vocab_size: int
    specials: Mapping[str, int]
    """Special tokens by their text."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Tokens of a text, without special ones. `InputError` if it has no UTF-8 form."""

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, often not whole characters; empty for a special token."""


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Text of tokens; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")


class StreamDecoder:
    """Text of tokens as they come; bytes of an unfinished character wait for the next token.

    The pieces of `push` and `flush` put together are what `decode` gives for all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """What the token adds; may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an end in the middle of a character leaves over."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token for each byte, then three special tokens."""

    def __init__(self) -> None:
        self.specials: Mapping[str, int] = {
            "<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258,
        }  # fmt: skip
        self.vocab_size = 256 + len(self.specials)

    def encode(self, text: str) -> NDArray[np.int32]:
        """See `Tokenizer`."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer`."""
        _require_token(token, self.vocab_size)
        return bytes([token]) if token < 256 else b""


REPLACEMENT = "\ufffd"


class BPETokenizer:
    """Byte-level BPE as SmolLM2 has it: digits one by one, then GPT-2's pattern, then merges.

    A vocabulary need not have a token for every byte (SmolLM2's lacks six control characters):
    characters that it cannot spell become U+FFFD.
    """

    def __init__(self, file: GGUF) -> None:
        from tokenizers import Tokenizer as Pipeline, models, pre_tokenizers  # noqa: PLC0415

        tokens = file.texts("tokenizer.ggml.tokens")
        kinds = file.whole_numbers("tokenizer.ggml.token_type")
        vocabulary = {text: token for token, text in enumerate(tokens)}
        if len(kinds) != len(tokens) or len(vocabulary) != len(tokens):
            raise InputError(
                f"{file.path}: {len(tokens)} tokens ({len(vocabulary)} different) with"
                f" {len(kinds)} types: expected different tokens with one type each"
            )
        self.vocab_size = len(tokens)
        self.specials: Mapping[str, int] = {
            text: token for token, text in enumerate(tokens) if kinds[token] == CONTROL
        }
        self._bytes = [
            b"" if kind == CONTROL else _token_bytes(file, text)
            for text, kind in zip(tokens, kinds, strict=True)
        ]
        self._spelled = b"".join({part for part in self._bytes if len(part) == 1})
        if self._lost(REPLACEMENT):
            raise InputError(
                f"{file.path}: no tokens for the bytes of U+FFFD: it is not a byte-level vocabulary"
            )
        merges = _merges(file, vocabulary)
        spelled = self.specials.keys() & {left + right for left, right in merges}
        spelled |= {special for special in self.specials if len(special) == 1}
        if spelled:
            raise InputError(
                f"{file.path}: {show(min(spelled))} is a special token that plain text would become:"
                " its messages could not be told from what they are about"
            )
        self._pipeline = Pipeline(models.BPE(vocab=vocabulary, merges=merges))
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )

    def encode(self, text: str) -> NDArray[np.int32]:
        """See `Tokenizer`."""
        if self._lost(text):
            text = "".join(REPLACEMENT if self._lost(c) else c for c in text)
        return np.array(self._pipeline.encode(text).ids, np.int32)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer`."""
        _require_token(token, self.vocab_size)
        return self._bytes[token]

    def _lost(self, text: str) -> bytes:
        """Bytes of the text for which there is no token."""
        return _utf8(text).translate(None, self._spelled)


def _require_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InputError(f"token id {token} is out of range: there are {vocab_size} tokens")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has no UTF-8 form: {error.reason} at character {error.start}"
        ) from error


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself, or the next character from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()


def _token_bytes(file: GGUF, text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError as error:
        raise InputError(
            f"{file.path}: token {text[:40]!r} has the character {error}, which stands for no byte"
        ) from None


def _merges(file: GGUF, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in file.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise InputError(
                f"{file.path}: merge {line[:40]!r} is not two tokens that make a third"
            )
        merges.append((left, right))
    return merges
