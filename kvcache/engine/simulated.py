"""The engine under a simulated clock: the real scheduler and manager, a step takes what a roofline says.

    engine.step:  schedule -> run, which only moves the clock -> tokens, finished requests

Nothing is computed. KV is metadata, or one stamp a page (`simulated_stamps`) that is written, moved,
copied to a tier and back, and compared wherever a chunk reads. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.arena_regions import arena_regions
from kvcache.connectors.base import PageRegion
from kvcache.connectors.driver import Offload
from kvcache.core.errors import CapacityError
from kvcache.core.manager import Manager
from kvcache.core.records import MOST_TOKENS
from kvcache.engine.chunk import Chunk
from kvcache.engine.engine import Engine
from kvcache.engine.request import Request
from kvcache.engine.settings import EngineSettings
from kvcache.engine.simulated_roofline import Roofline
from kvcache.engine.simulated_stamps import PageStamps

LEAST_LEAP = 2
"""Steps: a single one is left to `step`."""


class SimulatedClock:
    """Seconds since the start of a simulation. Call it to read it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now

    def advance(self, seconds: float) -> None:
        """So much later."""
        assert seconds >= 0, f"{seconds} s"
        self.now += seconds

    def advance_to(self, seconds: float) -> None:
        """At least `seconds`: a time that has passed changes nothing."""
        self.now = max(self.now, seconds)


class SimulatedRunner:
    """Takes the time of each step; every token is 0.

    Args:
        stamps: what lies in the pages; None: nothing.
        vocab_size: of the token ids that prompts may have.

    Attributes:
        busy_seconds: of all steps.
    """

    context_tokens = MOST_TOKENS

    def __init__(
        self,
        roofline: Roofline,
        clock: SimulatedClock,
        stamps: PageStamps | None = None,
        *,
        vocab_size: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.geometry = roofline.geometry
        self.roofline = roofline
        self.busy_seconds = 0.0
        self._clock = clock
        self._stamps = stamps

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        """The clock moves on. With stamps: `InvariantError` where a page holds another prefix."""
        if self._stamps is not None:
            self._stamps.compute(chunks)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        ends = np.array([chunk.end for chunk in chunks], np.int64)
        self.take(float(self.roofline.seconds(starts, ends)))
        return np.zeros(len(chunks), np.int32)

    def take(self, seconds: float) -> None:
        """A step of this length."""
        self.busy_seconds += seconds
        self._clock.advance(seconds)

    def move_pages(self, moves: NDArray[np.void]) -> None:
        """Takes no time: copies inside device memory."""
        if self._stamps is not None:
            self._stamps.move(moves)

    def regions(self, slabs: int) -> list[PageRegion]:
        """Device pages of each group for a tier that copies no bytes: they have no address."""
        return arena_regions(self.geometry, address=0, slabs=slabs)


class SimulatedEngine(Engine):
    """Requests whose keys come from outside, and decode steps taken many at once.

    Args:
        runner: made with the same clock.
    """

    def __init__(
        self,
        runner: SimulatedRunner,
        manager: Manager,
        offload: Offload | None = None,
        *,
        settings: EngineSettings,
        clock: SimulatedClock,
    ) -> None:
        super().__init__(runner, manager, offload, settings=settings, clock=clock)
        self._simulated = clock
        self._roofline_runner = runner
        blocks = [rules.block_tokens for rules in runner.geometry.rules if rules.block_tokens]
        self._quiet_tokens = math.gcd(*blocks) if blocks else runner.geometry.grid_tokens

    def add_foreign(
        self,
        digests: NDArray[np.uint8],
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        session: str = "",
        tokens: NDArray[np.int32] | None = None,
    ) -> int:
        """Queue a prompt known by its keys (see `Manager.open_foreign`); returns the request's id.

        Args:
            max_new_tokens: it generates exactly so many, at least 1.
            tokens: `[prompt_tokens]`, what stamps are made of; copied.

        Raises:
            CapacityError: it can never fit in the arena, or too many requests wait.
        """
        if len(self.scheduler.waiting) >= self.settings.max_waiting:
            raise CapacityError(
                f"{self.settings.max_waiting} requests wait already: raise max_waiting"
            )
        total = prompt_tokens + max_new_tokens
        handle = self._manager.open_foreign(
            digests, prompt_tokens=prompt_tokens, max_tokens=total, session=session
        )
        buffer = np.zeros(total, np.int32)
        if tokens is not None:
            buffer[:prompt_tokens] = tokens
        request = Request(
            id=handle,
            tokens=buffer,
            prompt_tokens=prompt_tokens,
            known=prompt_tokens,
            stop_ids=frozenset(),
            arrival=self._simulated.now,
            order=self._arrivals,
            foreign=True,
        )
        self._arrivals += 1
        self._requests[handle] = request
        self.scheduler.add(request)
        return handle

    def leap(self, until_seconds: float) -> int:
        """Take steps that only decode, as `step` would, but all at once; returns how many.

        Only steps in which nothing else can happen: nobody waits or loads, no request ends, none
        begins or completes a page, each begins before `until_seconds`. Tells no tokens. The
        manager's state and the clock are as after so many calls of `step`.
        """
        running, clock = self.scheduler.running, self._simulated
        if self.scheduler.waiting or self.scheduler.loading or self._events or not running:
            return 0
        most = min(map(self._quiet_steps, running))
        if most < LEAST_LEAP:
            return 0
        computed = np.array([request.computed for request in running], np.int64)
        starts = computed + np.arange(most, dtype=np.int64)[:, None]
        steps, begun = 0, clock.now
        for seconds in self._roofline_runner.roofline.seconds(starts, starts + 1).tolist():
            if clock.now >= until_seconds:
                break
            self._roofline_runner.take(seconds)
            steps += 1
        if steps:
            self._decode(running, steps)
            self.counters.runner_seconds += clock.now - begun
        return steps

    def _quiet_steps(self, request: Request) -> int:
        """Decodes of a request before anything but its own rows changes."""
        if request.remaining != 1 or request.known == request.prompt_tokens:
            return 0
        inside = request.computed % self._quiet_tokens
        room = self._quiet_tokens - inside - 1 if inside else 0
        return min(room, len(request.tokens) - request.known - 1)

    def _decode(self, running: Sequence[Request], steps: int) -> None:
        manager, counters = self._manager, self.counters
        step = manager.begin_step()
        for request in running:
            if steps > 1:
                manager.extend_foreign(request.id, steps - 1)
            grant = manager.allocate(request.id, steps)
            end = request.computed + steps
            assert grant is not None, "rows of a page that is held need no space"
            assert grant.end == end, f"granted up to {grant.end}, not {end}"
            manager.commit(request.id, end)
            request.granted = end
        manager.end_step(step)
        for request in running:
            manager.extend_foreign(request.id, 1)
            before = request.recomputed_tokens
            request.advance(request.computed + steps)
            counters.recomputed_tokens += request.recomputed_tokens - before
            request.known += steps
        counters.steps += steps
        counters.computed_tokens += steps * len(running)
