"""msgpack to events: the map form of vLLM 0.33.0, and the array form of older publishers.

Bytes come from a socket, so nothing in them is trusted. A first pass walks the whole payload
without building anything; only then are objects made, so that a header that promises a billion
elements costs nothing. Unknown fields are ignored and unknown event tags counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Final, TypeVar

import msgpack

from kvcache.core.errors import InputError
from kvcache.core.events.records import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)

T = TypeVar("T")

MAX_PAYLOAD_BYTES: Final = 16 * 2**20
MAX_EXTRA_KEY_DEPTH: Final = 4
MAX_TAGS: Final = 64
OTHER_TAGS: Final = "(others)"


class WireError(InputError):
    """A payload that is not a batch of KV events. The batch is lost, the stream goes on."""


class Decoder:
    """Decodes payloads and counts what it did not know. Not for use by two threads at once."""

    def __init__(self, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._limit = max_payload_bytes
        self.unknown_tags: dict[str, int] = {}
        """Events skipped, by tag; at most `MAX_TAGS` names, the rest under `OTHER_TAGS`."""

    def decode(self, payload: bytes) -> EventBatch:
        """The batch in `payload`. `WireError` if it is anything else.

        Memory is at most about 64 times the payload, which is at most `max_payload_bytes`.
        """
        top = self._parse(payload)
        if isinstance(top, dict):  # no released vLLM writes it, its development tree did
            top = tuple(top.get(name) for name in ("ts", "events", "data_parallel_rank"))
        if not isinstance(top, tuple) or len(top) < 2:
            raise WireError(f"a batch is an array of ts, events and rank, not {_what(top)}")
        ts, events = top[:2]
        if type(ts) not in {float, int}:
            raise WireError(f"ts of a batch is a number, not {_what(ts)}")
        if not isinstance(events, tuple):
            raise WireError(f"events of a batch is an array, not {_what(events)}")
        rank = _field("data_parallel_rank", _optional_int, top[2] if len(top) > 2 else None)
        made = [event for raw in events if (event := self._event(raw)) is not None]
        return EventBatch(ts=float(ts), events=tuple(made), data_parallel_rank=rank)

    def _parse(self, payload: bytes) -> object:
        if not isinstance(payload, bytes | bytearray):
            raise WireError(f"a payload is bytes, not {type(payload).__name__}")
        if len(payload) > self._limit:
            raise WireError(
                f"a payload of {len(payload)} bytes is above max_payload_bytes ({self._limit})"
            )
        try:
            walker = msgpack.Unpacker(max_buffer_size=max(1, len(payload)))
            walker.feed(payload)
            walker.skip()
            top: object = msgpack.unpackb(
                payload, use_list=False, raw=False, strict_map_key=True, ext_hook=_no_extension
            )
        except WireError:
            raise
        except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            raise WireError(f"{len(payload)} bytes are no msgpack ({text})") from error
        return top  # unpackb refuses bytes that follow

    def _event(self, raw: object) -> Event | None:
        if isinstance(raw, dict):
            tag, values = raw.get("type"), raw
        elif isinstance(raw, tuple) and raw:
            tag, values = raw[0], None
        else:
            raise WireError(f"an event is a map or an array with a tag, not {_what(raw)}")
        if not isinstance(tag, str):
            raise WireError(f"the tag of an event is a string, not {_what(tag)}")
        if tag not in _KINDS:
            self._count(tag)
            return None
        kind, names = _KINDS[tag]
        if values is None:
            values = dict(zip(names, raw[1:], strict=False))  # further positions: a newer publisher
        return _build(kind, names, values)

    def _count(self, tag: str) -> None:
        name = tag[:64]
        if name not in self.unknown_tags and len(self.unknown_tags) >= MAX_TAGS:
            name = OTHER_TAGS
        self.unknown_tags[name] = self.unknown_tags.get(name, 0) + 1


def decode_batch(payload: bytes) -> EventBatch:
    """One payload, without counters."""
    return Decoder().decode(payload)


# ---- fields --------------------------------------------------------------------------------------


def _what(value: object) -> str:
    """For messages. The value itself only if it is small: it may be nested a thousand deep."""
    if isinstance(value, tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        return f"{type(value).__name__} {value[:32]!r}"
    return f"{type(value).__name__} {value!r}"


def _no_extension(code: int, data: bytes) -> object:
    raise WireError(f"extension type {code} ({len(data)} bytes): events have none")


def _hash(value: object) -> bytes | int:
    if isinstance(value, bytes) or type(value) is int:
        return value
    raise TypeError("bytes or an int")


def _optional_hash(value: object) -> bytes | int | None:
    return None if value is None else _hash(value)


def _hashes(value: object) -> tuple[bytes | int, ...]:
    if isinstance(value, tuple) and set(map(type, value)) <= {bytes, int}:
        return value
    raise TypeError("an array of bytes or ints")


def _tokens(value: object) -> tuple[int, ...]:
    if isinstance(value, tuple) and set(map(type, value)) <= {int}:
        return value
    raise TypeError("an array of ints")


def _token_lists(value: object) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(map(_tokens, value))
    raise TypeError("an array of arrays of ints")


def _extra_keys(value: object) -> tuple[tuple[object, ...] | None, ...] | None:
    if value is None or (
        isinstance(value, tuple)
        and set(map(type, value)) <= {tuple, NoneType}
        and _depth_at_most(value, MAX_EXTRA_KEY_DEPTH)
    ):
        return value
    raise TypeError(f"an array of arrays, nested at most {MAX_EXTRA_KEY_DEPTH} deep")


def _depth_at_most(value: tuple[object, ...], depth: int) -> bool:
    return depth > 0 and all(
        _depth_at_most(item, depth - 1) if isinstance(item, tuple) else not isinstance(item, dict)
        for item in value
    )


def _block_size(value: object) -> int:
    if type(value) is int and value >= 0:  # 0: a tier of vLLM that knows hashes alone
        return value
    raise TypeError("an int of 0 or more")


def _optional_int(value: object) -> int | None:
    if value is None or type(value) is int:
        return value
    raise TypeError("an int")


def _optional_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError("a string")


def _optional_bytes(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError("bytes")


_READERS: dict[str, Callable[[object], object]] = {
    "block_hashes": _hashes,
    "parent_block_hash": _optional_hash,
    "token_ids": _tokens,
    "block_size": _block_size,
    "lora_id": _optional_int,
    "extra_keys": _extra_keys,
    "group_idx": _optional_int,
    "kv_cache_spec_sliding_window": _optional_int,
    "lookahead_token_ids": _token_lists,
    "namespace": _optional_bytes,
}
"""What is not here is text or null."""

_KINDS: dict[str, tuple[type[BlockStored | BlockRemoved | AllBlocksCleared], tuple[str, ...]]] = {
    kind.__name__: (kind, tuple(f.name for f in fields(kind)))
    for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def _field(name: str, read: Callable[[object], T], value: object) -> T:
    try:
        return read(value)
    except TypeError as error:
        raise WireError(f"{name} is {error}, not {_what(value)}") from error


def _build(
    kind: type[BlockStored | BlockRemoved | AllBlocksCleared],
    names: Sequence[str],
    values: Mapping[object, object],
) -> Event:
    made = {
        name: _field(
            f"{kind.__name__}.{name}", _READERS.get(name, _optional_text), values.get(name)
        )
        for name in names
    }
    return kind(**made)  # type: ignore[arg-type]  # each value has been read by its field's reader
