"""One stream from several sources: events of a manager and its tiers, until they are published.

Bounded: where nobody takes them, all that waits is dropped and `AllBlocksCleared` stands in its
place. A consumer then knows less than there is, which costs a hit, but nothing that is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.core.errors import ConfigError
from kvcache.core.events.records import AllBlocksCleared, Event


class EventLog:
    """Events in the order of `add`. Single-threaded, like the manager.

    Args:
        max_hashes: keys that may wait.
    """

    def __init__(self, *, max_hashes: int = 4_000_000) -> None:
        if max_hashes < 1:
            raise ConfigError(f"EventLog.max_hashes is {max_hashes}: it must be above 0")
        self._max_hashes = max_hashes
        self._events: list[Event] = []
        self._hashes = 0
        self.dropped = 0
        """Events lost for want of a reader, since the start."""

    def add(self, events: Iterable[Event]) -> None:
        """Append what a manager or a tier reports."""
        for event in events:
            self._events.append(event)
            if not isinstance(event, AllBlocksCleared):
                self._hashes += len(event.block_hashes)
            if self._hashes > self._max_hashes:
                self.dropped += len(self._events)
                self._events, self._hashes = [AllBlocksCleared()], 0

    def take(self) -> tuple[Event, ...]:
        """What waits. Empties the log."""
        events = tuple(self._events)
        self._events, self._hashes = [], 0
        return events
