"""One engine that plays sessions: its pool, its tier, its clock, and what it noted of each turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.pools import STATES_PER_TURN, pages_for, slabs_for
from kvcache.bench.sessions_settings import WHOLE, SessionsBench
from kvcache.connectors.base import Connector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.engine.chunk import Chunk, Guesses, Runner
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Reason, Token, Usage
from kvcache.engine.runner import TorchRunner
from kvcache.engine.speculative import SpeculativeRunner, joint_fingerprint, joint_geometry
from kvcache.retention import Sparse

DRAIN_SECONDS = 120.0
DRAFT_TOKENS = 4
"""Most guesses of one step, where there are any."""


class Turn(NamedTuple):
    """One request and what became of it; seconds of its way's own clock."""

    session: int
    output: list[int]
    usage: Usage
    first_token_seconds: float
    seconds: float


@dataclass(slots=True)
class Played:
    """What one way did. Seconds are those of its own clock."""

    way: str
    device_bytes: int
    rounds: list[list[Turn]] = field(default_factory=list)
    """Of each round the turns by session."""
    round_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of all threads, those of the tier too."""
    steps: int = 0
    """Steps that computed something; the others waited for loads or for pages."""
    runner_seconds: float = 0.0
    """In the model, ..."""
    runner_cpu_seconds: float = 0.0
    """... and what the engine's thread computed in it, ..."""
    step_cpu_seconds: float = 0.0
    """... and in those steps altogether: the rest is scheduler, manager and the tier's deciding side.
    CPU time, because a thread that has to wait for the processor is not at work."""
    idle_seconds: float = 0.0
    """Steps with nothing to compute: loads, or pages, were waited for."""
    settle_seconds: float = 0.0
    """Waiting for the transfers in flight before another way has its turn."""
    preemptions: int = 0
    failed_loads: int = 0
    proposed_tokens: int = 0
    """Guesses that were checked, ..."""
    accepted_tokens: int = 0
    """... and those of them that were right."""
    tier: dict[str, object] = field(default_factory=dict)


class Stopwatch:
    """A runner that adds up the time it takes. Passes everything on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.geometry = runner.geometry
        self.vocab_size = runner.vocab_size
        self.context_tokens = runner.context_tokens
        self.runs = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """Of the calling thread alone."""

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        """See `chunk.Runner`."""
        with self._timed():
            return self._runner.run(chunks)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.runs += 1
            self.seconds += time.perf_counter() - begin
            self.cpu_seconds += time.thread_time() - cpu

    def move_pages(self, moves: NDArray[np.void]) -> None:
        """See `chunk.Runner`."""
        self._runner.move_pages(moves)


class GuessingStopwatch(Stopwatch):
    """The same for a `Guesser`."""

    _runner: SpeculativeRunner

    def __init__(self, runner: SpeculativeRunner) -> None:
        super().__init__(runner)
        self.draft_tokens = runner.draft_tokens

    def run_guessing(self, chunks: Sequence[Chunk]) -> list[Guesses]:
        """See `chunk.Guesser`."""
        with self._timed():
            return self._runner.run_guessing(chunks)

    def clear_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        """See `chunk.Guesser`."""
        self._runner.clear_pages(group, pages)


class Way:
    """One engine with its pool and tier. `close` it."""

    def __init__(
        self, way: str, bench: SessionsBench, model: Model, draft: Model | None, folder: str
    ) -> None:
        geometry, name, small = model.geometry, model.fingerprint(), way not in WHOLE
        if draft is not None:
            geometry = joint_geometry(model, draft, DRAFT_TOKENS)
            name = joint_fingerprint(model, draft)
        every = bench.working_set_tokens + bench.session_tokens
        states = bench.sessions * bench.turns * STATES_PER_TURN
        tokens = bench.pool_tokens if small else every
        kept = STATES_PER_TURN * (bench.running + 1) if small else states
        slabs = slabs_for(geometry, pages_for(geometry, tokens, kept))
        try:
            runner = (
                TorchRunner(model, slabs)
                if draft is None
                else SpeculativeRunner(model, draft, slabs, draft_tokens=DRAFT_TOKENS)
            )
        except ConfigError as error:
            raise ConfigError(f"--sessions or --start-tokens is too large: {error}") from error
        manager = Manager(
            geometry,
            slabs=slabs,
            movable=True,
            retention=Sparse(),
            fingerprint=name,
            seed=bench.seed,
        )
        tier = _tier(way, geometry, pages_for(geometry, every, states), name, folder)
        self._offload = None if tier is None else Offload(manager, tier, runner.regions())
        self._runner = (
            GuessingStopwatch(runner)
            if isinstance(runner, SpeculativeRunner)
            else Stopwatch(runner)
        )
        self._engine = Engine(
            self._runner,
            manager,
            self._offload,
            settings=EngineSettings(
                token_budget=bench.budget_tokens,
                max_requests=bench.sessions if way == "unthrottled" else bench.running,
            ),
        )
        self._output_tokens = bench.output_tokens
        self._clock = 0.0
        self._open: dict[int, int] = {}
        """Session of each request that has not ended."""
        self._outputs: dict[int, list[int]] = {}
        self._first: dict[int, float] = {}
        self._asked = 0.0
        self._turns: list[Turn] = []
        self.played = Played(way, slabs * geometry.slab_bytes)

    @property
    def left(self) -> int:
        """Turns of the round that have not ended."""
        return len(self._open)

    def ask(self, prompts: Sequence[NDArray[np.int32]], order: Sequence[int]) -> None:
        """Begin a round: one turn of every session, submitted at one time in this order."""
        begin = time.perf_counter()
        self._turns, self._asked = [], self._clock
        for session in order:
            request = self._engine.add_request(prompts[session], max_new_tokens=self._output_tokens)
            self._open[request], self._outputs[request] = session, []
        self._clock += time.perf_counter() - begin

    def work(self, seconds: float) -> None:
        """Step for so long or to the end of the round; then let the transfers in flight end."""
        begin, clock, cpu = time.perf_counter(), self._clock, time.process_time()
        while self._open and time.perf_counter() - begin < seconds:
            self._step()
            self._clock = clock + time.perf_counter() - begin
        if self._offload is not None:
            settling = time.perf_counter()
            if not self._offload.drain(DRAIN_SECONDS):
                raise InvariantError(f"transfers of the {self.played.way} way did not end")
            self.played.settle_seconds += time.perf_counter() - settling
        self._clock = clock + time.perf_counter() - begin
        self.played.cpu_seconds += time.process_time() - cpu

    def _step(self) -> None:
        played, runs = self.played, self._runner.runs
        begin, cpu = time.perf_counter(), time.thread_time()
        events = self._engine.step()
        end = time.perf_counter()
        if self._runner.runs > runs:
            played.steps += 1
            played.step_cpu_seconds += time.thread_time() - cpu
        else:
            played.idle_seconds += end - begin
        now = self._clock + (end - begin)
        for event in events:
            if isinstance(event, Token):
                self._outputs[event.request].append(event.token)
                self._first.setdefault(event.request, now)
                continue
            session = self._open.pop(event.request)
            if event.reason is not Reason.LENGTH:
                raise InvariantError(
                    f"a turn of session {session + 1} ended by {event.reason.value} in the"
                    f" {played.way} way"
                )
            first = self._first.pop(event.request) - self._asked
            output = self._outputs.pop(event.request)
            turn = Turn(session, output, event.usage, first, now - self._asked)
            self._turns.append(turn)

    def end_round(self) -> list[Turn]:
        """The turns by session, when none is left."""
        turns = sorted(self._turns)
        counters, played, runner = self._engine.counters, self.played, self._runner
        played.rounds.append(turns)
        played.runner_seconds, played.runner_cpu_seconds = runner.seconds, runner.cpu_seconds
        played.round_seconds.append(self._clock - self._asked)
        played.preemptions, played.failed_loads = counters.preemptions, counters.failed_loads
        played.proposed_tokens = counters.proposed_tokens
        played.accepted_tokens = counters.accepted_tokens
        if self._offload is not None:
            stats = self._offload.stats()
            names = (
                "loaded_bytes", "load_seconds", "stored_bytes", "store_seconds", "used_bytes",
                "failed_pages", "dropped_store_pages",
            )  # fmt: skip
            played.tier = {name: getattr(stats, name) for name in names}
        return turns

    def close(self) -> None:
        """End transfers, free the tier."""
        if self._offload is not None:
            self._offload.close()


def _tier(
    way: str, geometry: Geometry, pages: Sequence[int], name: Fingerprint, folder: str
) -> Connector | None:
    if way == "host":
        return CpuConnector(geometry, pages=pages)
    if way == "disk":
        return DiskConnector(geometry, folder=folder, fingerprint=name, layout="whole", pages=pages)
    return None
