"""What lookups of a tier with numbered slots promised: the slots that each request holds until it goes.

A key that is found is held at once, so what a lookup said stays true. A repeated lookup asks the
index for nothing as long as no pool has changed, and for what was missing where one has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import RequestKeys
from kvcache.connectors.pool_records import Signature, read_only, signature_of
from kvcache.connectors.pool_spaces import PoolSpaces
from kvcache.core.errors import ConfigError
from kvcache.core.pool import Pool, PoolBusyError

NOT_ASKED: Signature = (b"", ())
"""Of no keys: a lookup that the pools could not answer."""

NEVER = -1
"""The version of no pool: what a lookup found was not the answer of the index."""


@dataclass(slots=True)
class Promise:
    """What the last lookup of a request reported, and holds."""

    signature: Signature
    versions: list[int]
    present: list[NDArray[np.uint8]]
    slots: list[NDArray[np.int32]]
    """For each key the slot, one reference held, or -1."""


class Promises:
    """Those of all requests, over one pool for each group."""

    def __init__(self, pools: Sequence[Pool], numbers: PoolSpaces) -> None:
        self._pools, self._numbers = pools, numbers
        self._known: dict[int, Promise] = {}

    @property
    def requests(self) -> set[int]:
        """Those that hold something, or asked and were not answered."""
        return set(self._known)

    def held(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Group and slots, once for each reference."""
        for promise in self._known.values():
            for group, slots in enumerate(promise.slots):
                yield group, slots[slots >= 0]

    def lookup(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """As `TierScheduler.lookup`."""
        self._require_groups(keys)
        signature = signature_of(keys)
        versions = [pool.version for pool in self._pools]
        promise = self._known.get(keys.request)
        if promise is not None and promise.signature == signature:
            if promise.versions != versions:
                with suppress(PoolBusyError):  # what was promised stands
                    self._renew(promise, keys, versions)
            return list(promise.present)
        slots: list[NDArray[np.int32]] = []
        number = self._numbers.get(keys.namespace)
        try:
            for pool, digests in zip(self._pools, keys.digests, strict=True):
                none = np.full(len(digests), -1, np.int32)
                slots.append(none if number is None else pool.acquire(number, digests))
        except PoolBusyError as busy:
            self.unhold(slots)
            slots = [np.full(len(digests), -1, np.int32) for digests in keys.digests]
            versions = [NEVER] * len(versions)
            if busy.soon:
                unknown = Promise(NOT_ASKED, versions, [], [])
                self._known.setdefault(keys.request, unknown)
                return None
        if promise is not None:
            self.unhold(promise.slots)
        present = [read_only(s >= 0) for s in slots]
        self._known[keys.request] = Promise(signature, versions, present, slots)
        return list(present)

    def _renew(self, promise: Promise, keys: RequestKeys, versions: list[int]) -> None:
        """Adds keys that came since. What was promised is held, so nothing can have gone."""
        number = self._numbers.get(keys.namespace)
        for group, (pool, digests) in enumerate(zip(self._pools, keys.digests, strict=True)):
            slots = promise.slots[group]
            missing = np.flatnonzero(slots < 0)
            if number is not None and promise.versions[group] != versions[group] and len(missing):
                first = int(missing[0])
                here = pool.present(number, digests[first:])
                new = first + np.flatnonzero(here > promise.present[group][first:])
                if len(new):
                    slots[new] = pool.acquire(number, digests[new])
                    promise.present[group] = read_only(slots >= 0)
            promise.versions[group] = versions[group]

    def narrow(self, keys: RequestKeys) -> None:
        """As `TierScheduler.narrow`."""
        self._require_groups(keys)
        promise, lengths = self._known.get(keys.request), list(map(len, keys.digests))
        known = list(map(len, promise.slots)) if promise is not None else []
        if promise is None or len(known) < len(lengths) or any(map(int.__lt__, known, lengths)):
            self.lookup(keys)
            return
        self.unhold([slots[n:] for slots, n in zip(promise.slots, lengths, strict=True)])
        promise.signature = signature_of(keys)
        promise.slots = [slots[:n].copy() for slots, n in zip(promise.slots, lengths, strict=True)]
        promise.present = [read_only(slots >= 0) for slots in promise.slots]

    def holds(self, keys: RequestKeys) -> list[NDArray[np.uint8]] | None:
        """As `TierScheduler.holds`: nothing is promised."""
        self._require_groups(keys)
        number = self._numbers.get(keys.namespace)
        with suppress(PoolBusyError):
            return [
                np.zeros(len(digests), np.uint8)
                if number is None
                else pool.present(number, digests)
                for pool, digests in zip(self._pools, keys.digests, strict=True)
            ]
        return None

    def take(self, request: int) -> list[NDArray[np.int32]]:
        """What the request held, for each group; the caller owns the references, and `unhold`s them."""
        promise = self._known.pop(request, None)
        return [] if promise is None else promise.slots

    def release(self, request: int) -> bool:
        """Whether the request was known; what it held is let go."""
        known = request in self._known
        self.unhold(self.take(request))
        return known

    def unhold(self, groups: Sequence[NDArray[np.int32]]) -> None:
        """One reference each of the slots of each group, or of the first groups."""
        for pool, slots in zip(self._pools, groups, strict=False):
            pool.release(slots[slots >= 0][::-1])  # the tail of a prefix is evicted before its head

    def _require_groups(self, keys: RequestKeys) -> None:
        if len(keys.digests) != len(self._pools):
            raise ConfigError(
                f"lookup has keys of {len(keys.digests)} groups: this tier has {len(self._pools)}"
            )
