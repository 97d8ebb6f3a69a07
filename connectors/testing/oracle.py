"""A tier as a handful of dictionaries: what the index of a real one is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class OracleTier(Generic[K]):
    """Keys of each group in LRU order, with references. Naive: every step is written out.

    A key is any hashable; keys of one request or transfer are given as lists, one per group, in
    the order of their positions.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = capacities
        self.cached: list[dict[K, None]] = [{} for _ in capacities]
        """Visible, no reference; a dict keeps the order: the first is evicted first."""
        self.held: list[Counter[K]] = [Counter() for _ in capacities]
        """Visible, with references."""
        self.storing: list[set[K]] = [set() for _ in capacities]
        self.promises: dict[int, list[list[K]]] = {}

    def visible(self, group: int, key: K) -> bool:
        """Would a lookup find it?"""
        return key in self.cached[group] or self.held[group][key] > 0

    def _hold(self, group: int, key: K) -> None:
        self.cached[group].pop(key, None)
        self.held[group][key] += 1

    def _let_go(self, group: int, keys: Sequence[K]) -> None:
        for key in reversed(keys):  # the tail of a prefix is evicted before its head
            self.held[group][key] -= 1
            if not self.held[group][key]:
                del self.held[group][key]
                self.cached[group][key] = None

    def lookup(self, request: int, keys: Sequence[Sequence[K]]) -> list[list[int]]:
        """Pins what is visible, then drops what the request pinned before."""
        found = [[int(self.visible(group, key)) for key in row] for group, row in enumerate(keys)]
        promise = [
            [key for key, here in zip(row, flags, strict=True) if here]
            for row, flags in zip(keys, found, strict=True)
        ]
        for group, row in enumerate(promise):
            for key in row:
                self._hold(group, key)
        self.release(request)
        self.promises[request] = promise
        return found

    def release(self, request: int) -> None:
        """Drops the request's pins, if it has any."""
        for group, row in enumerate(self.promises.pop(request, [])):
            self._let_go(group, row)

    def plan_load(self, request: int, keys: Sequence[Sequence[K]]) -> None:
        """Pins go over to the transfer. Keys that are not visible are not held."""
        for group, row in enumerate(keys):
            for key in row:
                if self.visible(group, key):
                    self._hold(group, key)
        self.release(request)

    def end_load(self, keys: Sequence[Sequence[K]]) -> None:
        """The keys that `plan_load` held."""
        for group, row in enumerate(keys):
            self._let_go(group, row)

    def plan_store(self, keys: Sequence[Sequence[K]]) -> list[list[K]]:
        """Which of the keys get a slot; evicts as needed."""
        chosen: list[list[K]] = []
        for group, row in enumerate(keys):
            new: list[K] = []
            for key in row:
                if self.visible(group, key) or key in self.storing[group] or key in new:
                    continue
                new.append(key)
            cached, busy = self.cached[group], len(self.held[group]) + len(self.storing[group])
            new = new[: self.capacities[group] - busy]
            while len(new) + len(cached) + busy > self.capacities[group]:
                del cached[next(iter(cached))]
            self.storing[group].update(new)
            chosen.append(new)
        return chosen

    def end_store(self, keys: Sequence[Sequence[K]], good: Sequence[Sequence[K]]) -> None:
        """The good keys become visible; slots of the others are free again."""
        for group, row in enumerate(keys):
            self.storing[group].difference_update(row)
            for key in reversed(row):
                if key in good[group]:
                    self.cached[group][key] = None
