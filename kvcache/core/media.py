"""What goes into a prompt beside tokens: images and sound by identifier, embeddings by content."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import ConfigError
from kvcache.core.values import sequence, text, whole

_MEDIA_DOMAIN = b"kvcache/media/2\0"
_EMBEDDING_DOMAIN = b"kvcache/embedding/1\0"
_INTEGERS = {1: "uint8", 2: "int16"}
"""Of torch, by width in bytes."""


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
    """Embeddings `[tokens, width]` that replace those of the tokens from `offset_tokens` on.

    Args:
        values: an array, or a torch tensor of any type and device (bfloat16 too); its bytes and the
            name of its type go into the keys, so equal numbers of two types are two contents.
    """

    offset_tokens: int
    values: Any

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
    arrays = [_rows(item.values, f"embeddings[{i}].values") for i, item in enumerate(parts)]
    places = [(m.offset_tokens, m.length_tokens, "media", i) for i, m in enumerate(images)]
    for i, (part, values) in enumerate(zip(parts, arrays, strict=True)):
        places.append((part.offset_tokens, len(values.array), "embeddings", i))
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


class _Rows(NamedTuple):
    """Embeddings as bytes: an array of the right width, and what its element really is."""

    array: NDArray[Any]
    dtype_code: str
    dtype_name: str


def _rows(values: object, what: str) -> _Rows:
    try:
        rows = _of_tensor(values) or _of_array(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{what} cannot be made an array: {error}; give numbers [tokens, width] as numpy or torch"
            " has them"
        ) from error
    array = rows.array
    if array.ndim != 2 or not array.size:
        raise ConfigError(
            f"{what} has shape {array.shape}: it must be [tokens, width], none of them 0"
        )
    if array.dtype.hasobject or array.dtype.fields:
        raise ConfigError(f"{what} is of type {array.dtype}: give numbers")
    return rows


def _of_array(array: NDArray[Any]) -> _Rows:
    return _Rows(array, array.dtype.str, array.dtype.name)


def _of_tensor(values: Any) -> _Rows | None:
    """A torch tensor; None: it is none. torch is not imported: who has a tensor has done so.

    A floating type that numpy lacks is read as integers of its width, and named as ml_dtypes has it
    in numpy ("<V2", "bfloat16"): such an array and such a tensor have equal keys.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return None
    tensor = values.detach().cpu()
    try:
        return _of_array(tensor.numpy())
    except TypeError:
        size = tensor.element_size()
        if size not in _INTEGERS or not tensor.dtype.is_floating_point:
            raise  # sparse; quantized, of which the bytes are not all
        array = tensor.view(getattr(torch, _INTEGERS[size])).numpy()
        return _Rows(array, f"<V{size}", str(tensor.dtype).rpartition(".")[2])


def _embedding_extras(start: int, rows: _Rows, unit: int) -> Iterator[Extra]:
    """One for each hash unit, so that prompts share what is equal in their heads."""
    values, end = rows.array, start + len(rows.array)
    header = f"{rows.dtype_code}/{rows.dtype_name}/{values.shape[1]}\0".encode()
    header = _EMBEDDING_DOMAIN + header
    at = start
    while at < end:
        stop = min((at // unit + 1) * unit, end)
        part = np.ascontiguousarray(values[at - start : stop - start]).tobytes()
        yield at, stop - at, hashlib.sha256(header + part).digest()
        at = stop
