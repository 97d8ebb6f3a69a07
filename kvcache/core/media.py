"""What goes into a prompt beside tokens: images and sound by identifier, embeddings by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError
from kvcache.core.values import sequence, text, whole

_MEDIA_DOMAIN = b"kvcache/media/2\0"
_EMBEDDING_DOMAIN = b"kvcache/embedding/1\0"


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image, a sound, ... that stands at `length_tokens` placeholder tokens.

    Args:
        identifier: names the content (a digest of the file, say): equal identifiers share KV,
            where they stand at equally many tokens.
    """

    identifier: str
    offset_tokens: int
    length_tokens: int

    def __post_init__(self) -> None:
        if not text(self.identifier, "Media.identifier"):
            raise ConfigError("Media.identifier is empty: it names the content, by a digest of it")
        for name in ("offset_tokens", "length_tokens"):  # that they lie in the prompt: see `open`
            object.__setattr__(self, name, whole(getattr(self, name), f"Media.{name}"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptEmbeddings:
    """Embeddings `[tokens, width]` that replace those of the tokens from `offset_tokens` on."""

    offset_tokens: int
    values: NDArray[Any]

    def __post_init__(self) -> None:
        offset = whole(self.offset_tokens, "PromptEmbeddings.offset_tokens")
        object.__setattr__(self, "offset_tokens", offset)


Extra = tuple[int, int, bytes]
"""Offset and length in tokens, and the digest of what stands there."""


def extras(
    media: Sequence[Media], embeddings: Sequence[PromptEmbeddings], hash_unit_tokens: int
) -> list[Extra]:
    """What goes into the keys, ascending. Cost: linear in items and embedding bytes."""
    items = [_media_extra(item) for item in sequence(media, "media", of=Media)]
    for item in sequence(embeddings, "embeddings", of=PromptEmbeddings):
        items += _embedding_extras(item, hash_unit_tokens)
    return sorted(items)


def _media_extra(item: Media) -> Extra:
    """The length is part of it: the same image over fewer placeholders is other content."""
    length = item.length_tokens.to_bytes(8, "little", signed=True)
    digest = hashlib.sha256(_MEDIA_DOMAIN + length + item.identifier.encode()).digest()
    return item.offset_tokens, item.length_tokens, digest


def _embedding_extras(item: PromptEmbeddings, unit: int) -> Iterator[Extra]:
    """One for each hash unit, so that prompts share what is equal in their heads."""
    try:
        values = np.asarray(item.values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"prompt embeddings cannot be made an array: {error}") from error
    if values.ndim != 2 or not values.size:
        raise ConfigError(
            f"prompt embeddings have shape {values.shape}: it must be [tokens, width], none of them 0"
        )
    start, end = item.offset_tokens, item.offset_tokens + len(values)
    if values.dtype.hasobject or values.dtype.fields:
        raise ConfigError(f"prompt embeddings are of type {values.dtype}: give numbers")
    header = f"{values.dtype.str}/{values.dtype.name}/{values.shape[1]}\0".encode()
    header = _EMBEDDING_DOMAIN + header
    at = start
    while at < end:
        stop = min((at // unit + 1) * unit, end)
        part = np.ascontiguousarray(values[at - start : stop - start]).tobytes()
        yield at, stop - at, hashlib.sha256(header + part).digest()
        at = stop
