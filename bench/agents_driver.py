"""A scheduler with nothing around it: an agent trace through the block manager, no model, no bytes.

One step at a time, as an engine of one device with a synchronous scheduler would:

    begin_step
      running requests, the oldest first:  allocate, commit      no pages: preempt the youngest
      waiting requests, first come first:  lookup, allocate, commit
    end_step
      a request whose tokens are all computed gets its next token of the recorded output
      the last one of its output: finish; the session's next turn arrives

All steps have one token budget for prefill chunks and decode. A turn arrives when the one before it
has finished. Public API of `Manager` alone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.bench.agents_trace import AgentRequest
from kvcache.core.errors import InvariantError
from kvcache.core.manager import Manager
from kvcache.core.records import Grant, Hit

IDLE_STEPS = 64
"""So many steps in which nobody computes anything are a fault: the oldest request always gets on."""


@dataclass
class AgentFigures:
    """What a run counts. Tokens, where nothing else is said."""

    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    page_moves: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Of prompts, at the first admission; what a preempted request finds again is not in it."""
    resumed_tokens: int = 0
    resume_hit_tokens: int = 0
    computed_tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that were no hits, by cause; `quota`: found, but with no room to adopt them."""
    hits: list[int] = field(default_factory=list)
    """Hit tokens of each request, in the order of the trace."""
    peak_held_bytes: int = 0
    """Pages that running requests held at once, at the end of a step's scheduling."""
    leaked_pages: int = 0
    """Still held when the last request had finished."""
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were hits."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(eq=False)
class _Item:
    """One request from its arrival to its end."""

    number: int
    request: AgentRequest
    handle: int = -1
    known: int = 0
    """Prompt and the output tokens that were given."""
    computed: int = 0
    counted: bool = False


class AgentDriver:
    """Plays one trace through one manager.

    Args:
        manager: fresh; the driver is its only user.
        requests: of all sessions, in the order in which they would first arrive.
        boundaries: positions that every request declares (those inside its prompt).
        max_running: requests that hold pages at once.
        step_tokens: token budget of a step.
        check_every: `manager.check()` after so many steps; 0: never.
    """

    def __init__(
        self,
        manager: Manager,
        requests: Sequence[AgentRequest],
        *,
        boundaries: Sequence[int] = (),
        max_running: int,
        step_tokens: int,
        check_every: int = 0,
    ) -> None:
        self._manager = manager
        self._boundaries = boundaries
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._check_every = check_every
        self.figures = AgentFigures(hits=[0] * len(requests))
        self._running: list[_Item] = []
        self._waiting: deque[_Item] = deque()
        self._turns: dict[int, deque[_Item]] = {}
        for number, request in enumerate(requests):
            self._turns.setdefault(request.session, deque()).append(_Item(number, request))
        for session in self._turns:
            self._arrive(session)

    def run(self) -> AgentFigures:
        """Play everything; the figures. The manager holds no request afterwards."""
        idle, started = 0, time.perf_counter()
        while self._waiting or self._running:
            idle = 0 if self._step() else idle + 1
            if idle == IDLE_STEPS:
                raise InvariantError(
                    f"nobody computed anything in {idle} steps: {len(self._running)} running and"
                    f" {len(self._waiting)} waiting requests, {self._manager.stats()}"
                )
            steps = self.figures.steps
            if self._check_every and steps % self._check_every == 0:
                self._manager.check()
        self.figures.seconds = time.perf_counter() - started
        self.figures.leaked_pages = sum(c.held for c in self._manager.arena_stats().classes)
        return self.figures

    def _arrive(self, session: int) -> None:
        """The session's next turn, if it has one, joins the waiting ones."""
        if not self._turns[session]:
            return
        item = self._turns[session].popleft()
        prompt = item.request.prompt
        item.known = len(prompt)
        item.handle = self._manager.open(
            prompt,
            max_tokens=len(prompt) + len(item.request.output),
            boundaries=[b for b in self._boundaries if b <= len(prompt)],
        )
        self._waiting.append(item)

    # ---- one step ------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Whether anything was computed."""
        self.figures.steps += 1
        step = self._manager.begin_step()
        batch: list[tuple[_Item, int]] = []
        before = self.figures.preemptions
        budget = self._schedule_running(batch)
        if budget > 0 and self.figures.preemptions == before:
            self._admit(batch, budget)
        self.figures.page_moves += len(self._manager.take_moves())
        self.figures.peak_held_bytes = max(self.figures.peak_held_bytes, self._held_bytes())
        self._manager.end_step(step)
        for item, end in batch:
            self.figures.computed_tokens += end - item.computed
            item.computed = end
            if item.computed == item.known:
                self._sample(item)
        return bool(batch)

    def _held_bytes(self) -> int:
        strides = self._manager.geometry.stride_bytes
        classes = self._manager.arena_stats().classes
        return sum(c.held * stride for c, stride in zip(classes, strides, strict=True))

    def _schedule_running(self, batch: list[tuple[_Item, int]]) -> int:
        """Grants for running requests; the budget that is left, 0 where one of them is blocked."""
        budget = self._step_tokens
        for item in list(self._running):
            if budget == 0 or item not in self._running:
                break
            tokens = min(item.known - item.computed, budget)
            grant = self._grant_or_preempt(item, tokens)
            if grant is None:
                return 0
            budget -= self._commit(item, grant, batch)
        return budget

    def _grant_or_preempt(self, item: _Item, tokens: int) -> Grant | None:
        """None: the request is blocked for now, or was itself preempted."""
        while True:
            grant = self._manager.allocate(item.handle, tokens)
            if grant is not None:
                return grant
            why = self._manager.blockage(item.handle)
            if why == "restart":
                self._preempt(item)
                return None
            if why != "preempt" or self._running[-1] is item:
                return None
            self._preempt(self._running[-1])

    def _preempt(self, item: _Item) -> None:
        self._manager.preempt(item.handle)
        self._running.remove(item)
        self._waiting.appendleft(item)
        item.computed = 0
        self.figures.preemptions += 1

    def _admit(self, batch: list[tuple[_Item, int]], budget: int) -> None:
        """Start waiting requests, in their order, until one has to wait."""
        while self._waiting and budget > 0 and len(self._running) < self._max_running:
            item = self._waiting[0]
            hit = self._manager.lookup(item.handle)
            if hit.pending_tokens > hit.hit_tokens and batch:
                return  # this step writes what the request would compute a second time
            tokens = min(item.known - hit.hit_tokens, budget)
            grant = self._manager.allocate(item.handle, tokens)
            if grant is None:
                return
            self._waiting.popleft()
            self._running.append(item)
            self._count(item, hit, grant)
            item.computed = grant.start
            budget -= self._commit(item, grant, batch)

    def _commit(self, item: _Item, grant: Grant, batch: list[tuple[_Item, int]]) -> int:
        self._manager.commit(item.handle, grant.end)
        batch.append((item, grant.end))
        return grant.end - item.computed

    def _count(self, item: _Item, hit: Hit, grant: Grant) -> None:
        """The first admission counts; later ones are resumes."""
        figures = self.figures
        if item.counted:
            figures.resumed_tokens += item.known
            figures.resume_hit_tokens += grant.hit_tokens
            return
        item.counted = True
        figures.requests += 1
        figures.prompt_tokens += item.known
        figures.hit_tokens += grant.hit_tokens
        figures.hits[item.number] = grant.hit_tokens
        figures.lost.update(hit.lost)
        figures.lost["quota"] += hit.hit_tokens - grant.hit_tokens

    def _sample(self, item: _Item) -> None:
        """The next token of the recorded output; after the last one the request is done."""
        output = item.request.output
        given = item.known - len(item.request.prompt)
        self._manager.extend(item.handle, np.asarray(output[given : given + 1], np.int32))
        item.known += 1
        if given + 1 == len(output):
            self._manager.finish(item.handle)
            self._running.remove(item)
            self._arrive(item.request.session)
