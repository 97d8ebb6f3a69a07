"""Slots that nothing can be stored in for now: the disk, or memory, has no room behind them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.pool_chunks import PoolChunks
from kvcache.core.pool import Pool

NO_SPACE = "NoSpace"
"""Kind of error of a store that the medium had no room for."""


def no_space(ready: NDArray[np.bool_], error: str) -> str:
    """What is wrong with pages that are not to be written; empty: nothing."""
    if not error:
        return ""
    return f"{NO_SPACE}: {len(ready) - int(ready.sum())} of {len(ready)} pages: {error}"


RETRY_SECONDS = 30.0
"""After so long a medium that was full is taken to have room again."""


class SlotsAside:
    """The free slots at the time when a store found no room, held until it is worth another try.

    Meanwhile what is stored replaces what is old.

    Args:
        chunks: the memory behind the slots, which stays once it is ready; None: there is room
            behind no free slot.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        chunks: PoolChunks | None = None,
    ) -> None:
        self._pools = pools
        self._chunks = chunks
        self._until = 0.0
        self.slots: list[NDArray[np.int32]] = [np.zeros(0, np.int32) for _ in pools]
        """Of each group."""

    def take(self) -> None:
        """No room was found: what is free now is out of use."""
        self._until = time.monotonic() + RETRY_SECONDS
        for group, pool in enumerate(self._pools):
            fill = pool.stats()
            free = pool.take(fill.capacity - fill.cached - fill.held)
            if self._chunks is not None:
                good = self._chunks.have_memory(group, free)
                pool.release(free[good])
                free = free[~good]
            self.slots[group] = np.concatenate([self.slots[group], free])

    def give_back_in_time(self) -> None:
        """They are free again, if it is time."""
        if not self._until or time.monotonic() < self._until:
            return
        self._give_back()

    def give_back_for_want_of_others(self) -> bool:
        """Nothing old can be replaced: they are free again, if to try costs little. Whether any is."""
        if self._chunks is None or not any(map(len, self.slots)):
            return False
        self._give_back()
        return True

    def _give_back(self) -> None:
        self._until = 0.0
        for pool, slots in zip(self._pools, self.slots, strict=True):
            pool.release(slots)
        self.slots = [slots[:0] for slots in self.slots]
