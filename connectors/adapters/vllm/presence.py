"""What a tier has of a request's keys, asked for as it is needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.adapters.vllm.groups import CachedGroups
from kvcache.connectors.adapters.vllm.requests import Tracked
from kvcache.connectors.base import RequestKeys, TierScheduler


class NotKnownError(Exception):
    """The tier does not know yet."""


class Presence:
    """Of one request at one moment. Pins nothing where the tier can tell without.

    Args:
        tier: asked.
        groups: those that it keeps.
        namespace: of the keys.
        r: the request.
        limit: tokens; keys of longer prefixes are not there.
    """

    def __init__(
        self, tier: TierScheduler, groups: CachedGroups, namespace: bytes, r: Tracked, limit: int
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._namespace = namespace
        self._r = r
        self._limit = limit
        self._known: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        """Of a group the longest run that was asked for: first block and flags."""

    def has(self, g: int, first: int, last: int) -> NDArray[np.uint8]:
        """`[last - first]`: 1 where the tier has the block of group `g`.

        Raises:
            NotKnownError: ask again later.
        """
        begin, flags = self._known.get(g, (0, _NOTHING))
        if not (begin <= first and last <= begin + len(flags)):
            begin, flags = first, self._asked(g, first, last)
            if len(flags) >= len(self._known.get(g, (0, _NOTHING))[1]):
                self._known[g] = begin, flags
        return flags[first - begin : last - begin]

    def _asked(self, g: int, first: int, last: int) -> NDArray[np.uint8]:
        group, out = self._groups.groups[g], np.zeros(last - first, np.uint8)
        last = min(last, self._limit // group.step)
        if first < last:
            keys = self._r.digests.rows(group.step, first, last, group.tag)
            out[: len(keys)] = self.of(g, keys)
        return out

    def of(self, g: int, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[n]`: 1 where the tier has this key of group `g`, and it could be loaded so far."""
        r, number = self._r, self._groups.groups[g].tier_group
        asked = [
            keys if n == number else keys[:0] for n in range(len(self._groups.geometry.groups))
        ]
        flags = self._tier.holds(RequestKeys(r.number, self._namespace, asked))
        if flags is None:
            r.asked = True
            flags = self._tier.lookup(RequestKeys(r.number, self._namespace, asked))
        if flags is None:
            raise NotKnownError
        found = flags[number]
        if r.faults.lost:
            lost = r.faults.lost
            found = found & np.fromiter((key.tobytes() not in lost for key in keys), np.bool_)
        return found


_NOTHING = np.zeros(0, np.uint8)
