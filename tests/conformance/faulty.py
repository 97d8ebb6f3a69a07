"""Host memory with faults, as a tier that the connector's settings name: `conformance.faulty:faulty`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.stack import Stack

from kvcache.connectors.base import Connector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.testing import Faults, FaultyWorker, with_faults
from kvcache.core.layout import Geometry


def faulty(
    geometry: Geometry,
    *,
    capacity_bytes: int,
    faults: Mapping[str, Any],
    seed: int = 0,
    hold: bool = False,
    queue_depth: int = 32,
    deadline_seconds: float = 30.0,
    events: bool = False,
) -> Connector:
    """`faults`: fields of `Faults`; `hold`: results come when a test delivers them."""
    inner = CpuConnector(
        geometry,
        capacity_bytes=capacity_bytes,
        queue_depth=queue_depth,
        deadline_seconds=deadline_seconds,
        events=events,
    )
    return with_faults(inner, Faults(**faults), seed=seed, hold=hold)[0]


def tier_with(faults: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The setting of such a tier."""
    defaults: dict[str, Any] = {"capacity_bytes": 1 << 22}
    return {
        "tiers": [
            {"connector": "conformance.faulty:faulty", "faults": dict(faults or {})}
            | defaults
            | options
        ]
    }


def worker_of(stack: Stack) -> FaultyWorker:
    """That of the stack's tier."""
    worker = stack.worker._tier.worker
    assert isinstance(worker, FaultyWorker)
    return worker


class Clock:
    """What the connector's worker takes for the time; `step`: how much of it passes at each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 1000.0
        self.step = step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now
