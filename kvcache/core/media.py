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
    media: Sequence[Media],
    embeddings: Sequence[PromptEmbeddings],
    prompt_tokens: int,
    hash_unit_tokens: int,
) -> list[Extra]:
    """What goes into the keys, ascending. Cost: linear in items and embedding bytes.

    Raises:
        ConfigError: an item that does not lie in the prompt, or two that overlap.
    """
    images = sequence(media, "media", of=Media)
    parts = sequence(embeddings, "embeddings", of=PromptEmbeddings)
    arrays = [_embedding_values(item, i) for i, item in enumerate(parts)]
    places = [(m.offset_tokens, m.length_tokens, "media", i) for i, m in enumerate(images)]
    for i, (part, values) in enumerate(zip(parts, arrays, strict=True)):
        places.append((part.offset_tokens, len(values), "embeddings", i))
    _check_places(sorted(places), prompt_tokens)
    items = [_media_extra(item) for item in images]
    for item, values in zip(parts, arrays, strict=True):
        items += _embedding_extras(item.offset_tokens, values, hash_unit_tokens)
    return sorted(items)


def _check_places(places: list[tuple[int, int, str, int]], prompt_tokens: int) -> None:
    """Offset, length, list and index of each item, ascending: inside the prompt, and apart."""
    end, before = 0, ""
    for offset, length, kind, index in places:
        name = f"{kind}[{index}]"
        covers = f"{name} covers {length} tokens from offset_tokens {offset} on"
        prompt = f"the prompt of {prompt_tokens} tokens"
        if length < 1:
            raise ConfigError(f"{covers}: an item inside {prompt} must cover one token at least")
        if not 0 <= offset <= prompt_tokens - length:
            raise ConfigError(f"{covers}: it must lie inside {prompt}")
        if offset < end:
            raise ConfigError(
                f"{covers}, {before} goes on to token {end} of {prompt}: items must not overlap"
            )
        end, before = offset + length, name


def _media_extra(item: Media) -> Extra:
    """The length is part of it: the same image over fewer placeholders is other content."""
    length = item.length_tokens.to_bytes(8, "little", signed=True)
    digest = hashlib.sha256(_MEDIA_DOMAIN + length + item.identifier.encode()).digest()
    return item.offset_tokens, item.length_tokens, digest


def _embedding_values(item: PromptEmbeddings, index: int) -> NDArray[Any]:
    what = f"embeddings[{index}].values"
    try:
        values = np.asarray(item.values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be made an array: {error}") from error
    if values.ndim != 2 or not values.size:
        raise ConfigError(
            f"{what} has shape {values.shape}: it must be [tokens, width], none of them 0"
        )
    if values.dtype.hasobject or values.dtype.fields:
        raise ConfigError(f"{what} is of type {values.dtype}: give numbers")
    return values


def _embedding_extras(start: int, values: NDArray[Any], unit: int) -> Iterator[Extra]:
    """One for each hash unit, so that prompts share what is equal in their heads."""
    end = start + len(values)
    header = f"{values.dtype.str}/{values.dtype.name}/{values.shape[1]}\0".encode()
    header = _EMBEDDING_DOMAIN + header
    at = start
    while at < end:
        stop = min((at // unit + 1) * unit, end)
        part = np.ascontiguousarray(values[at - start : stop - start]).tobytes()
        yield at, stop - at, hashlib.sha256(header + part).digest()
        at = stop
