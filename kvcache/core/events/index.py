"""A reference index: events in, the set of keys of each group and medium out. For tests and routers.

A naive model, for comparing with: Python sets, nothing shared, nothing lazy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcache.core.errors import InputError
from kvcache.core.events.records import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    require_event,
    require_keys,
)
from kvcache.core.values import flag, sequence, shown, text

_SHELF_FIELDS = (
    ("medium", str, "a text"),
    ("group_idx", int | np.integer, "a number"),
    ("namespace", bytes, "bytes"),
)


class Shelf(NamedTuple):
    """Where a key lives."""

    group: int | None
    medium: str | None
    """Upper case: publishers differ (vLLM's store connector writes `cpu`)."""
    namespace: bytes | None = None


class ReferenceIndex:
    """Keys by shelf, as a stream of events tells them.

    Args:
        count_copies: a key is there until it was removed as often as it was stored. Right for
            pools that may hold one key in several blocks, as vLLM's does; it must not be used where
            events may come twice. Off: stored once or ten times, one removal ends it.
    """

    def __init__(self, *, count_copies: bool = False) -> None:
        self._count = flag(count_copies, "ReferenceIndex.count_copies")
        self._shelves: dict[Shelf, Counter[BlockHash]] = {}
        self.repeated_stores = 0
        """Stores of a key that was there. From our pools: always 0, in a complete stream."""
        self.unknown_removals = 0
        """Removals of a key that was not there: a store was missed. In a complete stream 0."""

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in order. Token ids are not looked at.

        Raises:
            ConfigError: `events` cannot be walked.
            InputError: something in it is no event, or its keys or its shelf are of another kind.
                None of the events was taken.
        """
        found = sequence(events, "events")
        for event in found:
            _check(event)
        for event in found:
            if isinstance(event, AllBlocksCleared):
                self._shelves.clear()
                continue
            medium = event.medium.upper() if event.medium is not None else None
            shelf = Shelf(event.group_idx, medium, event.namespace)
            if isinstance(event, BlockStored):
                self._store(self._shelves.setdefault(shelf, Counter()), event)
            else:
                self._remove(shelf, event)

    def _store(self, keys: Counter[BlockHash], event: BlockStored) -> None:
        for key in event.block_hashes:
            self.repeated_stores += key in keys
            keys[key] = keys[key] + 1 if self._count else 1

    def _remove(self, shelf: Shelf, event: BlockRemoved) -> None:
        keys = self._shelves.get(shelf, Counter())
        for key in event.block_hashes:
            if key not in keys:
                self.unknown_removals += 1
            elif keys[key] > 1:
                keys[key] -= 1
            else:
                del keys[key]
        if not keys:
            self._shelves.pop(shelf, None)

    def forget(self) -> None:
        """Nothing is known any more: after a loss, or when the publisher started anew."""
        self._shelves.clear()

    def shelves(self) -> frozenset[Shelf]:
        """Where there are keys."""
        return frozenset(self._shelves)

    def keys(
        self, group: int | None, medium: str | None = "GPU", *, namespace: bytes | None = None
    ) -> frozenset[BlockHash]:
        """The keys of one shelf; empty if there are none."""
        medium = text(medium, "medium").upper() if medium is not None else None
        return frozenset(self._shelves.get(Shelf(group, medium, namespace), ()))

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))


def _check(event: Event) -> None:
    """`InputError` for what cannot be put on a shelf."""
    require_event(event)
    if isinstance(event, AllBlocksCleared):
        return
    require_keys(event)
    for name, kind, words in _SHELF_FIELDS:
        value = getattr(event, name)
        if value is not None and not isinstance(value, kind):
            raise InputError(
                f"{type(event).__name__}.{name} is {shown(value)}: it must be {words} or None"
            )
