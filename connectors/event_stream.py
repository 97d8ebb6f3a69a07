"""One stream of KV events from a manager and its tier, each key in the medium that holds it.

    manager:  BlockStored(GPU: a b c)                      BlockRemoved(GPU: c)
    tier:                                KeysStored(a b)
    stream:   BlockStored(GPU: a b c)    BlockRemoved(GPU: c)    BlockStored(CPU: a b)

A tier knows keys alone. Their tokens, parent, session and adapter are those that the manager told
last when the same keys became findable on the device, which is before a tier has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.key_events import KeyEvent, KeysLost, KeysRemoved, KeysStored
from kvcache.core.events.labels import GroupLabel
from kvcache.core.events.records import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
)
from kvcache.core.events.runs import MAX_REMOVED_HASHES
from kvcache.core.hashing import NATIVE_NAMESPACE

T = TypeVar("T")

MAX_REMEMBERED_BYTES: Final = 64 << 20
"""About so much memory for what the device told. Of older keys the tier tells the key alone."""

_KEY_BYTES: Final = 300
_TOKEN_BYTES: Final = 36
"""What CPython takes for a key in a dict and an int in a tuple."""


_Name: TypeAlias = tuple[int | None, bytes | None, BlockHash]
"""A key as both sides call it: group, namespace (None: native), digest."""


@dataclass(slots=True)
class _Piece:
    """Neighbouring blocks `[first, last)` of what the manager told."""

    event: BlockStored
    first: int
    last: int

    @property
    def parent(self) -> BlockHash | None:
        """The key before the first."""
        event = self.event
        return event.block_hashes[self.first - 1] if self.first else event.parent_block_hash

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of its blocks; none where they are not known."""
        size = self.event.block_size
        return self.event.token_ids[self.first * size : self.last * size]

    def of(self, entries: tuple[T, ...]) -> tuple[T, ...]:
        """Its part of a tuple with one entry for each block of the event."""
        return entries[self.first : self.last]


class TierStream:
    """Joins what a manager tells and what its tier reports. Single-threaded, like the manager.

    Args:
        groups: what events call the groups (`Manager.group_labels`).
        medium: the tier's (`Connector.medium`).
    """

    def __init__(self, groups: Sequence[GroupLabel], medium: str) -> None:
        self._groups = groups
        self._medium = medium
        self._told: OrderedDict[_Name, tuple[BlockStored, int]] = OrderedDict()
        """Event and index in it, by key, those told last at the end."""
        self._told_bytes = 0

    def join(self, device: Sequence[Event], tier: Iterable[KeyEvent]) -> list[Event]:
        """Both in order, the tier's after the device's. O(keys).

        A loss on either side is told first, once: `AllBlocksCleared` is for all media, and what
        follows a loss is right on both sides.
        """
        lost = any(isinstance(event, AllBlocksCleared) for event in device[:1])
        events: list[Event] = list(device[lost:])
        for event in events:
            if isinstance(event, BlockStored):
                self._remember(event)
        for report in tier:
            if isinstance(report, KeysLost):
                lost = True
            elif isinstance(report, KeysRemoved):
                events.extend(self._removed(report))
            else:
                events.extend(self._stored(report))
        while self._told_bytes > MAX_REMEMBERED_BYTES:
            self._forget(next(iter(self._told)))
        return [AllBlocksCleared(), *events] if lost else events

    def _remember(self, event: BlockStored) -> None:
        told, group, namespace = self._told, event.group_idx, event.namespace
        for index, key in enumerate(event.block_hashes):
            name = group, namespace, key
            if name in told:
                if not event.token_ids:  # a load whose request has gone: it knows less
                    continue
                self._forget(name)
            told[name] = event, index
            self._told_bytes += _bytes(event)

    def _forget(self, name: _Name) -> None:
        self._told_bytes -= _bytes(self._told.pop(name)[0])

    def _removed(self, report: KeysRemoved) -> Iterator[BlockRemoved]:
        keys = _digests(report.keys)
        for first in range(0, len(keys), MAX_REMOVED_HASHES):
            yield BlockRemoved(
                block_hashes=tuple(keys[first : first + MAX_REMOVED_HASHES]),
                medium=report.medium or self._medium,
                group_idx=report.group,
                namespace=_outside(report.namespace),
            )

    def _stored(self, report: KeysStored) -> Iterator[BlockStored]:
        namespace, medium = _outside(report.namespace), report.medium or self._medium
        pieces: list[_Piece] = []
        for key in _digests(report.keys):
            told = self._told.get((report.group, namespace, key))
            if told is None:
                yield from _joined(pieces, medium)
                yield self._bare(report.group, namespace, key, medium)
                continue
            event, index = told
            if pieces and pieces[-1].event is event and pieces[-1].last == index:
                pieces[-1].last += 1
                continue
            piece = _Piece(event, index, index + 1)
            if pieces and not _continues(pieces[-1], piece):
                yield from _joined(pieces, medium)
            pieces.append(piece)
        yield from _joined(pieces, medium)

    def _bare(self, group: int, namespace: bytes | None, key: bytes, medium: str) -> BlockStored:
        """A key of which nothing else is known: one event each, as it follows no other."""
        label = self._groups[group]
        return BlockStored(
            block_hashes=(key,),
            parent_block_hash=None,
            token_ids=(),
            block_size=label.block_tokens,
            medium=medium,
            group_idx=group,
            kv_cache_spec_kind=label.kind,
            kv_cache_spec_sliding_window=label.window_tokens,
            namespace=namespace,
        )


def _joined(pieces: list[_Piece], medium: str) -> Iterator[BlockStored]:
    """The pieces as one event; empties the list."""
    if not pieces:
        return
    keys = chain.from_iterable(piece.of(piece.event.block_hashes) for piece in pieces)
    extra_keys = tuple(
        chain.from_iterable(
            piece.of(piece.event.extra_keys or (None,) * piece.last) for piece in pieces
        )
    )
    yield replace(
        pieces[0].event,
        block_hashes=tuple(keys),
        parent_block_hash=pieces[0].parent,
        token_ids=tuple(chain.from_iterable(piece.tokens for piece in pieces)),
        medium=medium,
        extra_keys=extra_keys if any(extra_keys) else None,
    )
    pieces.clear()


def _bytes(event: BlockStored) -> int:
    """Of one key."""
    return _KEY_BYTES + _TOKEN_BYTES * event.block_size * bool(event.token_ids)


def _outside(namespace: bytes) -> bytes | None:
    return None if namespace == NATIVE_NAMESPACE else namespace


def _digests(keys: NDArray[np.uint8]) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[i : i + 32] for i in range(0, len(raw), 32)]


def _continues(before: _Piece, piece: _Piece) -> bool:
    """Whether one event can tell both. The key before tells all but who wrote it."""
    one, other = before.event, piece.event
    return (
        one.block_hashes[before.last - 1] == piece.parent
        and (one.session_id, one.lora_id, one.lora_name)
        == (other.session_id, other.lora_id, other.lora_name)
        and bool(one.token_ids) == bool(other.token_ids)
    )
