"""One request as the engine sees it: tokens, progress, what it reused, when things happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Status(Enum):
    """Where a request stands. Pages are held in `LOADING` and `RUNNING` only."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


class Reason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    """It has `max_new_tokens` tokens."""
    STOP = "stop"
    """The last token is one of its stop ids."""
    ABORT = "abort"
    ERROR = "error"
    """The runner raised while it computed a batch with this request in it."""
    STALLED = "stalled"
    """Pages that it needs stayed out of use for longer than `stall_seconds`."""


class Usage(NamedTuple):
    """What a request cost and what it was spared, in tokens."""

    prompt_tokens: int
    output_tokens: int
    device_tokens: int
    """Of the prompt: found on the device when the request first ran."""
    host_tokens: int
    """Of the prompt: restored from a tier when the request first ran."""
    recomputed_tokens: int
    """Computed although the request had held them before: it was preempted in between."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, from every source."""
        return self.device_tokens + self.host_tokens


class Timing(NamedTuple):
    """Readings of one monotonic clock, in seconds. `first_token` is 0.0 if there was none."""

    arrival: float
    first_token: float
    finish: float

    @property
    def first_token_seconds(self) -> float:
        """Time to the first token, or 0.0 if there was none."""
        return max(0.0, self.first_token - self.arrival)


class Token(NamedTuple):
    """A request has one more token."""

    request: int
    token: int


class Finished(NamedTuple):
    """A request has ended; nothing more comes for it."""

    request: int
    reason: Reason
    usage: Usage
    timing: Timing


Event = Token | Finished


class Result(NamedTuple):
    """All that one request gave."""

    tokens: list[int]
    reason: Reason
    usage: Usage
    timing: Timing


class PageTable:
    """Pages of one request in one attention group; grows with the request, to `blocks` at most."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, blocks: int) -> None:
        self._buffer = np.empty(blocks, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, pages: NDArray[np.int32]) -> None:
        """The pages that follow."""
        self._buffer[self._length : self._length + len(pages)] = pages
        self._length += len(pages)

    def cut(self, blocks: int) -> None:
        """Forget what lies behind so many blocks."""
        self._length = min(self._length, blocks)

    @property
    def pages(self) -> NDArray[np.int32]:
        """All of them: a view, which later appends leave as it is, unless some were cut off before."""
        return self._buffer[: self._length]


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request. Owned by the scheduler's thread."""

    id: int
    """The manager's handle."""
    tokens: NDArray[np.int32]
    """Prompt and output; the first `known` entries are set."""
    prompt_tokens: int
    known: int
    stop_ids: frozenset[int]
    arrival: float
    order: int
    """Rank of arrival: smaller is older."""
    foreign: bool = False
    """Its keys come from outside, its tokens are not known."""
    priority: int = 0
    """Smaller is sooner."""
    due: float = 0.0
    """Its arrival, moved by its priority: see `EngineSettings.priority_seconds`."""
    computed: int = 0
    """Tokens whose KV is in pages that the request holds."""
    granted: int = 0
    """Tokens that it holds pages for."""
    reached: int = 0
    """The most that `computed` ever was."""
    status: Status = Status.WAITING
    needs_budget: bool = False
    """While it waits: its last lookup found nothing to load, it can only start by computing."""
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    admitted: bool = False
    first_token: float = 0.0
    adopting: tuple[int, int] = field(default=(0, 0))
    """Device and tier tokens of the hit that a load in flight completes."""
    adopted: bool = False
    """It starts from a hit, and the runner has not seen it since."""
    guess: int = -1
    """While it decodes with a draft model: the draft of its next token; -1: none."""
    instead: tuple[int, int] | None = None
    """Tokens [begin, end) that its last lookup left in the tier because computing is cheaper."""
    excess_seconds: float = 0.0
    """How much longer the load that its last lookup is for takes than computing, by estimate."""
    awaits: Request | None = None
    """While it waits: the request whose load brings what it needs. Not looked at until that ends."""
    awaited_tokens: int = 0
    """So many had come, in groups that keep all tokens, when it had waited: no reason to wait again."""
    tables: dict[int, PageTable] = field(default_factory=dict)
    """By group: the pages that the runner was told of. A page that is held keeps its number."""

    @property
    def rank(self) -> tuple[float, int]:
        """Who is served first. It never changes, so that none is passed by ever new arrivals."""
        return self.due, self.order

    @property
    def in_step(self) -> bool:
        """Whether the step that is scheduled now computes some of it: its pages are in use."""
        return self.status is Status.RUNNING and self.granted > self.computed

    @property
    def remaining(self) -> int:
        """Known tokens to compute before the next one can be sampled; 1 while decoding."""
        return self.known - self.computed

    @property
    def output(self) -> Sequence[int]:
        """The generated tokens."""
        return [int(t) for t in self.tokens[self.prompt_tokens : self.known]]

    def adopt(self, device_tokens: int, host_tokens: int) -> None:
        """Start from a hit: nothing of it is computed. The first one is what the caller is told."""
        self.computed = self.granted = device_tokens + host_tokens
        self.adopted = self.computed > 0
        self.reached = max(self.reached, self.computed)
        self.status = Status.RUNNING
        if not self.admitted:
            self.admitted = True
            self.device_tokens, self.host_tokens = device_tokens, host_tokens

    def lose_pages(self) -> None:
        """It holds no pages any more and waits to be looked up again."""
        self.computed = self.granted = 0
        self.tables = {}
        self.guess = -1
        self.status = Status.WAITING
        self.needs_budget = False
        self.awaited_tokens = 0

    def advance(self, end: int) -> None:
        """The tokens up to `end` were computed."""
        self.recomputed_tokens += max(0, min(end, self.reached) - self.computed)
        self.computed = end
        self.reached = max(self.reached, end)

    def first_end(self, tokens: Sequence[int] | NDArray[np.int32]) -> int:
        """How many of these next tokens there are up to the first that ends the request."""
        for i, token in enumerate(tokens):
            if int(token) in self.stop_ids:
                return i + 1
        return min(len(tokens), len(self.tokens) - self.known)

    def append(self, token: int, now: float) -> Reason | None:
        """Take a generated token; returns why the request is over, if it is."""
        self.tokens[self.known] = token
        self.known += 1
        if self.known == self.prompt_tokens + 1:
            self.first_token = now
        if token in self.stop_ids:
            return Reason.STOP
        return Reason.LENGTH if self.known == len(self.tokens) else None

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            self.prompt_tokens,
            self.known - self.prompt_tokens,
            self.device_tokens,
            self.host_tokens,
            self.recomputed_tokens,
        )
