"""Prompts with media and embeddings in them: placeholder tokens that know what stands there.

Two prompts share a block exactly where these tokens are equal: so the oracle needs no rule for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.core.media import Media, PromptEmbeddings

IMAGES = {"cat": 3, "dog": 6}
"""Tokens of each: equal identifiers name equal content."""
ROWS = {"ones": 1.0, "twos": 2.0}
"""Embeddings by the value of all their numbers. They may have any length."""
WIDTH = 2


class Covered(NamedTuple):
    """A placeholder token of an image, or one whose embedding is given."""

    token: int
    item: str
    index: int
    """Which token of an image this is; 0 of embeddings, where a row is known by its values."""


Token = int | Covered


def cover(tokens: Sequence[Token], item: str, at: int) -> list[Token]:
    """The same with an item from `at` on: an image if all of it fits, embeddings as far as they do."""
    length = IMAGES.get(item, len(tokens) // 2 + 1)
    if not item or at + IMAGES.get(item, 1) > len(tokens):
        return list(tokens)
    end = min(at + length, len(tokens))
    image = item in IMAGES
    inside = [Covered(t, item, i * image) for i, t in enumerate(plain(tokens[at:end]))]
    return whole([*whole(tokens[:at]), *inside, *plain(tokens[end:])])


def whole(tokens: Sequence[Token]) -> list[Token]:
    """The same without the head of an image whose end was cut off."""
    last = tokens[-1] if tokens else 0
    if not isinstance(last, Covered) or last.index + 1 >= IMAGES.get(last.item, 0):
        return list(tokens)
    start = len(tokens) - last.index - 1
    return [*tokens[:start], *plain(tokens[start:])]


def plain(tokens: Sequence[Token]) -> list[int]:
    """As the manager gets them."""
    return [t.token if isinstance(t, Covered) else t for t in tokens]


def runs(tokens: Sequence[Token]) -> Iterator[tuple[int, list[Covered]]]:
    """Where each item begins in these tokens, and its part of them."""
    run: list[Covered] = []
    for at, token in enumerate([*tokens, 0]):
        goes_on = isinstance(token, Covered) and run and token.item == run[0].item
        if goes_on and token.item in IMAGES:
            goes_on = token.index == run[-1].index + 1
        if run and not goes_on:
            yield at - len(run), run
            run = []
        if isinstance(token, Covered):
            run.append(token)


def media_of(tokens: Sequence[Token]) -> list[Media]:
    return [
        Media(identifier=run[0].item, offset_tokens=at, length_tokens=len(run))
        for at, run in runs(tokens)
        if run[0].item in IMAGES
    ]


def values(run: Sequence[Covered]) -> np.ndarray:
    return np.full((len(run), WIDTH), ROWS[run[0].item], "<f4")


def embeddings_of(tokens: Sequence[Token]) -> list[PromptEmbeddings]:
    return [
        PromptEmbeddings(offset_tokens=at, values=values(run))
        for at, run in runs(tokens)
        if run[0].item in ROWS
    ]


def link(parent: bytes, unit: Sequence[Token]) -> bytes:
    """The documented key of a hash unit."""
    items = b""
    for at, run in runs(unit):
        name, begin = run[0].item, at
        if name in IMAGES:
            length = IMAGES[name].to_bytes(8, "little")
            digest = hashlib.sha256(b"kvcache/media/2\0" + length + name.encode()).digest()
            begin -= run[0].index
        else:
            header = f"<f4/float32/{WIDTH}\0".encode()
            digest = hashlib.sha256(
                b"kvcache/embedding/1\0" + header + values(run).tobytes()
            ).digest()
        items += digest + begin.to_bytes(8, "little", signed=True)
    domain = b"kvcache/block+/2" if items else b"kvcache/block/2"
    tokens = np.array(plain(unit), "<i4").tobytes()
    return hashlib.sha256(domain.ljust(64, b"\0") + tokens + items + parent).digest()
