"""Small parts of a tier: one group, one region, one transfer, a worker alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvcache.connectors.base import (
    Direction,
    PageRegion,
    Transfer,
    TransferResult,
)
from kvcache.connectors.cpu import CpuConnector, CpuWorker, native_copy
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import Setup
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention

PATIENCE = 30.0


def cpu(setup: Setup, **options: Any) -> CpuConnector:
    return CpuConnector(
        setup.geometry,
        pages=setup.pages,
        queue_depth=setup.queue_depth,
        deadline_seconds=setup.deadline_seconds,
        events=setup.events,
        **options,
    )


class Trusting(PoolScheduler):
    """Believes that every result is of a transfer that is open."""

    def complete(self, result: TransferResult) -> None:
        if result.id not in self._plans:
            raise KeyError(result.id)
        super().complete(result)


def one_group(page_bytes: int, block_tokens: int = 1) -> Geometry:
    group = FullAttention(
        name="a",
        layers=1,
        kv_heads=1,
        head_dim=page_bytes // 2 // block_tokens,
        block_tokens=block_tokens,
        element_bytes=1,
    )
    return Geometry((group,))


def region(memory: np.ndarray[Any, Any]) -> PageRegion:
    return PageRegion(memory.ctypes.data, memory.shape[1], memory.shape[0])


def transfer(
    number: int,
    direction: Direction,
    pages: list[int],
    slots: list[int],
    deadline: float = PATIENCE,
) -> Transfer:
    return Transfer(
        number,
        direction,
        np.zeros(len(pages), np.int32),
        np.array(pages, np.int32),
        np.array(slots, np.int64),
        deadline,
    )


@contextmanager
def worker_of(
    copy: Callable[..., None] = native_copy, *, queue_depth: int = 4, batch_bytes: int = 64
) -> Iterator[CpuWorker]:
    """One group of 64-byte pages; with the default batch size each page is a batch."""
    pool = HostPool([64], [16], setting="x")
    worker = CpuWorker(
        pool, groups=["a"], queue_depth=queue_depth, batch_bytes=batch_bytes, copy=copy
    )
    memory = np.random.default_rng(0).integers(0, 256, (16, 64), dtype=np.uint8)
    worker.register([region(memory)])
    worker.memory = memory  # type: ignore[attr-defined]
    try:
        yield worker
    finally:
        worker.close(PATIENCE)


def finals(worker: CpuWorker, count: int) -> list[TransferResult]:
    results: list[TransferResult] = []
    while sum(not r.late for r in results) < count:
        assert worker.wait(PATIENCE), results
        results += worker.poll()
    return results
