"""What a publisher keeps for subscribers that missed something, and how it is handed out.

Bounded twice: by batches and by bytes. A replay is a job that is advanced a slice at a time
between live batches, no faster than its client reads, and ends at its deadline.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


MAX_TIMEOUTS = 20
"""A replay that goes on, but slowly, is dropped after so many times its timeout."""


class ReplayBuffer:
    """The last payloads by sequence number, ascending. Numbers may be missing."""

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: OrderedDict[int, bytes] = OrderedDict()
        self.bytes = 0
        self.last = -1
        """The newest number; -1 before the first."""

    def append(self, seq: int, payload: bytes) -> None:
        """Keep `payload`; the oldest ones go until both bounds hold. Amortised O(1)."""
        self._payloads[seq] = payload
        self.bytes += len(payload)
        self.last = seq
        while self._payloads and (
            len(self._payloads) > self._max_batches or self.bytes > self._max_bytes
        ):
            self.bytes -= len(self._payloads.popitem(last=False)[1])

    def first(self) -> int:
        """The oldest number that is kept; one past the newest if none is."""
        return next(iter(self._payloads), self.last + 1)

    def get(self, seq: int) -> bytes | None:
        """One payload, or None if it is gone or never was."""
        return self._payloads.get(seq)

    def __len__(self) -> int:
        return len(self._payloads)


class ReplayJob:
    """One client's request: everything from `start` to what was newest when it asked."""

    def __init__(
        self, client: bytes, start: int, last: int, *, now: float, timeout_seconds: float
    ) -> None:
        self.client = client
        self._timeout = timeout_seconds
        self._progress_at = now
        self._give_up_at = now + MAX_TIMEOUTS * timeout_seconds
        self._next = start
        self._last = last

    def peek(self, buffer: ReplayBuffer) -> Frames:
        """What is to be sent next; the same until `advance`."""
        self._next = max(self._next, buffer.first())
        while self._next <= self._last:
            payload = buffer.get(self._next)
            if payload is not None:
                return Frames(self._next.to_bytes(8, "big"), payload, end=False)
            self._next += 1
        return Frames(END_SEQ, b"", end=True)

    def advance(self, now: float) -> None:
        """What `peek` gave has been sent."""
        self._next += 1
        self._progress_at = now

    def overdue(self, now: float) -> bool:
        """Whether the client took nothing for too long, or has been at it for far too long."""
        return now >= min(self._progress_at + self._timeout, self._give_up_at)


class Frames(NamedTuple):
    """One answer: sequence number and payload; `end` for the mark that ends a replay."""

    seq: bytes
    payload: bytes
    end: bool
