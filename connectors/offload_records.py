"""What `Offload` remembers of requests (pins, loads in flight, what failed), and what it needs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Connector, PageRegion, Transfer, TransferResult, failed
from kvcache.core.errors import ConfigError, HandleError, MisuseError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.values import sequence, shown


class Timing(NamedTuple):
    """What a load has taken, or its part from one of two tiers."""

    bytes: int
    seconds: float
    far: bool
    """From a tier below."""


@dataclass(slots=True)
class Load:
    """A load in flight."""

    handle: int
    load: int
    items: NDArray[np.void]
    transfer: Transfer
    due: float
    """When a worker that says nothing is not waited for any longer."""
    wanted: bool = True
    """The request still waits for it."""
    given_up: bool = False
    """Its time was over: nobody waits for its pages any more, they are kept until a result comes."""

    def is_awaited(self, manager: Manager) -> bool:
        """Whether its request is still there for it: it may have been preempted or closed."""
        try:
            return manager.info(self.handle).load == self.load
        except HandleError:
            return False


@dataclass(slots=True)
class Store:
    """A store in flight."""

    items: NDArray[np.void]
    """Its device pages are held: they are read until a result comes."""
    transfer: Transfer
    due: float
    """When a worker that says nothing is taken to be late."""
    late: bool = False


GRACE_SECONDS = 5.0
"""After its deadline and so long without a result a transfer is late, whatever its worker says."""


def due_of(transfer: Transfer) -> float:
    """When one that is submitted now, and of which nothing is heard, is late."""
    return time.monotonic() + transfer.deadline_seconds + GRACE_SECONDS


def silence(transfer: Transfer) -> TransferResult:
    """A late result in place of the worker's, which says nothing."""
    error = f"Silent: no result until {GRACE_SECONDS} s after the deadline"
    return replace(failed(transfer, error), late=True)


@dataclass(slots=True)
class Faults:
    """What a request could not load: masked in its next lookups."""

    loads: int = 0
    lost: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    """(group, index of block or grid point)."""

    def note(self, items: NDArray[np.void], block_tokens: Sequence[int]) -> None:
        """A load more that failed; `items`: what of it, `KEYED_DTYPE`."""
        self.loads += 1
        for group, span in enumerate(block_tokens):
            ends = items["end"][items["group"] == group]
            if span and len(ends):
                self.lost.append((group, ends // span - 1))


def require_parts(manager: Manager, connector: Connector) -> None:
    """`ConfigError` unless they can work together."""
    if not isinstance(manager, Manager):
        raise ConfigError(f"manager is {shown(manager)}: give a Manager")
    if not isinstance(connector, Connector):
        raise ConfigError(f"connector is {shown(connector)}: give a Connector")
    if not manager.keeps_journal:
        raise ConfigError(
            "Offload stores what the manager's journal tells: make it with Manager(journal=True)"
        )
    if manager.unlimited:
        raise ConfigError(
            "Offload needs memory for every page, and the arena of this manager is UNLIMITED: give"
            " Manager(slabs=geometry.slabs_in(bytes))"
        )


def require_covering(regions: Sequence[PageRegion], geometry: Geometry, slabs: int) -> None:
    """`ConfigError` unless there is a region for each group, with every page that it may get."""
    regions = sequence(regions, "regions", of=PageRegion)
    groups = len(geometry.groups)
    if len(regions) != groups:
        raise ConfigError(f"{len(regions)} regions for {groups} groups: give one each")
    for group, (spec, region) in enumerate(zip(geometry.groups, regions, strict=True)):
        pages = slabs * geometry.pages_per_slab[geometry.class_of_group[group]]
        if region.pages < pages:
            raise ConfigError(
                f"the region of group {spec.name!r} has {region.pages} pages, an arena of {slabs}"
                f" slabs has up to {pages}: make the region larger, or lower the manager's slabs"
            )


# ---- one reader of a manager's journal -------------------------------------------------------------

_READERS: weakref.WeakKeyDictionary[Manager, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""Who stores what a manager's journal tells, until it was closed or is gone."""


def require_alone(manager: Manager) -> None:
    """`MisuseError` where somebody reads the manager's journal already."""
    reader = _READERS.get(manager)
    if reader is not None and reader() is not None:
        raise MisuseError(
            "another Offload of this manager is open: each would store some of the pages that get a"
            " key, and neither all of them; close that one first, or make a second manager"
        )


def take_over(manager: Manager, reader: object) -> None:
    """From now on `reader` is the one."""
    _READERS[manager] = weakref.ref(reader)


def hand_back(manager: Manager, reader: object) -> None:
    """`reader` reads no more."""
    held = _READERS.get(manager)
    if held is not None and held() is reader:
        del _READERS[manager]
