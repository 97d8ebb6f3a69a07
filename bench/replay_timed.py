"""Replays a trace in simulated time: the engine's own scheduler, steps as long as a roofline says.

Requests arrive, queue, hold their pages while they run, are preempted; what they find is what
others left at that moment. Beside hit rates there are times.

    arrivals -> SimulatedEngine.step -> SimulatedRunner: the clock moves
       ^                |
       +---- ended -----+

A request counts as hit what it found when it first started; what a preemption cost it is
`recomputed_tokens`. As in the instant replay, a trace has no keys for replies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.ideal import IdealCache
from kvcache.bench.replay import (
    foreign_digests,
    require_fitting,
    session_label,
    too_large,
    with_forgotten,
)
from kvcache.bench.replay_manager import ReplayManager, Story
from kvcache.bench.replay_report import Served, Totals, arena_values, setting_values
from kvcache.bench.replay_settings import ReplaySettings, arena_bytes, arena_slabs, state_group
from kvcache.bench.replay_timing import Times, TimingSettings
from kvcache.bench.traces import Arrivals, TraceRequest
from kvcache.connectors.base import Direction
from kvcache.connectors.driver import Offload
from kvcache.connectors.settings import slots_of_groups
from kvcache.core.errors import CapacityError, ConfigError, InvariantError
from kvcache.core.records import UNLIMITED
from kvcache.engine.request import Event, Finished, Reason
from kvcache.engine.settings import MAX_WAIT_SECONDS, EngineSettings
from kvcache.engine.simulated import SimulatedClock, SimulatedEngine, SimulatedRunner
from kvcache.engine.simulated_stamps import PageStamps
from kvcache.engine.simulated_tier import NEVER, SimulatedWorker, simulated_host

MAX_WAITING = 1_000_000
"""Requests that queue: an overload is a result, not an error."""

MAX_STILL_STEPS = 10_000
"""Steps one after the other in which neither time passes nor anything ends: a fault."""

DRAIN_SECONDS = 60.0
"""Of wall time: simulated copies end at once."""

STATE_INTERVAL_TOKENS = 16_384
"""Between two stored states, on average, when the host tier is divided: a state for each turn."""


class _Open(NamedTuple):
    """A request on its way."""

    ticket: int
    request: TraceRequest
    ideal_tokens: int


class TimedReplay:
    """One run over one trace. `run` it, then read `report`.

    Args:
        path: of the trace, for messages.
        trace_block_tokens: tokens of its blocks.
        settings: as of the instant replay; `oracle` has no meaning here.
        timing: how time passes.
    """

    def __init__(
        self,
        path: Path,
        trace_block_tokens: int,
        settings: ReplaySettings,
        timing: TimingSettings,
    ) -> None:
        self._path = path
        self._settings = settings
        self._timing = timing
        self._geometry = settings.geometry
        self._merge = require_fitting(trace_block_tokens, settings, self._geometry)
        self._trace_block = trace_block_tokens
        self._slabs = arena_slabs(settings.pool_tokens, self._geometry)
        self.clock = SimulatedClock()
        self._roofline = timing.roofline(settings)
        self._stamps: PageStamps | None = None
        self._worker: SimulatedWorker | None = None
        self._manager = ReplayManager(
            self._geometry,
            slabs=self._slabs,
            retention=settings.policy(),
            movable=settings.movable,
            seed=settings.seed,
            clock=self.clock,
            state_group=state_group(self._geometry),
            tiered=timing.host_tokens is not None,
            checking=settings.check,
        )
        self._offload = self._build()
        self._ideal = IdealCache(self._geometry.hash_unit_tokens, self._geometry.grid_tokens)
        self._open: dict[int, _Open] = {}
        self._totals = Totals()
        self._times = Times()
        self._host_tokens = 0
        self._expected_tokens = 0
        self._engine_seconds = 0.0
        self._request_seconds = 0.0
        """Requests that are here, summed over time."""
        self._latency_seconds = 0.0
        self._waiting_peak = 0

    def _build(self) -> Offload | None:
        """The engine, and its tier if there is one."""
        settings, timing, slots = self._settings, self._timing, self._slots()
        if settings.check and self._slabs != UNLIMITED:
            self._stamps = PageStamps(self._geometry, self._slabs, slots)
        self._runner = SimulatedRunner(self._roofline, self.clock, self._stamps)
        offload = None
        if slots:
            connector = simulated_host(
                self._geometry,
                slots,
                timing.hardware,
                self.clock,
                stamps=self._stamps,
                seed=settings.seed,
            )
            assert isinstance(connector.worker, SimulatedWorker)
            self._worker = connector.worker
            offload = Offload(self._manager, connector, self._runner.regions(self._slabs))
            self._manager.explain_request = offload.explain
        self.engine = SimulatedEngine(
            self._runner,
            self._manager,
            offload,
            settings=EngineSettings(
                token_budget=timing.token_budget,
                max_requests=timing.max_requests,
                max_waiting=MAX_WAITING,
                stall_seconds=MAX_WAIT_SECONDS,
            ),
            clock=self.clock,
        )
        return offload

    def _slots(self) -> tuple[int, ...]:
        """Of the host tier, for each group; none without one."""
        tokens = self._timing.host_tokens
        if tokens is None:
            return ()
        if self._slabs == UNLIMITED:
            raise ConfigError(
                "--host-tokens needs a bounded pool: give --pool-tokens a number, or leave it out"
            )
        slots, _ = slots_of_groups(
            "--host-tokens",
            self._geometry,
            capacity_bytes=arena_bytes(tokens, self._geometry),
            pages=None,
            state_interval_tokens=STATE_INTERVAL_TOKENS,
            slot_bytes=[group.page_bytes for group in self._geometry.groups],
        )
        return slots

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, arrivals: Arrivals, told: Callable[[int], None] = lambda _: None) -> None:
        """Until nobody comes any more and all have their answers.

        Time passes while there is something to compute, else it jumps to the next arrival.

        Args:
            told: called with the number of requests that have ended, after each of them.
        """
        count = 0
        while True:
            while arrivals.next_seconds() <= self.clock.now:
                self._admit(*arrivals.take())
            if not self.engine.busy:
                if arrivals.next_seconds() == NEVER:
                    break
                self.clock.advance_to(arrivals.next_seconds())
                continue
            for event in self._step(arrivals.next_seconds()):
                if isinstance(event, Finished):
                    self._end(event, arrivals)
                    count += 1
                    told(count)
        self._require_laws()

    def _step(self, next_arrival: float) -> list[Event]:
        """Compute once, or many times where nothing can happen in between."""
        clock, engine = self.clock, self.engine
        before, used = clock.now, thread_time()
        explained = self._manager.explain_seconds
        transfer = NEVER
        if self._worker is not None:
            transfer, self._worker.wake_at = self._worker.next_seconds, next_arrival
        events: list[Event] = []
        if not engine.leap(min(next_arrival, transfer)):
            events = engine.step()
            for _ in range(MAX_STILL_STEPS):
                if events or clock.now > before:
                    break
                events = engine.step()
            else:
                raise InvariantError(
                    f"{MAX_STILL_STEPS} steps at {before} s without progress:"
                    f" {len(engine.scheduler.running)} requests run,"
                    f" {len(engine.scheduler.waiting)} wait"
                )
        self._engine_seconds += thread_time() - used
        self._engine_seconds -= self._manager.explain_seconds - explained
        self._request_seconds += len(self._open) * (clock.now - before)
        self._waiting_peak = max(self._waiting_peak, len(engine.scheduler.waiting))
        return events

    def _admit(self, ticket: int, request: TraceRequest) -> None:
        """A request has come: at the latest a step ago."""
        keys = request.blocks[self._merge - 1 :: self._merge]
        ideal = self._ideal.hit_tokens(keys, request.prompt_tokens)
        used = thread_time()
        try:
            handle = self.engine.add_foreign(
                foreign_digests(keys),
                prompt_tokens=request.prompt_tokens,
                max_new_tokens=max(1, request.output_tokens),
                session=session_label(request),
                tokens=self._stamp_tokens(request),
            )
        except CapacityError as error:
            raise too_large(self._path, request, self._settings, self._geometry) from error
        self._engine_seconds += thread_time() - used
        self._open[handle] = _Open(ticket, request, ideal)
        self._expected_tokens += request.prompt_tokens + max(1, request.output_tokens) - 1
        self._request_seconds += self.clock.now - request.arrival_seconds

    def _stamp_tokens(self, request: TraceRequest) -> NDArray[np.int32] | None:
        """Tokens that name the prefix up to their block; 0 behind the last full one."""
        if self._stamps is None:
            return None
        tokens = np.zeros(request.prompt_tokens, np.int32)
        named = np.repeat(request.blocks + 1, self._trace_block)
        tokens[: len(named)] = named
        return tokens

    def _end(self, event: Finished, arrivals: Arrivals) -> None:
        """A request has its answer."""
        ticket, request, ideal = self._open.pop(event.request)
        if event.reason is not Reason.LENGTH:
            raise InvariantError(
                f"{self._path}, line {request.line}: the request ended as {event.reason.value}"
            )
        story, usage, timing = self._manager.take_story(event.request), event.usage, event.timing
        self._latency_seconds += timing.finish - request.arrival_seconds
        arrivals.ended(ticket, timing.finish)
        self._manager.watch.earn(len(request.blocks) // self._merge)
        lost = self._lost(request, story, usage.cached_tokens, ideal)
        if not request.counted:
            return
        self._totals.add(
            request,
            Served(usage.cached_tokens, ideal, 0, story.policy_states, story.end_states, lost),
        )
        self._host_tokens += usage.host_tokens
        self._times.add(
            request,
            started=story.started,
            first_token=timing.first_token,
            finished=timing.finish,
        )

    def _lost(
        self, request: TraceRequest, story: Story, cached_tokens: int, ideal: int
    ) -> dict[str, int]:
        """Tokens by cause: with what was hit, all of the prompt."""
        explanation = story.explanation
        if self._settings.pool_tokens is not None:
            explanation = with_forgotten(explanation, ideal)
        lost = explanation.lost()
        if cached_tokens + sum(lost.values()) != request.prompt_tokens:
            raise InvariantError(
                f"{self._path}, line {request.line}: {cached_tokens} hit tokens and those lost, {lost},"
                f" do not add up to a prompt of {request.prompt_tokens}"
            )
        return lost

    # ---- laws and figures ----------------------------------------------------------------------

    def _require_laws(self) -> None:
        """Every request has ended; tokens and seconds are conserved.

        Computed and adopted tokens are those of all requests, beside what preemptions threw away;
        the time that requests spent here is their number, summed over time (Little's law).

        Raises:
            InvariantError: one of these is broken.
        """
        counters = self.engine.counters
        if self._open:
            raise InvariantError(f"{len(self._open)} requests did not end")
        got = counters.computed_tokens + counters.device_tokens + counters.restored_tokens
        extra = got - self._expected_tokens
        if extra < 0 or (extra and not counters.preemptions):
            raise InvariantError(
                f"{got} tokens were computed or adopted for {self._expected_tokens} of all requests,"
                f" with {counters.preemptions} preemptions"
            )
        if abs(self._request_seconds - self._latency_seconds) > 1e-6 * (1 + self._latency_seconds):
            raise InvariantError(
                f"requests spent {self._latency_seconds} s here, their number over time says"
                f" {self._request_seconds} s"
            )
        if self._settings.check and self._offload is not None:
            self._offload.check()

    def report(self) -> dict[str, Any]:
        """The figures as JSON values. Call after `run`."""
        manager, counters, clock = self._manager, self.engine.counters, self.clock
        manager.watch.check()
        arena = manager.arena_stats()
        totals, times = self._totals.values(oracle=False), self._times
        host = self._host_tokens / max(1, self._totals.prompt_tokens)
        totals["hit_rate_by_source"] = {"device": totals["hit_rate"] - host}
        if self._offload is not None:
            totals["hit_rate_by_source"]["host"] = host
        span = times.seconds or float("inf")
        return {
            **setting_values(self._path, self._settings, self._geometry),
            **self._timing.values(),
            **totals,
            **times.values(),
            "requests_per_second": self._totals.requests / span,
            "prompt_tokens_per_second": self._totals.prompt_tokens / span,
            "output_tokens_per_second": self._totals.output_tokens / span,
            "simulated_seconds": clock.now,
            "busy_share": self._runner.busy_seconds / clock.now if clock.now else 0.0,
            "requests_in_system": self._request_seconds / clock.now if clock.now else 0.0,
            "waiting_peak": self._waiting_peak,
            "steps": counters.steps,
            "computed_tokens": counters.computed_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "preemptions": counters.preemptions,
            "host": self._host_values(),
            **arena_values(self._slabs, self._geometry),
            "peak_used_bytes": manager.watch.peak_bytes,
            "moved_pages": manager.watch.moved_pages,
            "moved_bytes": manager.watch.moved_bytes,
            "reclaimed_slabs": arena.reclaimed_slabs,
            "leaked_blocks": self._leaked(),
            "checks": manager.watch.checks,
            "compared_pages": 0 if self._stamps is None else self._stamps.compared,
            "manager_seconds": self._engine_seconds,
            "explain_seconds": manager.explain_seconds,
        }

    def _leaked(self) -> int:
        """Pages that somebody holds when nobody is left: copies in flight end first."""
        if self._offload is not None and not self._offload.drain(DRAIN_SECONDS):
            raise InvariantError(f"copies did not end within {DRAIN_SECONDS} s")
        return sum(size.held for size in self._manager.arena_stats().classes)

    def _host_values(self) -> dict[str, Any] | None:
        """What the host tier did, of all requests; None without one."""
        if self._offload is None or self._worker is None:
            return None
        stats, seconds = self._offload.stats(), self.clock.now or float("inf")
        busy = self._worker.busy_seconds
        return {
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "stored_bytes": stats.stored_bytes,
            "loaded_bytes": stats.loaded_bytes,
            "evicted_pages": stats.evicted_pages,
            "dropped_store_pages": stats.dropped_store_pages,
            "failed_loads": self.engine.counters.failed_loads,
            "load_busy_share": busy[Direction.LOAD] / seconds,
            "store_busy_share": busy[Direction.STORE] / seconds,
        }
