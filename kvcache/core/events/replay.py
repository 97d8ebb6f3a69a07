"""What a publisher keeps for subscribers that missed something, and how it is handed out.

Bounded twice: by batches and by bytes. A replay is a job that is advanced a slice at a time
between live batches, no faster than its client reads, and ends at its deadline.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


MAX_TIMEOUTS = 20
"""A replay that goes on, but slowly, is dropped after so many times its timeout."""


class ReplayBuffer:
    """The last payloads by sequence number, ascending. Numbers may be missing, any count of them."""

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: dict[int, bytes] = {}
        self._numbers: list[int] = []
        """Ascending; those from `_begin` on are kept, the others have gone."""
        self._begin = 0
        self.bytes = 0
        self.last = -1
        """The newest number; -1 before the first."""

    def append(self, seq: int, payload: bytes) -> None:
        """Keep `payload`; the oldest ones go until both bounds hold. Amortised O(1).

        `seq` is above all numbers before it.
        """
        self._payloads[seq] = payload
        self._numbers.append(seq)
        self.bytes += len(payload)
        self.last = seq
        while self._payloads and (
            len(self._payloads) > self._max_batches or self.bytes > self._max_bytes
        ):
            self.bytes -= len(self._payloads.pop(self._numbers[self._begin]))
            self._begin += 1
        if self._begin > len(self._payloads):
            del self._numbers[: self._begin]
            self._begin = 0

    def first(self) -> int:
        """The oldest number that is kept; one past the newest if none is."""
        return self._numbers[self._begin] if self._payloads else self.last + 1

    def at_or_after(self, seq: int) -> tuple[int, bytes] | None:
        """The first number that is kept from `seq` on, and its payload; None: there is none.

        O(log n) of what is kept, however many numbers are missing.
        """
        found = bisect_left(self._numbers, seq, self._begin)
        if found == len(self._numbers):
            return None
        number = self._numbers[found]
        return number, self._payloads[number]

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
        found = buffer.at_or_after(self._next)
        if found is None or found[0] > self._last:
            return Frames(END_SEQ, b"", end=True)
        self._next, payload = found
        return Frames(self._next.to_bytes(8, "big"), payload, end=False)

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
