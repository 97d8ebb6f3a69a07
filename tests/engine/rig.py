"""An engine on stamped pages, with or without a tier, and what goes wrong in one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from engine.stamp_runner import VOCAB, StampRunner, slabs_for, stamp_geometry

from kvcache import (
    Manager,
    Sparse,
)
from kvcache.connectors.base import Connector
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.driver import Offload
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.request import Result

DRAIN_SECONDS = 20.0
FINGERPRINT = Fingerprint(model="stamps")


class Rig(NamedTuple):
    engine: Engine
    manager: Manager
    runner: StampRunner
    offload: Offload | None

    @property
    def held(self) -> int:
        """Pages with a reference, over all groups, once nothing is in flight."""
        if self.offload is not None:
            assert self.offload.drain(DRAIN_SECONDS)
            self.offload.check()
        self.manager.check()
        return held_pages(self.manager)


def held_pages(manager: Manager) -> int:
    return sum(c.held for c in manager.arena_stats().classes)


@contextmanager
def rig(
    pages: Sequence[int] | int,
    *blocks: int,
    states: int = 0,
    window: int = 0,
    drafts: int = 0,
    movable: bool = True,
    retention: RetentionPolicy | None = None,
    tier_pages: Sequence[int] | None = None,
    tier: dict[str, Any] | None = None,
    runner_type: type[StampRunner] = StampRunner,
    clock: Callable[[], float] = time.perf_counter,
    connector: Callable[[Geometry], Connector] | None = None,
    lazy_bytes: int | None = None,
    **limits: Any,
) -> Iterator[Rig]:
    """`pages`: the arena has room for so many of each group; or a number of slabs.

    `connector` makes the tier, in place of one in host memory.
    """
    geometry = stamp_geometry(*(blocks or (16,)), states=states, window=window, drafts=drafts)
    slabs = pages if isinstance(pages, int) else slabs_for(geometry, pages)
    manager = Manager(
        geometry,
        slabs=slabs,
        retention=retention or Sparse(),
        fingerprint=FINGERPRINT,
        movable=movable,
    )
    runner = runner_type(geometry, slabs)
    offload = None
    if connector is not None:
        offload = Offload(manager, connector(geometry), runner.regions(), lazy_bytes=lazy_bytes)
    elif tier_pages is not None:
        cpu = CpuConnector(geometry, pages=tier_pages, **(tier or {}))
        offload = Offload(manager, cpu, runner.regions(), lazy_bytes=lazy_bytes)
    defaults = {"token_budget": 64, "max_requests": 4, "debug": True, "loads": "always"}
    settings = EngineSettings(**(defaults | limits))
    try:
        engine = Engine(runner, manager, offload, settings=settings, clock=clock)
        yield Rig(engine, manager, runner, offload)
    finally:
        if offload is not None:
            offload.close()


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def generate(engine: Engine, prompt: Sequence[int], count: int) -> Result:
    """One request, to its end."""
    request = engine.add_request(prompt, max_new_tokens=count)
    return engine.run()[request]


class Gate:
    """A copy function that waits, with a deadline, until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> None:
        self.entered.set()
        assert self.open.wait(DRAIN_SECONDS)
        native_copy(*args)


class Failing:
    """A copy function whose calls fail when `fails` says so."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails = fails

    def __call__(self, *args: Any) -> None:
        if self.fails():
            raise OSError("injected")
        native_copy(*args)


def evict_all(rig: Rig) -> None:
    """Push everything out of the device, not out of the tier's memory."""
    assert rig.offload is None or rig.offload.drain(DRAIN_SECONDS)
    rig.manager.clear()
