"""Sessions that return to a device pool too small for them, on one engine in four ways.

    unlimited    a device pool that holds every session: the best there can be, and the reference
    host         a third of it, and host memory below
    disk         a third of it, and a folder of files below, with no host memory between
    recompute    a third of it, and nothing below

Round by round every session asks its next turn, all at once, and the engine runs as many together
as the small pool holds. All ways are given the same prompts: the reference's answers stand in every
history. Within a round the ways take turns of a few seconds of work each, so that a machine that is
busy for a while is so for all; between them an engine stands still, with no transfer in flight, and
its own clock does not run. Waiting for those transfers counts as its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.bench.folder import temporary_folder
from kvcache.bench.medium import medium
from kvcache.bench.pools import STATES_PER_TURN, pages_for, slabs_for
from kvcache.connectors.base import Connector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.engine.chunk import Chunk, Runner
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Reason, Token, Usage
from kvcache.engine.runner import TorchRunner
from kvcache.retention import Sparse

WAYS = ("unlimited", "host", "disk", "recompute")
"""The first one is the reference of outputs and of throughput."""

SLICE_SECONDS = 4.0
"""Work of one way before the next one has its turn: long beside the transfers that are waited for."""
DRAIN_SECONDS = 120.0
MOST = {"sessions": 256, "turns": 256, "pool_share": 64}
"""More make no sense, or no end."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SessionsBench:
    """What is played. Counts in tokens."""

    sessions: int = 12
    turns: int = 6
    start_tokens: int = 1024
    """Prompt of a session's first turn."""
    turn_tokens: int = 128
    """What a user adds in each further turn."""
    output_tokens: int = 64
    """Of each turn, greedy."""
    pool_share: int = 3
    """All sessions at their ends take so many times the small device pool."""
    budget_tokens: int = 512
    """Most tokens computed in one step."""
    folder: str | None = None
    """Of the disk tier; None: a temporary one."""
    allow_tmpfs: bool = False
    """It may be in memory."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "sessions", "turns", "start_tokens", "turn_tokens", "output_tokens", "pool_share",
            "budget_tokens",
        ):  # fmt: skip
            value, most = getattr(self, name), MOST.get(name, 10**6)
            if not 1 <= value <= most:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value}: it must be 1 to {most:,}"
                )
        if self.budget_tokens < self.running:
            raise ConfigError(
                f"--budget-tokens is {self.budget_tokens}: {self.running} sessions run at a time"
            )

    @property
    def session_tokens(self) -> int:
        """Of one session at its end, the last answer in it."""
        return self.start_tokens + self.turns * self.output_tokens + (
            (self.turns - 1) * self.turn_tokens
        )  # fmt: skip

    @property
    def working_set_tokens(self) -> int:
        """Of all sessions at their ends."""
        return self.sessions * self.session_tokens

    @property
    def running(self) -> int:
        """Requests that run at a time, in every way: whole sessions that the small pool holds."""
        return max(1, self.sessions // self.pool_share)

    @property
    def pool_tokens(self) -> int:
        """Of the small device pool: one session at least."""
        return max(self.session_tokens, -(-self.working_set_tokens // self.pool_share))


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
        begin, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._runner.run(chunks)
        finally:
            self.runs += 1
            self.seconds += time.perf_counter() - begin
            self.cpu_seconds += time.thread_time() - cpu

    def move_pages(self, moves: NDArray[np.void]) -> None:
        """See `chunk.Runner`."""
        self._runner.move_pages(moves)


class Way:
    """One engine with its pool and tier. `close` it."""

    def __init__(self, way: str, bench: SessionsBench, model: Model, folder: str) -> None:
        geometry, small = model.geometry, way != WAYS[0]
        every = bench.working_set_tokens + bench.session_tokens
        states = bench.sessions * bench.turns * STATES_PER_TURN
        tokens = bench.pool_tokens if small else every
        kept = STATES_PER_TURN * (bench.running + 1) if small else states
        slabs = slabs_for(geometry, pages_for(geometry, tokens, kept))
        try:
            runner = TorchRunner(model, slabs)
        except ConfigError as error:
            raise ConfigError(f"--sessions or --start-tokens is too large: {error}") from error
        manager = Manager(
            geometry,
            slabs=slabs,
            movable=True,
            retention=Sparse(),
            fingerprint=model.fingerprint(),
            seed=bench.seed,
        )
        tier = _tier(way, geometry, pages_for(geometry, every, states), model, folder)
        self._offload = None if tier is None else Offload(manager, tier, runner.regions())
        self._runner = Stopwatch(runner)
        self._engine = Engine(
            self._runner,
            manager,
            self._offload,
            settings=EngineSettings(token_budget=bench.budget_tokens, max_requests=bench.running),
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

    def ask(self, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Begin a round: one turn of every session, submitted at one time."""
        begin = time.perf_counter()
        self._turns, self._asked = [], self._clock
        for session, prompt in enumerate(prompts):
            request = self._engine.add_request(prompt, max_new_tokens=self._output_tokens)
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
    way: str, geometry: Geometry, pages: Sequence[int], model: Model, folder: str
) -> Connector | None:
    if way == "host":
        return CpuConnector(geometry, pages=pages)
    if way == "disk":
        return DiskConnector(geometry, folder=folder, fingerprint=model.fingerprint(), pages=pages)
    return None


def play_sessions(
    bench: SessionsBench, model: Model, progress: Progress
) -> tuple[list[list[NDArray[np.int32]]], list[Played], dict[str, Any]]:
    """All rounds in all ways: prompts of each round by session, what every way did, on what medium.

    Raises:
        ConfigError: sessions longer than the model's context, more memory or disk than there is.
    """
    if bench.session_tokens > model.context_tokens:
        raise ConfigError(
            f"a session has {bench.session_tokens} tokens at its end, the context of {model.name}"
            f" is {model.context_tokens}: lower --turns, --start-tokens or --turn-tokens"
        )
    rng = np.random.default_rng(bench.seed)

    def said(tokens: int) -> NDArray[np.int32]:
        return rng.integers(0, model.vocab_size, tokens).astype(np.int32)

    asked = []
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(bench.folder))
        found = medium(folder, allow_tmpfs=bench.allow_tmpfs)
        ways = []
        for name in WAYS:
            ways.append(Way(name, bench, model, str(folder / name)))
            stack.callback(ways[-1].close)
        _warm_up(model)
        histories = [said(bench.start_tokens) for _ in range(bench.sessions)]
        for number in range(bench.turns):
            prompts = list(histories)
            asked.append(prompts)
            for way in ways:
                way.ask(prompts)
            _take_turns(ways, number, bench, progress)
            answers = [turn.output for turn in ways[0].end_round()]
            for way in ways[1:]:
                way.end_round()
            histories = [
                np.concatenate([prompt, np.array(answer, np.int32), said(bench.turn_tokens)])
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
    return asked, [way.played for way in ways], found


def _take_turns(ways: Sequence[Way], number: int, bench: SessionsBench, progress: Progress) -> None:
    """Every way works through the round, a slice at a time; another one begins in each round."""
    first = number % len(ways)
    order = [*ways[first:], *ways[:first]]
    while any(way.left for way in order):
        for way in order:
            if way.left:
                done = bench.sessions - way.left
                progress(
                    f"turn {number + 1} of {bench.turns}, {way.played.way}: {done} of"
                    f" {bench.sessions} sessions"
                )
                way.work(SLICE_SECONDS)


def _warm_up(model: Model) -> None:
    """Compute something, so that the first round does not pay for what torch does once."""
    slabs = model.geometry.slabs_needed(128)
    engine = Engine(
        TorchRunner(model, slabs), Manager(model.geometry, slabs=slabs, retention=Sparse())
    )
    engine.add_request(np.arange(64, dtype=np.int32), max_new_tokens=2)
    engine.run()
