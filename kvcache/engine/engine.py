"""The step loop: requests in, tokens out. One thread, no waiting inside a step that can compute.

One step:

    loads that ended -> begin_step -> schedule (allocate, commit) -> move pages -> run -> end_step
        -> tokens, finished requests -> stores of newly keyed pages
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.driver import Offload
from kvcache.core import arrays
from kvcache.core.errors import CapacityError, ConfigError, HandleError, InputError, MisuseError
from kvcache.core.hashing import as_tokens
from kvcache.core.manager import Manager
from kvcache.core.values import whole
from kvcache.engine.chunk import Chunk, Runner
from kvcache.engine.queues import Counters
from kvcache.engine.request import (
    Event,
    Finished,
    PageTable,
    Reason,
    Request,
    Result,
    Status,
    Timing,
    Token,
)
from kvcache.engine.scheduler import Scheduler, Work

MAX_WAIT_SECONDS = 86_400.0
MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits of one engine."""

    token_budget: int = 512
    """Most tokens computed in one step."""
    max_requests: int = 16
    """Most requests that run or load at one time."""
    max_waiting: int = 4096
    """Most requests that wait for their turn; more are refused."""
    idle_wait_seconds: float = 0.002
    """How long one step waits for transfers or pages when it has nothing to compute."""
    stall_seconds: float = 60.0
    """After so long without any progress the oldest request is given up."""
    priority_seconds: float = 60.0
    """A request goes before one of the next lower priority that came up to so much earlier."""
    debug: bool = False
    """Recount the manager's invariants after each step. O(pages) per step."""

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}: it must be above 0")
        for name in ("idle_wait_seconds", "stall_seconds", "priority_seconds"):
            if not 0 < getattr(self, name) <= MAX_WAIT_SECONDS:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: it must be above 0 and at most"
                    f" {MAX_WAIT_SECONDS}"
                )


class Engine:
    """Continuous batching over one runner. Not thread-safe.

    Args:
        runner: computes chunks on the pages that the manager hands out.
        manager: owns those pages; built for `runner.geometry`. May be `movable`: the engine lets
            the runner do the copies.
        offload: a tier below the device, made for the same manager; None: no tier.
        clock: what timings and priorities go by, in seconds.
    """

    def __init__(
        self,
        runner: Runner,
        manager: Manager,
        offload: Offload | None = None,
        *,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if runner.geometry != manager.geometry:
            raise ConfigError("the runner and the manager were built for different geometries")
        if offload is not None and offload.manager is not manager:
            raise ConfigError("the offload was made for another manager: give both the same one")
        self.settings = settings or EngineSettings()
        self.scheduler = Scheduler(
            manager,
            offload,
            move_pages=self._move_pages,
            token_budget=self.settings.token_budget,
            max_requests=self.settings.max_requests,
        )
        self._runner = runner
        self._manager = manager
        self._offload = offload
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._arrivals = 0
        self._events: list[Event] = []
        self._idle_since: float | None = None
        self._kinds = [rules.kind for rules in manager.geometry.rules]

    # ---- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int] | NDArray[np.integer],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
        salt: str = "",
        priority: int = 0,
    ) -> int:
        """Queue a prompt; returns the request's id.

        Args:
            prompt: token ids; copied.
            max_new_tokens: most tokens to generate.
            stop_ids: generation ends after one of these; it is part of the output.
            boundaries: prompt positions where a prefix is known to be shared (see `Manager.open`).
            salt: requests share prefixes only under an equal salt.
            priority: smaller goes first, see `EngineSettings.priority_seconds`; equal ones in order
                of arrival. From -1,000,000 to 1,000,000.

        Raises:
            InputError: an empty prompt, a token id out of range, more tokens than the context.
            CapacityError: it can never fit in the arena, or too many requests wait.
        """
        tokens = self._validated(prompt, max_new_tokens)
        if len(self.scheduler.waiting) >= self.settings.max_waiting:
            raise CapacityError(
                f"{self.settings.max_waiting} requests wait already: send fewer at a time or raise"
                " max_waiting"
            )
        total = len(tokens) + max_new_tokens
        number = whole(priority, "priority", least=-MAX_PRIORITY, most=MAX_PRIORITY)
        stops = frozenset(int(i) for i in arrays.flat(stop_ids, np.int64, "stop_ids"))
        buffer = np.empty(total, np.int32)
        buffer[: len(tokens)] = tokens
        handle = self._manager.open(tokens, max_tokens=total, salt=salt, boundaries=boundaries)
        now = self._clock()
        request = Request(
            id=handle,
            tokens=buffer,
            prompt_tokens=len(tokens),
            known=len(tokens),
            stop_ids=stops,
            arrival=now,
            order=self._arrivals,
            priority=number,
            due=now + number * self.settings.priority_seconds,
        )
        self._arrivals += 1
        self._requests[handle] = request
        self.scheduler.add(request)
        return handle

    def _validated(
        self, prompt: Sequence[int] | NDArray[np.integer], max_new_tokens: int
    ) -> NDArray[np.int32]:
        tokens = as_tokens(prompt)
        arrays.flat([max_new_tokens], np.int64, "max_new_tokens")
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}: it must be above 0")
        if len(tokens) == 0:
            raise InputError("the prompt is empty: give at least one token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._runner.vocab_size:
            raise InputError(
                f"the prompt has token ids from {low} to {high}: the model's vocabulary is 0 to"
                f" {self._runner.vocab_size - 1}"
            )
        total = len(tokens) + max_new_tokens
        if total > self._runner.context_tokens:
            raise InputError(
                f"the prompt has {len(tokens)} tokens and max_new_tokens is {max_new_tokens}:"
                f" together {total}, the model's context is {self._runner.context_tokens};"
                " shorten the prompt or lower max_new_tokens"
            )
        geometry, slabs = self._manager.geometry, self._manager.arena_stats().slabs
        need = geometry.slabs_needed(total)
        if need > slabs:
            raise CapacityError(
                f"a request of {total} tokens ({len(tokens)} in the prompt, max_new_tokens"
                f" {max_new_tokens}) needs {need} slabs of {geometry.slab_bytes:,} bytes, the arena"
                f" has {slabs}: give it more memory (slabs), shorten the prompt or lower"
                " max_new_tokens"
            )
        return tokens

    def abort(self, request_id: int) -> None:
        """End a request at any moment, also from inside the runner.

        Its event comes with the next `step`.
        """
        self._close(self._find(request_id), Reason.ABORT)

    def preempt(self, request_id: int) -> None:
        """Take the pages of a running request, as the scheduler does when the arena is full.

        Without effect on a request that waits or loads.
        """
        request = self._find(request_id)
        if request.status is Status.RUNNING:
            self.scheduler.preempt(request)

    def _find(self, request_id: int) -> Request:
        request = self._requests.get(whole(request_id, "request_id"))
        if request is None:
            raise HandleError(f"request {request_id} is unknown or has ended")
        return request

    @property
    def busy(self) -> bool:
        """Whether another `step` would do or tell anything."""
        return self.scheduler.busy or bool(self._events)

    @property
    def counters(self) -> Counters:
        """Counts since the engine was made. Live: read, do not keep."""
        return self.scheduler.counters

    # ---- the loop ------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute one batch; returns what happened since the last call.

        Returns at once unless there is nothing to compute and a transfer or a page is awaited: then
        after `idle_wait_seconds` at most. If the runner raises, the requests of its batch end with
        `Reason.ERROR`, and the exception goes on.
        """
        preempted = self.counters.preemptions
        ended = self.scheduler.collect_loads()
        batch, sampled = self._compute()
        now = self._clock()
        for work, token in zip(batch, sampled, strict=True):
            self._take(work, int(token), now)
        if self._offload is not None:
            self._offload.end_of_step()
        if batch or ended or preempted < self.counters.preemptions or not self.scheduler.busy:
            self._idle_since = None
        else:
            self._idle()
        if self.settings.debug:
            self._manager.check()
        events, self._events = self._events, []
        return events

    def stream(self) -> Iterator[Event]:
        """Step until every request has ended, giving each event as it comes.

        Requests may be added while it runs.
        """
        while self.busy:
            yield from self.step()

    def run(self) -> dict[int, Result]:
        """Step until every request has ended; returns what each of them gave."""
        outputs: dict[int, list[int]] = {i: list(r.output) for i, r in self._requests.items()}
        results: dict[int, Result] = {}
        for event in self.stream():
            if isinstance(event, Token):
                outputs.setdefault(event.request, []).append(event.token)
            else:
                results[event.request] = Result(outputs.pop(event.request, []), *event[1:])
        return results

    def _checked(self, sampled: object, count: int) -> NDArray[np.int32]:
        """What a runner gave, if it is one token of the vocabulary for each chunk."""
        tokens = arrays.flat(sampled, np.int32, "the runner's tokens")  # type: ignore[arg-type]
        if len(tokens) != count or not ((tokens >= 0) & (tokens < self._runner.vocab_size)).all():
            raise MisuseError(
                f"the runner gave {len(tokens)} tokens {tokens[:4]}... for {count} chunks of a"
                f" vocabulary of {self._runner.vocab_size}: one token for each chunk"
            )
        return tokens

    def _compute(self) -> tuple[list[Work], NDArray[np.int32]]:
        step = self._manager.begin_step()
        try:
            batch = self.scheduler.schedule()
            self._move_pages()
            if not batch:
                return [], np.empty(0, np.int32)
            self.counters.steps += 1
            sampled = self._runner.run([self._chunk(work) for work in batch])
            return batch, self._checked(sampled, len(batch))
        except BaseException:
            self._move_pages()
            for request in list(self.scheduler.running):
                if request.granted > request.computed:  # it takes part in this step
                    self._close(request, Reason.ERROR)
            raise
        finally:
            self._manager.end_step(step)

    def _move_pages(self) -> None:
        """Cached pages that made room for others: before those are read or written."""
        moves = self._manager.take_moves()
        if len(moves):
            self._runner.move_pages(moves)

    def _chunk(self, work: Work) -> Chunk:
        request, manager = work.request, self._manager
        return Chunk(
            tokens=request.tokens[work.start : work.end],
            start=work.start,
            tables=[
                None if kind == "state" else self._table(request, g, work.end)
                for g, kind in enumerate(self._kinds)
            ],
            states=[
                manager.state_plan(request.id, g) if kind == "state" else None
                for g, kind in enumerate(self._kinds)
            ],
        )

    def _table(self, request: Request, group: int, end: int) -> NDArray[np.int32]:
        """Pages up to token `end`. Copies only those that came since the last call.

        What a span group gave up in the meantime stays in the table: nobody reads it there.
        """
        block = self._manager.geometry.block_tokens[group]
        if not block:  # private pages
            return self._manager.block_table(request.id, group)
        if group not in request.tables:
            request.tables[group] = PageTable(-(-len(request.tokens) // block))
        table = request.tables[group]
        if -(-end // block) > len(table):
            table.append(self._manager.block_table(request.id, group, len(table)))
        return table.pages

    def _take(self, work: Work, token: int, now: float) -> None:
        request, counters = work.request, self.counters
        counters.computed_tokens += work.end - work.start
        if request.status is not Status.RUNNING:
            return  # aborted or preempted while the runner had it
        before = request.recomputed_tokens
        request.advance(work.end)
        counters.recomputed_tokens += request.recomputed_tokens - before
        if request.remaining:
            return
        reason = request.append(token, now)
        self._events.append(Token(request.id, token))
        if reason is not None:
            self._close(request, reason)
        else:
            self._manager.extend(request.id, [token])

    def _close(self, request: Request, reason: Reason) -> None:
        self.scheduler.remove(request)
        del self._requests[request.id]
        if reason in (Reason.LENGTH, Reason.STOP):
            self._manager.finish(request.id)
        else:
            self._manager.abort(request.id)
        self.counters.finished_requests += 1
        timing = Timing(request.arrival, request.first_token, self._clock())
        self._events.append(Finished(request.id, reason, request.usage(), timing))

    def _idle(self) -> None:
        """Nothing could be computed: wait for transfers, or for pages that are held from outside.

        A request that waits too long is given up.
        """
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > self.settings.stall_seconds:
            self._idle_since = None
            assert self.scheduler.oldest is not None
            self._close(self.scheduler.oldest, Reason.STALLED)
            return
        if self._offload is not None:
            self._offload.wait(self.settings.idle_wait_seconds)
        else:
            time.sleep(self.settings.idle_wait_seconds)
