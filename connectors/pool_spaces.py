"""Numbers of the namespaces whose keys are in the pools of a tier: as many as are in use, not as ever were."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.core.pool import PagePool


class PoolSpaces:
    """Numbers that the pools of all groups know namespaces by.

    Once there are more than twice as many as slots, those go that no key and no waiting event has.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self._pools = pools
        self._least = self._most = 2 * sum(pool.capacity for pool in pools)
        self._numbers: dict[bytes, int] = {}
        self._unused: list[int] = []
        self.names: list[bytes] = []
        """By number."""

    def __len__(self) -> int:
        return len(self._numbers)

    def get(self, namespace: bytes) -> int | None:
        """None: no pool has a key of it."""
        return self._numbers.get(namespace)

    def give(self, namespace: bytes) -> int:
        """The number for keys that are about to be published."""
        number = self._numbers.get(namespace)
        if number is None:
            if len(self._numbers) >= self._most:
                self._drop_unused()
            if self._unused:
                number = self._unused.pop()
                self.names[number] = namespace
            else:
                number = len(self.names)
                self.names.append(namespace)
            self._numbers[namespace] = number
        return number

    def _drop_unused(self) -> None:
        """O(slots + waiting events), once in as many new namespaces."""
        used = {number for pool in self._pools for number in pool.namespaces().tolist()}
        for namespace, number in list(self._numbers.items()):
            if number not in used:
                del self._numbers[namespace]
                self.names[number] = b""
                self._unused.append(number)
        self._most = max(self._least, 2 * len(self._numbers))
