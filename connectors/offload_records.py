"""What `Offload` remembers of requests: how far their pins go, loads in flight, what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Transfer


class Reach(NamedTuple):
    """How far the pins of a lookup go, because no hit goes further."""

    stored: int
    """Stores that had ended: later ones may have filled the gap."""
    keys: list[int]
    """Of each group: the keys that the request had, ..."""
    rows: list[int]
    """... and those among them that are pinned."""


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


@dataclass(slots=True)
class Faults:
    """What a request could not load: masked in its next lookups."""

    loads: int = 0
    lost: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    """(group, index of block or grid point)."""
