"""An engine in simulated time, and what a run of it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache import Manager, Sparse
from kvcache.connectors.driver import Offload
from kvcache.core.layout import Geometry
from kvcache.engine.chunk import Chunk, Runner
from kvcache.engine.engine import Engine
from kvcache.engine.request import Finished
from kvcache.engine.settings import EngineSettings
from kvcache.engine.simulated import SimulatedClock, SimulatedEngine, SimulatedRunner
from kvcache.engine.simulated_hardware import Hardware
from kvcache.engine.simulated_roofline import Roofline
from kvcache.engine.simulated_stamps import PageStamps
from kvcache.engine.simulated_tier import SimulatedWorker, simulated_host
from kvcache.presets import preset
from kvcache.presets.weights import WEIGHTS

NAME = "llama-3-8b"
HARDWARE = Hardware(flops=1e14, memory=1e12, capacity=80e9, link=1e10, link_seconds=1e-3)
BLOCK = 64


class Simulation(NamedTuple):
    engine: SimulatedEngine
    manager: Manager
    clock: SimulatedClock
    roofline: Roofline
    stamps: PageStamps | None
    offload: Offload | None
    worker: SimulatedWorker | None

    def add(self, blocks: Sequence[int], prompt: int, output: int) -> int:
        """A request whose full blocks have these numbers."""
        block = self.manager.geometry.hash_unit_tokens
        keys = np.zeros((prompt // block, 4), "<i8")
        keys[:, 0] = blocks[: prompt // block]
        tokens = np.zeros(prompt, np.int32)
        tokens[: len(keys) * block] = np.repeat(np.array(blocks[: len(keys)], np.int32) + 1, block)
        return self.engine.add_foreign(
            keys.view(np.uint8), prompt_tokens=prompt, max_new_tokens=output, tokens=tokens
        )

    def run(self, *, leaping: bool = True) -> dict[int, Finished]:
        """To the end of all requests."""
        ended: dict[int, Finished] = {}
        while self.engine.busy:
            until = float("inf") if self.worker is None else self.worker.next_seconds
            if leaping and self.engine.leap(until):
                continue
            for event in self.engine.step():
                if isinstance(event, Finished):
                    ended[event.request] = event
            self.manager.check()
        return ended


def simulation(
    tokens: int = 100_000,
    *,
    name: str = NAME,
    host: Sequence[int] = (),
    budget: int = 2048,
    most: int = 8,
    geometry: Geometry | None = None,
) -> Simulation:
    """A pool of so many tokens of one request; slots of a host tier, for each group."""
    geometry = geometry or preset(name, block_tokens=BLOCK)
    slabs = geometry.slabs_needed(tokens)
    clock = SimulatedClock()
    roofline = Roofline(geometry, WEIGHTS[name], HARDWARE)
    stamps = PageStamps(geometry, slabs, host)
    runner = SimulatedRunner(roofline, clock, stamps)
    manager = Manager(geometry, slabs=slabs, retention=Sparse(), movable=True, seed=1)
    offload = worker = None
    if host:
        connector = simulated_host(geometry, host, HARDWARE, clock, stamps=stamps, seed=1)
        assert isinstance(connector.worker, SimulatedWorker)
        worker = connector.worker
        offload = Offload(manager, connector, runner.regions(slabs))
    settings = EngineSettings(token_budget=budget, max_requests=most)
    engine = SimulatedEngine(runner, manager, offload, settings=settings, clock=clock)
    return Simulation(engine, manager, clock, roofline, stamps, offload, worker)


def counts(engine: Engine) -> dict[str, int]:
    """The engine's counters but for those of seconds."""
    values = asdict(engine.counters)
    return {name: value for name, value in values.items() if isinstance(value, int)}


class Recorder:
    """A runner that also notes [start, end) of each chunk of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.geometry = runner.geometry
        self.vocab_size = runner.vocab_size
        self.context_tokens = runner.context_tokens
        self.steps: list[list[tuple[int, int]]] = []

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        self.steps.append([(chunk.start, chunk.end) for chunk in chunks])
        return self._runner.run(chunks)

    def move_pages(self, moves: NDArray[np.void]) -> None:
        self._runner.move_pages(moves)


def prefill_seconds(line: Roofline, tokens: int, step_tokens: int) -> float:
    """What a prompt alone takes, from its first token on, in chunks of `step_tokens`."""
    starts = np.arange(0, tokens, step_tokens, dtype=np.int64)
    ends = np.minimum(starts + step_tokens, tokens)
    return float(line.seconds(starts[:, None], ends[:, None]).sum())
