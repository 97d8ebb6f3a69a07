"""Events to msgpack, byte for byte what vLLM 0.33.0's encoder writes.

A batch is the array `[ts, [event, ...], data_parallel_rank]`; an event is a map whose first entry
is `"type"`, then the fields in order. Optional fields that are None are left out. The encoder of
vLLM chooses a map's header by the number of fields that the type has, not by the number written:
BlockStored has more than 15, so its header is always the three-byte one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import msgpack
import numpy as np

from kvcache.core import arrays
from kvcache.core.errors import ConfigError, InputError
from kvcache.core.events.pieces import pieces
from kvcache.core.events.records import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    require_event,
    require_keys,
)
from kvcache.core.values import shown, whole

WRITTEN_EVEN_IF_NONE = {
    BlockStored: 7,
    BlockRemoved: 2,
    AllBlocksCleared: 0,
}
"""The first so many fields have no default in vLLM, and are always on the wire."""


def _number(value: object) -> int:
    """Whole numbers of numpy, which msgpack does not know."""
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{shown(value)} cannot be written")


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_number)
    return packed


_KEYS = {
    kind: tuple((f.name, _pack(f.name), i < required) for i, f in enumerate(fields(kind)))
    for kind, required in WRITTEN_EVEN_IF_NONE.items()
}
_TAGS = {kind: _pack("type") + _pack(kind.__name__) for kind in WRITTEN_EVEN_IF_NONE}


def _plain(event: Event) -> Event:
    """The event with `token_ids` as a tuple; they may have been an array.

    Raises:
        InputError: no event, or a field that every reader counts by is of another kind. What the
            other fields hold, msgpack says.
    """
    require_event(event)
    if not isinstance(event, AllBlocksCleared):
        require_keys(event)
    if not isinstance(event, BlockStored):
        return event
    tokens: object = event.token_ids
    try:
        whole(event.block_size, "BlockStored.block_size", least=0)
        if isinstance(tokens, np.ndarray):
            rows = arrays.flat(tokens, np.int64, "BlockStored.token_ids")
            return replace(event, token_ids=tuple(rows.tolist()))
    except ConfigError as error:
        raise InputError(str(error)) from error
    if not isinstance(tokens, tuple | list):
        raise InputError(f"BlockStored.token_ids is {shown(tokens)}: it must be a tuple of tokens")
    return event


def encode_event(event: Event) -> bytes:
    """The map of one event; `token_ids` may be an array, numbers may be numpy's.

    Raises:
        InputError: it is no event, or a field holds what msgpack cannot carry.
    """
    return _encode(_plain(event))


def _encode(event: Event) -> bytes:
    kind = type(event)
    try:
        parts = [
            key + _pack(value)
            for name, key, always in _KEYS[kind]
            if (value := getattr(event, name)) is not None or always
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"a {kind.__name__} cannot be encoded: {error}") from error
    count = len(parts) + 1
    header = b"\xde" + count.to_bytes(2, "big") if kind is BlockStored else bytes((0x80 | count,))
    return b"".join((header, _TAGS[kind], *parts))


def _array_header(count: int) -> bytes:
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(count)
    header: bytes = packer.bytes()
    return header


def _frame(ts: float, rank: int | None, events: Sequence[bytes]) -> bytes:
    try:
        parts = (_pack(float(ts)), _array_header(len(events)), *events, _pack(rank))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"a batch with ts {shown(ts)} and rank {shown(rank)}: {error}") from error
    return b"".join((b"\x93", *parts))


def encode_batch(batch: EventBatch) -> bytes:
    """One payload. `InputError`: as `encode_event`, no batch, or a `ts` or rank that is no number."""
    events = _events_of(batch)
    return _frame(batch.ts, batch.data_parallel_rank, [encode_event(e) for e in events])


def _events_of(batch: EventBatch) -> Sequence[Event]:
    if not isinstance(batch, EventBatch):
        raise InputError(f"{shown(batch)} ({type(batch).__name__}) is no EventBatch")
    events: object = batch.events
    if not isinstance(events, tuple | list):
        raise InputError(f"EventBatch.events is {shown(events)}: it must be a tuple of events")
    return events


def _encoded(events: Sequence[Event]) -> Iterator[bytes]:
    for event in map(_plain, events):
        if isinstance(event, BlockStored):
            yield from map(_encode, pieces(event))
        else:
            yield _encode(event)


def encode_batches(batch: EventBatch, max_bytes: int) -> Iterator[bytes]:
    """One or more payloads, cut between events so that each stays near `max_bytes`.

    An event that is larger than that goes alone; a long BlockStored goes in pieces (`pieces`).

    Raises:
        InputError: as `encode_batch`; what was cut off before may have come already.
    """
    waiting: list[bytes] = []
    size = 0
    for encoded in _encoded(_events_of(batch)):
        if waiting and size + len(encoded) > max_bytes:
            yield _frame(batch.ts, batch.data_parallel_rank, waiting)
            waiting, size = [], 0
        waiting.append(encoded)
        size += len(encoded)
    yield _frame(batch.ts, batch.data_parallel_rank, waiting)
