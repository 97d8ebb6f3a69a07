"""A runner and a tier whose time is a clock's: bytes and stamps are real, seconds are formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from engine.clock import Clock
from engine.rig import DRAIN_SECONDS, Rig
from engine.stamp_runner import StampRunner, slabs_for, stamp_geometry
from numpy.typing import NDArray

from kvcache import Manager, Sparse
from kvcache.connectors.base import (
    Connector,
    Direction,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
)
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.core.layout import Geometry
from kvcache.engine.chunk import Chunk
from kvcache.engine.engine import Engine, EngineSettings


@dataclass(frozen=True)
class Speeds:
    step: float = 1e-3
    token: float = 1e-3
    context: float = 0.0
    """A token's seconds more for each token before it."""
    latency: float = 1e-3
    byte: float = 1e-6


class SimulatedRunner(StampRunner):
    def __init__(self, geometry: Geometry, slabs: int, clock: Clock, speeds: Speeds) -> None:
        super().__init__(geometry, slabs)
        self.clock, self.speeds = clock, speeds

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        s = self.speeds
        self.clock.advance(
            s.step
            + sum(len(c.tokens) * (s.token + s.context * (c.start + c.end) / 2) for c in chunks)
        )
        return super().run(chunks)


class SimulatedWorker(TierWorker):
    """Moves bytes at once, and tells of a load when its time has come: one after the other."""

    def __init__(self, inner: TierWorker, clock: Clock, speeds: Speeds) -> None:
        self.inner, self.clock, self.speeds = inner, clock, speeds
        self.page_bytes: list[int] = []
        self.due: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.free_at = 0.0
        self.held: list[TransferResult] = []
        self.groups: dict[int, NDArray[np.int32]] = {}
        self.broken: set[int] = set()
        """Groups whose loads fail."""

    def register(self, regions: Sequence[PageRegion]) -> None:
        self.page_bytes = [region.page_bytes for region in regions]
        self.inner.register(regions)

    def submit(self, transfer: Transfer) -> bool:
        taken = self.inner.submit(transfer)
        if taken and transfer.direction is Direction.LOAD:
            self.groups[transfer.id] = transfer.groups
            moved = sum(self.page_bytes[g] for g in transfer.groups.tolist())
            self.seconds[transfer.id] = self.speeds.latency + moved * self.speeds.byte
            self.free_at = max(self.free_at, self.clock.now) + self.seconds[transfer.id]
            self.due[transfer.id] = self.free_at
        return taken

    def poll(self) -> list[TransferResult]:
        self.held += self.inner.poll()
        ready = [r for r in self.held if self.due.get(r.id, 0.0) <= self.clock.now]
        self.held = [r for r in self.held if r not in ready]
        for result in ready:
            self.due.pop(result.id, None)
        return [self._told(r) if r.direction is Direction.LOAD else r for r in ready]

    def _told(self, result: TransferResult) -> TransferResult:
        good = ~np.isin(self.groups.pop(result.id), list(self.broken))
        return replace(
            result, seconds=self.seconds.pop(result.id), ok=result.ok * good.astype(np.uint8)
        )

    def wait(self, timeout_seconds: float) -> bool:
        missing = set(self.due) - {r.id for r in self.held}
        while missing and self.inner.wait(DRAIN_SECONDS):
            self.held += self.inner.poll()
            missing -= {r.id for r in self.held}
        times = [self.due[r.id] for r in self.held if r.id in self.due]
        if times:
            self.clock.now = max(self.clock.now, min(times))
            return True
        return self.inner.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        return self.inner.close(timeout_seconds)


@contextmanager
def simulated(
    pages: Sequence[int],
    *blocks: int,
    speeds: Speeds,
    tier_pages: Sequence[int],
    states: int = 0,
    loads: str = "auto",
    token_budget: int = 64,
) -> Iterator[Rig]:
    clock = Clock()
    geometry = stamp_geometry(*blocks, states=states)
    slabs = slabs_for(geometry, pages)
    manager = Manager(geometry, slabs=slabs, retention=Sparse(), movable=True)
    runner = SimulatedRunner(geometry, slabs, clock, speeds)
    cpu = CpuConnector(geometry, pages=tier_pages)
    worker = SimulatedWorker(cpu.worker, clock, speeds)
    offload = Offload(manager, Connector("simulated", cpu.scheduler, worker), runner.regions())
    settings = EngineSettings(token_budget=token_budget, max_requests=4, debug=True, loads=loads)
    try:
        yield Rig(
            Engine(runner, manager, offload, settings=settings, clock=clock),
            manager,
            runner,
            offload,
        )
    finally:
        offload.close()
