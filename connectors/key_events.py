"""What a tier reports of its keys: which became visible, which went, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.core.pool import POOL_LOST, POOL_STORED

__all__ = ["KeyEvent", "KeysLost", "KeysRemoved", "KeysStored", "pool_events"]


class KeysStored(NamedTuple):
    """Keys that became visible to `lookup`, in the order of their stores."""

    group: int
    namespace: bytes
    """32 bytes, as in `RequestKeys`."""
    keys: NDArray[np.uint8]
    """[n, 32]"""


class KeysRemoved(NamedTuple):
    """Keys that `lookup` does not find any more."""

    group: int
    namespace: bytes
    keys: NDArray[np.uint8]
    """[n, 32]"""


class KeysLost(NamedTuple):
    """Comes first: what waited before was dropped. What was visible then is not told again."""


KeyEvent: TypeAlias = KeysStored | KeysRemoved | KeysLost


def pool_events(
    group: int, events: NDArray[np.void], namespaces: Sequence[bytes]
) -> Iterator[KeyEvent]:
    """What a `PagePool` of one group reports, equal neighbours together. O(events), in arrays.

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
