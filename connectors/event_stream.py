"""One stream of KV events from a manager and its tier, each key in the medium that holds it.

    manager:  BlockStored(GPU: a b c)                      BlockRemoved(GPU: c)
    tier:                                KeysStored(a b)
    stream:   BlockStored(GPU: a b c)    BlockRemoved(GPU: c)    BlockStored(CPU: a b)

A tier knows keys alone. Their tokens, parent, session and adapter are those that the manager told
when the same keys got their bytes on the device, which is always before a tier has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

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

MAX_REMEMBERED_KEYS: Final = 65_536
"""Device keys that the tier has not told yet; of older ones only the key itself is told then."""


class _Name(NamedTuple):
    """A key as both sides call it."""

    group: int | None
    namespace: bytes | None
    """None for native keys."""
    key: BlockHash


class _Piece(NamedTuple):
    """Neighbouring blocks `[first, last)` of what the manager told."""

    event: BlockStored
    first: int
    last: int

    @property
    def parent(self) -> BlockHash | None:
        """The key before the first."""
        event, first, _ = self
        return event.block_hashes[first - 1] if first else event.parent_block_hash

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
        self._told: dict[_Name, tuple[BlockStored, int]] = {}
        """Event and index in it, by key, oldest first: device keys that the tier may store yet."""

    def join(self, device: Sequence[Event], tier: Iterable[KeyEvent]) -> list[Event]:
        """Both in order, the tier's after the device's. O(keys).

        A loss on either side is told first, once: `AllBlocksCleared` is for all media, and what
        follows a loss is right on both sides.
        """
        tier = list(tier)
        lost = any(isinstance(event, AllBlocksCleared) for event in device[:1])
        events: list[Event] = list(device[lost:])
        gone, again = self._remember(events)
        used: set[_Name] = set()
        for report in tier:
            if isinstance(report, KeysLost):
                lost = True
            elif isinstance(report, KeysRemoved):
                events.extend(self._removed(report))
            else:
                events.extend(self._stored(report, used))
        for name in gone | (used - again):
            self._told.pop(name, None)
        while len(self._told) > MAX_REMEMBERED_KEYS:
            del self._told[next(iter(self._told))]
        return [AllBlocksCleared(), *events] if lost else events

    def _remember(self, device: Iterable[Event]) -> tuple[set[_Name], set[_Name]]:
        """Takes note of what the device stored.

        Returns the names that are gone from the device at the end, and those that were gone in
        between: the tier may store them a second time.
        """
        gone: set[_Name] = set()
        again: set[_Name] = set()
        for event in device:
            if isinstance(event, AllBlocksCleared):
                continue
            names = [_Name(event.group_idx, event.namespace, key) for key in event.block_hashes]
            if isinstance(event, BlockRemoved):
                gone.update(names)
                continue
            for index, name in enumerate(names):
                if name in gone:
                    gone.remove(name)
                    again.add(name)
                self._told[name] = event, index
        return gone, again - gone

    def _removed(self, report: KeysRemoved) -> Iterator[BlockRemoved]:
        keys = _digests(report.keys)
        for first in range(0, len(keys), MAX_REMOVED_HASHES):
            yield BlockRemoved(
                block_hashes=tuple(keys[first : first + MAX_REMOVED_HASHES]),
                medium=self._medium,
                group_idx=report.group,
                namespace=_outside(report.namespace),
            )

    def _stored(self, report: KeysStored, used: set[_Name]) -> Iterator[BlockStored]:
        namespace = _outside(report.namespace)
        pieces: list[_Piece] = []
        for key in _digests(report.keys):
            name = _Name(report.group, namespace, key)
            told = self._told.get(name)
            if told is None:
                yield from self._joined(pieces)
                yield self._bare(name)
                continue
            used.add(name)
            piece = _Piece(told[0], told[1], told[1] + 1)
            if pieces and not _continues(pieces[-1], piece):
                yield from self._joined(pieces)
            if pieces and pieces[-1].event is piece.event:
                piece = pieces.pop()._replace(last=piece.last)
            pieces.append(piece)
        yield from self._joined(pieces)

    def _joined(self, pieces: list[_Piece]) -> Iterator[BlockStored]:
        """The pieces as one event; empties the list."""
        if not pieces:
            return
        keys = [key for piece in pieces for key in piece.of(piece.event.block_hashes)]
        extra_keys = [
            entry
            for piece in pieces
            for entry in piece.of(piece.event.extra_keys or (None,) * piece.last)
        ]
        yield replace(
            pieces[0].event,
            block_hashes=tuple(keys),
            parent_block_hash=pieces[0].parent,
            token_ids=tuple(token for piece in pieces for token in piece.tokens),
            medium=self._medium,
            extra_keys=tuple(extra_keys) if any(extra_keys) else None,
        )
        pieces.clear()

    def _bare(self, name: _Name) -> BlockStored:
        """A key of which nothing else is known: one event each, as it follows no other."""
        assert name.group is not None
        label = self._groups[name.group]
        return BlockStored(
            block_hashes=(name.key,),
            parent_block_hash=None,
            token_ids=(),
            block_size=label.block_tokens,
            medium=self._medium,
            group_idx=name.group,
            kv_cache_spec_kind=label.kind,
            kv_cache_spec_sliding_window=label.window_tokens,
            namespace=name.namespace,
        )


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
