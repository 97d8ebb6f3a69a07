"""Where the two sides of a disk tier meet, in one process: what to remove, and what others told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.disk_board import Change

MAX_HEARD = 256
"""Pieces of news that wait for a scheduler that asks nothing; what comes then is not heard."""


class News(NamedTuple):
    """Files of one group that another process changed, in order."""

    change: Change
    group: int
    names: NDArray[np.uint8]
    """`[n, 64]`, as `Transfer.names`."""


class DiskNews:
    """Two queues, one in each direction. Each end belongs to one thread."""

    def __init__(self) -> None:
        self._discarded: deque[tuple[int, NDArray[np.uint8]]] = deque()
        self._heard: deque[News] = deque()

    # ---- the scheduler's side ----

    def discard(self, group: int, names: NDArray[np.uint8]) -> None:
        """These files are to be removed, before anything that is planned from now on is written."""
        if len(names):
            self._discarded.append((group, names))

    def heard(self) -> Iterator[News]:
        """What others told, each piece once."""
        while self._heard:
            yield self._heard.popleft()

    # ---- the copy thread's side ----

    def discarded(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """What is to be removed, each piece once."""
        while self._discarded:
            yield self._discarded.popleft()

    @property
    def attentive(self) -> bool:
        """Whether anybody takes what is told."""
        return len(self._heard) < MAX_HEARD

    def list(self, group: int, names: NDArray[np.uint8]) -> None:
        """Files of a group, the oldest first, in place of news that were missed."""
        self._heard.append(News(Change.STORED, group, names))

    def tell(self, records: NDArray[np.void]) -> None:
        """Records of a `Board`."""
        if not len(records):
            return
        kinds, groups = records["kind"], records["group"]
        turns = np.flatnonzero((np.diff(kinds) != 0) | (np.diff(groups) != 0)) + 1
        for first, last in pairwise([0, *turns.tolist(), len(records)]):
            if kinds[first] in set(Change):
                names = np.ascontiguousarray(records["name"][first:last])
                self._heard.append(News(Change(int(kinds[first])), int(groups[first]), names))
