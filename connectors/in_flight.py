"""Keys of stores in flight, in arrays: which of many keys are new costs a sort, not a loop."""

from __future__ import annotations

from itertools import count

import numpy as np
from numpy.typing import NDArray

_WEIGHTS = np.random.default_rng(0).integers(0, 2**64, 4, dtype=np.uint64)


class KeysInFlight:
    """Sets of 32-byte digests, one for each store. Exact: hashes only say where to compare."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._stores: dict[int, tuple[NDArray[np.uint64], NDArray[np.uint8]]] = {}
        """Hashes, ascending, and their digests."""

    def __len__(self) -> int:
        return sum(len(hashes) for hashes, _ in self._stores.values())

    def new(self, digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """For each row whether neither a store in flight nor an earlier row has the digest.

        O(n log n) for n rows and every store, and a loop over rows that are repeated.
        """
        hashes, rows, order = _sorted(digests)
        new = np.ones(len(rows), np.bool_)
        repeated = np.flatnonzero(hashes[1:] == hashes[:-1])
        if len(repeated):
            seen: set[bytes] = set()
            for row in np.unique(order[np.concatenate([repeated, repeated + 1])]).tolist():
                digest = digests[row].tobytes()
                new[row] = digest not in seen
                seen.add(digest)
        for held_hashes, held in self._stores.values():
            place = np.minimum(np.searchsorted(held_hashes, hashes), len(held) - 1)
            equal = np.flatnonzero(held_hashes[place] == hashes)
            same = (held[place[equal]] == rows[equal]).all(axis=1)
            new[order[equal[same]]] = False
            collided = equal[~same]
            if len(collided):
                digests_held = {row.tobytes() for row in held}
                new[order[collided]] &= [
                    row.tobytes() not in digests_held for row in rows[collided]
                ]
        return new

    def add(self, digests: NDArray[np.uint8]) -> int:
        """The digests, at least one, of a new store; returns what `remove` takes."""
        store = next(self._ids)
        self._stores[store] = _sorted(digests)[:2]
        return store

    def remove(self, store: int) -> None:
        """The store has ended."""
        del self._stores[store]


def _sorted(
    digests: NDArray[np.uint8],
) -> tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.intp]]:
    """Hashes in ascending order, the digests in this order, and where they were."""
    words = np.ascontiguousarray(digests).view(np.uint64)
    hashes = words[:, 0] * _WEIGHTS[0]
    for word in range(1, 4):  # foreign digests may differ in any of their bytes
        hashes += words[:, word] * _WEIGHTS[word]
    order = np.argsort(hashes)
    return hashes[order], digests[order], order
