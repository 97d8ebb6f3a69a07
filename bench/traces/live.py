"""Arrivals of a replay that takes time: an open loop as recorded, or live sessions that wait for answers.

    open loop     request at its recorded time, whatever became of those before it
    live session  request when all have ended that had ended before it in the recording, and its
                  recorded pause has passed since the last of them

A session lives in a lane as those of `lanes` do: the same seed draws the same order of sessions and
the same starts; pauses are cut to 300 s; a session that ends makes room for a fresh one, whose
blocks are its own. Sub-agents that ran side by side do so again: they do not wait for each other.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.lanes import (
    GAP_CAP_SECONDS,
    STAGGER_SECONDS,
    TURNOVER_SECONDS,
    WARM_UP_SECONDS,
    LaneSettings,
    row_before,
)
from kvcache.bench.traces.prefix_tree import Row, Session, as_request, expand
from kvcache.core.errors import ConfigError

NEVER = float("inf")


class Arrival(NamedTuple):
    """A request, and the name under which its end is told."""

    ticket: int
    request: TraceRequest


class Arrivals(Protocol):
    """Who comes when."""

    def next_seconds(self) -> float:
        """When the next request comes, as far as is known now; `NEVER`: none, unless one ends."""

    def take(self) -> Arrival:
        """That request."""

    def ended(self, ticket: int, seconds: float) -> None:
        """The request of this ticket has its answer."""


class OpenLoop:
    """Requests at their times.

    Args:
        speed: how many times as fast as recorded.
    """

    def __init__(self, requests: Iterator[TraceRequest], *, speed: float = 1.0) -> None:
        self._requests = requests
        self._speed = speed
        self._tickets = count()
        self._next = self._read()

    def _read(self) -> TraceRequest | None:
        request = next(self._requests, None)
        if request is None:
            return None
        return request._replace(arrival_seconds=request.arrival_seconds / self._speed)

    def next_seconds(self) -> float:
        """O(1)."""
        return NEVER if self._next is None else self._next.arrival_seconds

    def take(self) -> Arrival:
        """Reads the one after it."""
        assert self._next is not None
        arrival = Arrival(next(self._tickets), self._next)
        self._next = self._read()
        return arrival

    def ended(self, ticket: int, seconds: float) -> None:
        """Nobody waits for it."""


class _Play:
    """One session in its lane, from `start_row` on.

    Rows by the order in which they ended in the recording; a row may start when the first `need` of
    those have ended here.
    """

    def __init__(
        self, lane: int, session: Session, start_row: int, seconds: float, first: int
    ) -> None:
        self.lane = lane
        self.session = session
        self.open = 0
        """Rows that were given out and have not ended."""
        self.closed = False
        """No more rows: the next one would come too late."""
        self._rows = session.rows
        self._start_row = start_row
        self._started = seconds
        self._expanded = enumerate(expand(session.rows, first))
        self._blocks: dict[int, NDArray[np.int64]] = {}
        rows = range(start_row, len(self._rows))
        self._by_end = sorted(rows, key=lambda i: (_end(self._rows[i]), i))
        self._need = self._needs()
        self._ended_at: dict[int, float] = {}
        self._front = 0
        """So many of `_by_end` have ended, without a gap."""
        self._front_seconds = seconds
        self._waiting = sorted(rows, key=lambda i: (self._need[i], i), reverse=True)

    def _needs(self) -> dict[int, int]:
        """How many rows ended before each began."""
        keys = [(_end(self._rows[i]), i) for i in self._by_end]
        needs, front = {}, 0
        for i in range(self._start_row, len(self._rows)):
            while front < len(keys) and keys[front] < (self._rows[i].seconds, i):
                front += 1
            needs[i] = front
        return needs

    def ready(self) -> list[tuple[float, int]]:
        """(time, row) of rows that nothing but their pause keeps back now. Each is told once."""
        found = []
        while self._waiting and self._need[self._waiting[-1]] <= self._front:
            row = self._waiting.pop()
            found.append((self._time(row), row))
        return found

    def _time(self, row: int) -> float:
        recorded, need = self._rows[row].seconds, self._need[row]
        if not need:
            return self._started + recorded - self._rows[self._start_row].seconds
        last = self._by_end[:need]
        pause = recorded - _end(self._rows[last[-1]])
        return max(self._ended_at[i] for i in last) + min(max(pause, 0.0), GAP_CAP_SECONDS)

    def end(self, row: int, seconds: float) -> None:
        """A row has its answer."""
        self.open -= 1
        self._ended_at[row] = seconds
        while self._front < len(self._by_end) and self._by_end[self._front] in self._ended_at:
            self._front += 1

    @property
    def over(self) -> bool:
        """Nothing runs, and nothing will."""
        return not self.open and (self.closed or len(self._ended_at) == len(self._by_end))

    def blocks(self, row: int) -> NDArray[np.int64]:
        """Blocks of a row; asked for once."""
        while row not in self._blocks:
            i, blocks = next(self._expanded)
            if i >= self._start_row:
                self._blocks[i] = blocks
        return self._blocks.pop(row)


def _end(row: Row) -> float:
    return row.seconds + row.api_seconds


class LiveSessions:
    """A closed loop: `settings.lanes` sessions at any time, until `settings.end_seconds`.

    Raises:
        ConfigError: no session of two or more requests.
    """

    def __init__(self, sessions: Sequence[Session], settings: LaneSettings) -> None:
        self._sessions = [s for s in sessions if len(s.rows) > 1]
        if not self._sessions:
            raise ConfigError(
                f"--lanes needs a session of two or more requests: the trace's {len(sessions)} have"
                " one each"
            )
        self._end_seconds = settings.end_seconds
        draw = random.Random(settings.seed)
        self._order = list(range(len(self._sessions)))
        draw.shuffle(self._order)
        self._plays = 0
        self._first_block = 0
        self._due: list[tuple[float, int, int, _Play]] = []
        self._tickets = count()
        self._open: dict[int, tuple[_Play, int]] = {}
        for lane in range(settings.lanes):
            start = draw.random() * STAGGER_SECONDS
            self._start(lane, start, 0.25 + 0.5 * draw.random())

    def _start(self, lane: int, seconds: float, share: float | None) -> None:
        """A session begins in a lane: at its first row, or at a share of its length."""
        if seconds >= self._end_seconds:
            return
        session = self._sessions[self._order[self._plays % len(self._order)]]
        start_row = (
            0 if share is None else row_before(session.rows, session.rows[-1].seconds * share)
        )
        play = _Play(lane, session, start_row, seconds, self._first_block)
        self._plays += 1
        self._first_block += session.unique_blocks()
        self._queue(play)

    def _queue(self, play: _Play) -> None:
        for seconds, row in play.ready():
            if seconds > self._end_seconds:
                play.closed = True
            elif not play.closed:
                play.open += 1
                heapq.heappush(self._due, (seconds, play.lane, row, play))

    def next_seconds(self) -> float:
        """O(1)."""
        return self._due[0][0] if self._due else NEVER

    def take(self) -> Arrival:
        """O(log lanes)."""
        seconds, _, row, play = heapq.heappop(self._due)
        ticket = next(self._tickets)
        self._open[ticket] = play, row
        request = as_request(play.session.name, play.session.rows[row], play.blocks(row))
        return Arrival(
            ticket,
            request._replace(arrival_seconds=seconds, counted=seconds >= WARM_UP_SECONDS),
        )

    def ended(self, ticket: int, seconds: float) -> None:
        """Its session goes on, or its lane takes a fresh one."""
        play, row = self._open.pop(ticket)
        play.end(row, seconds)
        self._queue(play)
        if play.over:
            self._start(play.lane, seconds + TURNOVER_SECONDS, None)
