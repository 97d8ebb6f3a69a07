"""Slots that nothing can be stored in for now: the disk, or memory, has no room behind them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.core.pool import Pool

NO_SPACE = "NoSpace"
"""Kind of error of a store that the medium had no room for."""

RETRY_SECONDS = 30.0
"""After so long a medium that was full is taken to have room again."""


class SlotsAside:
    """The free slots at the time when a store found no room, held until it is worth another try.

    Meanwhile what is stored replaces what is old.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._until = 0.0
        self.slots: list[NDArray[np.int32]] = [np.zeros(0, np.int32) for _ in pools]
        """Of each group."""

    def take(self) -> None:
        """No room was found: what is free now is out of use."""
        self._until = time.monotonic() + RETRY_SECONDS
        for group, pool in enumerate(self._pools):
            fill = pool.stats()
            free = pool.take(fill.capacity - fill.cached - fill.held)
            self.slots[group] = np.concatenate([self.slots[group], free])

    def give_back_in_time(self) -> None:
        """They are free again, if it is time."""
        if not self._until or time.monotonic() < self._until:
            return
        self._until = 0.0
        for pool, slots in zip(self._pools, self.slots, strict=True):
            pool.release(slots)
        self.slots = [slots[:0] for slots in self.slots]
