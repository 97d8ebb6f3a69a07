"""The bounded queue between the engine's thread and the one that publishes.

What finds it full leaves a gap in its place, so that the order of losses and batches is kept.
"""

from __future__ import annotations

import threading
from collections import deque

from kvcache.core.events.records import EventBatch


class Outbox:
    """Batches and gaps in order. Any thread; nothing waits but `wait_empty`."""

    def __init__(self, max_batches: int) -> None:
        self._max = max_batches
        self._changed = threading.Condition()
        self._items: deque[EventBatch | int] = deque()
        self._taken = False
        self._shut = False
        self.dropped = 0
        """Batches that became gaps."""

    def put(self, batch: EventBatch) -> bool:
        """Queue a batch; False: full, it became a gap."""
        with self._changed:
            if len(self._items) < self._max:
                self._items.append(batch)
                return True
            self._gap()
            return False

    def put_gap(self) -> None:
        """A batch was lost before it came here."""
        with self._changed:
            self._gap()

    def _gap(self) -> None:
        self.dropped += 1
        if self._items and isinstance(last := self._items[-1], int):
            self._items[-1] = last + 1
        else:
            self._items.append(1)

    def take(self) -> EventBatch | int | None:
        """The next batch, or the length of a gap; None: empty. `done` must follow."""
        with self._changed:
            self._taken = bool(self._items)
            return self._items.popleft() if self._items else None

    def done(self) -> None:
        """What `take` gave has been dealt with."""
        with self._changed:
            self._taken = False
            if not self._items:
                self._changed.notify_all()

    def shut(self) -> None:
        """Nobody takes any more: waiters give up."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def wait_empty(self, timeout_seconds: float) -> bool:
        """Until all is taken and done. False: not within the time, or never any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._shut or self._idle(), timeout_seconds)
            return self._idle()

    def _idle(self) -> bool:
        return not self._items and not self._taken

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)
