"""The step loop: requests in, tokens out. One thread, no waiting inside a step that can compute.

One step:

    loads that ended -> begin_step -> schedule (allocate, commit) -> move pages -> run -> end_step
        -> tokens, finished requests -> stores of newly keyed pages
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.driver import Offload
from kvcache.core import arrays
from kvcache.core.errors import CapacityError, HandleError, MisuseError
from kvcache.core.manager import Manager
from kvcache.core.values import whole
from kvcache.engine.chunk import Chunk, Guesser, Guesses, Runner
from kvcache.engine.chunk_maker import ChunkMaker
from kvcache.engine.costs import Costs, Loads
from kvcache.engine.intake import MAX_PRIORITY, as_sampled, require_parts, validated
from kvcache.engine.one_thread import one_thread
from kvcache.engine.pauses import Pauses
from kvcache.engine.queues import Counters
from kvcache.engine.request import (
    Event,
    Finished,
    Reason,
    Request,
    Result,
    Status,
    Timing,
    Token,
)
from kvcache.engine.scheduler import Scheduler, Work
from kvcache.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings"]

T = TypeVar("T")


class Engine:
    """Continuous batching over one runner. For one thread at a time; another one is refused.

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
        require_parts(runner, manager, offload, settings)
        self._door = threading.RLock()
        self.settings = settings or EngineSettings()
        self._guesser = runner if isinstance(runner, Guesser) else None
        self.scheduler = Scheduler(
            manager,
            offload,
            costs=Costs(Loads(self.settings.loads), self.settings.token_budget),
            draft_tokens=self._guesser.draft_tokens if self._guesser else 0,
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
        """Not told yet: of this step, of an abort, of a step that raised."""
        self._ended: list[Request] = []
        """Their end is among those events."""
        self._idle_since: float | None = None
        self._chunks = ChunkMaker(manager, self._guesser)
        self._pauses = Pauses(self.scheduler, manager, offload, runner, self._move_pages)

    # ---- requests ------------------------------------------------------------------------------

    @one_thread
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
        tokens = validated(prompt, max_new_tokens, self._runner, self._manager)
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

    @one_thread
    def abort(self, request_id: int) -> None:
        """End a request at any moment, also inside the runner. Its event comes with the next `step`."""
        self._close(self._find(request_id), Reason.ABORT)

    @one_thread
    def preempt(self, request_id: int) -> None:
        """Take the pages of a running request, as the scheduler does when the arena is full.

        Without effect on a request that waits or loads.
        """
        request = self._find(request_id)
        if request.status is Status.RUNNING:
            self.scheduler.preempt(request)

    @property
    def asleep(self) -> bool:
        """Between `sleep` and `wake`."""
        return self._pauses.asleep

    @one_thread
    def sleep(self, timeout_seconds: float = 60.0) -> bool:
        """See `Pauses.sleep`."""
        return self._pauses.sleep(timeout_seconds)

    @one_thread
    def wake(self) -> None:
        """See `Pauses.wake`."""
        self._pauses.wake()

    @one_thread
    def reload(self, weights_epoch: int, load: Callable[[], None]) -> None:
        """See `Pauses.reload`."""
        self._pauses.reload(weights_epoch, load)

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

    @one_thread
    def step(self) -> list[Event]:
        """Compute one batch; returns what happened since the last call.

        Returns at once unless there is nothing to compute and a transfer or a page is awaited: then
        after `idle_wait_seconds` at most. If the runner raises, its batch's requests end with
        `Reason.ERROR`, and the exception goes on. If its `move_pages` does, no request ends: all that
        is cached on the device is forgotten, and what ran is computed again.
        """
        self._pauses.require_awake()
        begin, counters = self._clock(), self.counters
        beside = counters.runner_seconds + counters.tier_seconds
        preempted = counters.preemptions
        ended = self._timed(self.scheduler.collect_loads)
        batch, guesses = self._compute()
        now = self._clock()
        told: dict[int, NDArray[np.int32]] = {}
        for work, guess in zip(batch, guesses, strict=True):
            self._take(work, guess, now, told)
        if told:
            counts = [len(tokens) for tokens in told.values()]
            self._manager.extend_many(
                list(told), np.concatenate(list(told.values())), counts=counts
            )
        if self._offload is not None:
            self._timed(self._offload.end_of_step)
        beside = counters.runner_seconds + counters.tier_seconds - beside
        counters.scheduler_seconds += self._clock() - begin - beside
        if batch or ended or preempted < counters.preemptions or not self.scheduler.busy:
            self._idle_since = None
        else:
            self._idle()
        if self.settings.debug:
            self._manager.check()
            self.scheduler.check()
        events, self._events = self._events, []
        self._ended.clear()
        return events

    def _timed(self, call: Callable[[], T]) -> T:
        """A call whose time is the tier's."""
        begin = self._clock()
        try:
            return call()
        finally:
            self.counters.tier_seconds += self._clock() - begin

    def stream(self) -> Iterator[Event]:
        """Step until every request has ended, giving each event as it comes.

        Requests may be added while it runs.
        """
        while self.busy:
            yield from self.step()

    def run(self) -> dict[int, Result]:
        """Step until every request has ended; returns what each of them gave."""
        untold = Counter(e.request for e in self._events if isinstance(e, Token))
        outputs: dict[int, list[int]] = {
            r.id: list(r.output)[: r.known - r.prompt_tokens - untold[r.id]]
            for r in [*self._requests.values(), *self._ended]
        }
        results: dict[int, Result] = {}
        for event in self.stream():
            if isinstance(event, Token):
                outputs.setdefault(event.request, []).append(event.token)
            else:
                results[event.request] = Result(outputs.pop(event.request, []), *event[1:])
        return results

    def _compute(self) -> tuple[list[Work], list[Guesses]]:
        step = self._manager.begin_step()
        try:
            batch = self.scheduler.schedule()
            self._move_pages()
            batch = [work for work in batch if work.request.in_step]  # not aborted meanwhile
            if not batch:
                return [], []
            self.counters.steps += 1
            chunks = [self._chunks.chunk(work) for work in batch]
            begin = self._clock()
            guesses = self._run(chunks)
            seconds = self._clock() - begin
            self.counters.runner_seconds += seconds
            self.scheduler.costs.note_step([(w.start, w.end) for w in batch], seconds)
            self._commit_right(batch, guesses)
        except BaseException:
            self._move_pages()
            for request in list(self.scheduler.running):
                if request.in_step:
                    self._close(request, Reason.ERROR)
            raise
        finally:
            self._manager.end_step(step)
        return batch, guesses

    def _run(self, chunks: list[Chunk]) -> list[Guesses]:
        if self._guesser is None:
            tokens = as_sampled(self._runner.run(chunks), len(chunks), self._runner)
            return [Guesses(tokens[i : i + 1], -1) for i in range(len(tokens))]
        guesses = self._guesser.run_guessing(chunks)
        for chunk, (tokens, _) in zip(chunks, guesses, strict=True):
            if not 1 <= len(as_sampled(tokens, len(tokens), self._runner)) <= chunk.drafts + 1:
                raise MisuseError(
                    f"the runner gave {len(tokens)} tokens for a chunk with {chunk.drafts} drafts:"
                    " one, and one more for each that was right"
                )
        return guesses

    def _commit_right(self, batch: list[Work], guesses: list[Guesses]) -> None:
        """Of a chunk with drafts what was right is kept, up to where the request ends."""
        for i, work in enumerate(batch):
            request, tokens = work.request, guesses[i].tokens
            if not work.drafts or request.status is not Status.RUNNING:
                continue
            self.counters.proposed_tokens += work.drafts
            self.counters.accepted_tokens += len(tokens) - 1
            kept = tokens[: request.first_end(tokens)]
            guesses[i] = Guesses(kept, guesses[i].guess)
            self._manager.commit(request.id, work.start + len(kept))

    def _move_pages(self) -> None:
        """Cached pages that made room for others: before those are read or written."""
        moves = self._manager.take_moves()
        if len(moves):
            begin = self._clock()
            try:
                self._runner.move_pages(moves)
            except BaseException:
                self.scheduler.forget_pages()
                raise
            self.counters.runner_seconds += self._clock() - begin

    def _take(
        self, work: Work, guesses: Guesses, now: float, told: dict[int, NDArray[np.int32]]
    ) -> None:
        """What came of some work; tokens that the manager is to be told of go into `told`."""
        request, counters, tokens = work.request, self.counters, guesses.tokens
        counters.computed_tokens += work.end - work.start
        if request.status is not Status.RUNNING:
            return  # aborted or preempted while the runner had it
        before = request.recomputed_tokens
        request.advance(work.start + len(tokens) if work.drafts else work.end)
        if work.drafts:
            request.granted = request.computed  # pages of wrong guesses are gone
            self._chunks.cut_tables(request)
        counters.recomputed_tokens += request.recomputed_tokens - before
        if request.remaining > 0:
            return
        reason = None
        for token in tokens.tolist():
            reason = request.append(token, now)
            self._events.append(Token(request.id, token))
        request.guess = guesses.guess
        if reason is None and request.foreign:
            self._manager.extend_foreign(request.id, len(tokens))
            return
        if reason is None:
            told[request.id] = tokens
            return
        if len(tokens) > 1:  # the last one is not computed: it gets no key
            self._manager.extend(request.id, tokens[:-1])
        self._close(request, reason)

    def _close(self, request: Request, reason: Reason) -> None:
        self.scheduler.remove(request)
        self._ended.append(self._requests.pop(request.id))
        if reason in (Reason.LENGTH, Reason.STOP):
            self._manager.finish(request.id)
        else:
            self._manager.abort(request.id)
        self.counters.finished_requests += 1
        timing = Timing(request.arrival, request.first_token, self._clock())
        self._events.append(Finished(request.id, reason, request.usage(), timing))

    def _idle(self) -> None:
        """Nothing could be computed: wait for transfers, or for pages that are held from outside.

        A request that waits too long is given up; not while loads are in flight, which have deadlines.
        """
        now = self._clock()
        if self._idle_since is None or self.scheduler.loading:
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
