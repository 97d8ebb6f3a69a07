"""From the journal of a page pool to what a tier reports: neighbours of one kind together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.key_events import KeyEvent, KeysLost, KeysRemoved, KeysStored
from kvcache.core.pool import POOL_LOST, POOL_STORED


def pool_events(
    group: int, events: NDArray[np.void], namespaces: Sequence[bytes]
) -> Iterator[KeyEvent]:
    """What the pool of one group reports, in order. O(events), in arrays.

    Args:
        events: `[n]` of `POOL_EVENT_DTYPE`; `ns` indexes `namespaces`.
    """
    if not len(events):
        return
    kinds, numbers = events["kind"], events["ns"]
    changes = np.flatnonzero((np.diff(kinds) != 0) | (numbers[1:] != numbers[:-1])) + 1
    bounds = [0, *changes.tolist(), len(events)]
    for first, last in pairwise(bounds):
        if kinds[first] == POOL_LOST:
            yield KeysLost()
            continue
        kind = KeysStored if kinds[first] == POOL_STORED else KeysRemoved
        keys = np.ascontiguousarray(events["digest"][first:last])
        yield kind(group, namespaces[int(numbers[first])], keys)
