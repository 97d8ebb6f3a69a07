"""A closed set of live sessions, drawn from a file of recorded ones.

Each of N lanes plays one session after another at its recorded pace:

    lane 0   |-- rest of session 17 --|-- session 4 ------------------------|-- session 250 ...
    lane 1      |-- rest of session 8 --------------|-- session 91 --|-- session ...
             0 s           warm-up, not counted      600 s                         600 s + hours

The first session of a lane starts at 25 to 75 % of its recording, so that live contexts have the
mix of ages of a running system; idle gaps are cut to 300 s; a session that ends is replaced by a
fresh one, whose blocks are its own even when the same recording is played twice. A session whose
next request would start after the end is done, and its lane goes on with a fresh one: load stays
full to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.traces.base import TraceRequest
from kvcache.bench.traces.prefix_tree import Row, Session, as_request, expand
from kvcache.core.errors import ConfigError

WARM_UP_SECONDS = 600.0
GAP_CAP_SECONDS = 300.0
MAX_LANES = 10_000
MAX_HOURS = 10_000
STAGGER_SECONDS = 30.0
TURNOVER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class LaneSettings:
    """How many sessions live side by side, and for how long after the warm-up."""

    lanes: int
    hours: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.lanes <= MAX_LANES:
            raise ConfigError(f"--lanes is {self.lanes}: it must be from 1 to {MAX_LANES}")
        if not 0 < self.hours <= MAX_HOURS:  # false for NaN
            raise ConfigError(f"--hours is {self.hours}: it must be above 0, up to {MAX_HOURS}")

    @property
    def end_seconds(self) -> float:
        """When the last request may start."""
        return self.hours * 3600 + WARM_UP_SECONDS


class _Event(NamedTuple):
    """A request of a play: sorted by time, then by play, then by row."""

    seconds: float
    play: int
    row: int


def lane_requests(sessions: Sequence[Session], settings: LaneSettings) -> Iterator[TraceRequest]:
    """Requests of all lanes in the order of time. Expands only the sessions that are live."""
    playable = [s for s in sessions if len(s.rows) > 1]
    if not playable:
        raise ConfigError(
            f"--lanes needs a session of two or more requests: the trace's {len(sessions)} have"
            " one each"
        )
    plan = _Plan(playable, settings)
    live: dict[int, Iterator[tuple[int, NDArray[np.int64]]]] = {}
    first = 0
    for event in sorted(plan.events):
        session = playable[plan.plays[event.play]]
        if event.play not in live:
            live[event.play] = enumerate(expand(session.rows, first))
            first += session.unique_blocks()
        row, blocks = next(live[event.play])
        while row < event.row:
            row, blocks = next(live[event.play])
        if plan.last_row[event.play] == row:
            del live[event.play]
        yield as_request(session.name, session.rows[row], blocks)._replace(
            arrival_seconds=event.seconds, counted=event.seconds >= WARM_UP_SECONDS
        )


class _Plan:
    """When each request of each play starts; numbers only, no blocks.

    `random.Random(seed)` draws in a fixed order: the order of sessions, then for each lane its
    start and where its first session begins.
    """

    def __init__(self, sessions: Sequence[Session], settings: LaneSettings) -> None:
        self.events: list[_Event] = []
        self.plays: list[int] = []
        """Session of each play."""
        self.last_row: dict[int, int] = {}
        self._sessions = sessions
        self._end = settings.end_seconds
        draw = random.Random(settings.seed)
        order = list(range(len(sessions)))
        draw.shuffle(order)
        for _ in range(settings.lanes):
            now = draw.random() * STAGGER_SECONDS
            start_row: int | None = None
            while now < self._end:
                session = order[len(self.plays) % len(order)]
                rows = sessions[session].rows
                if start_row is None:
                    start_row = row_before(rows, rows[-1].seconds * (0.25 + 0.5 * draw.random()))
                now = self._play(session, start_row, now) + TURNOVER_SECONDS
                start_row = 0

    def _play(self, session: int, start_row: int, start_seconds: float) -> float:
        """Plan one session; returns when its last reply ends."""
        play = len(self.plays)
        self.plays.append(session)
        rows = self._sessions[session].rows
        shift = start_seconds - rows[start_row].seconds
        busy_until = start_seconds
        for i in range(start_row, len(rows)):
            at = rows[i].seconds + shift
            if i > start_row and at - busy_until > GAP_CAP_SECONDS:
                shift -= at - busy_until - GAP_CAP_SECONDS
                at = busy_until + GAP_CAP_SECONDS
            if at > self._end:
                break
            self.events.append(_Event(at, play, i))
            self.last_row[play] = i
            busy_until = max(busy_until, at + rows[i].api_seconds)
        return busy_until


def row_before(rows: Sequence[Row], seconds: float) -> int:
    """The last row that starts by `seconds`, and is not the very last of the session."""
    row = 0
    while row + 2 < len(rows) and rows[row + 1].seconds <= seconds:
        row += 1
    return row
