"""What sinks: pages of the upper tier that are written to the lower one, in the background.

What is added waits its turn, is held in the upper tier, written to the lower one, and let go. A write
that a full queue refused waits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    QUEUE_FULL,
    KeyedPages,
    TierScheduler,
    TierStats,
    Transfer,
    TransferResult,
)
from kvcache.connectors.tier_counts import count_failure

MAX_DESCENTS = 2
"""Writes to the lower tier in flight: one runs, one waits."""

DESCENT_BYTES = 16 << 20
"""Most bytes of one of them: its slots of the upper tier are held until it is done."""


@dataclass(slots=True)
class Descent:
    """Pages on their way from the upper tier to the lower one."""

    held: Transfer
    """A load of the upper tier that nobody submits: it holds the slots."""
    write: Transfer
    """The store of the lower tier."""
    keys: KeyedPages


class Descents:
    """All of them, between two tiers.

    Args:
        upper, lower: the tiers.
        page_bytes: of each group.
        most_behind: keys that may wait; the oldest drop out, and are counted.
        own: numbers under which the upper tier may be asked.
    """

    def __init__(
        self,
        upper: TierScheduler,
        lower: TierScheduler,
        page_bytes: NDArray[np.int64],
        *,
        most_behind: int,
        own: Iterator[int],
    ) -> None:
        self._upper, self._lower, self._page_bytes, self._own = upper, lower, page_bytes, own
        # What sinks holds a small part of the upper tier, or little could rise meanwhile.
        self._most_bytes = min(DESCENT_BYTES, upper.stats().capacity_bytes // 16)
        self._backlog = Backlog(most_behind)
        self._known: dict[int, Descent] = {}
        self.dropped_pages = 0
        """Keys that were added, and were gone, or one too many, before their turn to be written."""
        self.failures = TierStats()
        """Of writes that failed: they are not tried again."""

    def __len__(self) -> int:
        """Keys that wait to be written, or are being written."""
        return len(self._backlog) + sum(len(d.write.slots) for d in self._known.values())

    @property
    def held_pages(self) -> int:
        """Slots that are held for it, in both tiers."""
        held = (int((d.held.slots >= 0).sum()) + len(d.write.slots) for d in self._known.values())
        return sum(held)

    @property
    def transfers(self) -> tuple[list[int], list[int]]:
        """Numbers of those that are open, in each tier."""
        known = self._known.values()
        return [it.held.id for it in known], [it.write.id for it in known]

    def add(self, keys: KeyedPages) -> None:
        """The upper tier has them; the lower one is to."""
        self.dropped_pages += self._backlog.add(keys)

    def plan(self) -> Transfer | None:
        """A store of the lower tier to be submitted, and ended by `complete`; None: none now."""
        while len(self._backlog) and len(self._known) < MAX_DESCENTS:
            keys = self._backlog.take(self._page_bytes, self._most_bytes)
            held = self._upper.plan_load(next(self._own), keys)
            there = held.slots >= 0
            self.dropped_pages += int((~there).sum())
            items = keys.items[there].copy()
            items["page"] = held.slots[there]
            plan = self._lower.plan_store(keys._replace(items=items)) if len(items) else None
            if plan is None:
                self._upper.drop(held)
                continue
            self._known[plan[0].id] = Descent(held, plan[0], keys)
            return plan[0]
        return None

    def complete(self, result: TransferResult) -> None:
        """The result of a write, late or the final one. What a full queue refused is tried again."""
        descent = self._known[result.id]
        self._lower.complete(result)
        if result.late:
            self.failures.late_transfers += 1
            return
        del self._known[result.id]
        self._upper.drop(descent.held)
        if result.error.startswith(QUEUE_FULL):
            self._backlog.give_back(descent.keys)
        else:
            count = len(descent.write.slots)
            good = int((result.ok == 1).sum()) if len(result.ok) == count else 0
            count_failure(self.failures, result, count - good)


class Backlog:
    """Keys that are to be written to the lower tier, the oldest first. Bounded; the oldest drop out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[KeyedPages] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: KeyedPages) -> int:
        """How many of the oldest had no place any more."""
        self._parts.append(keys)
        self._count += len(keys.items)
        dropped = 0
        while self._count > self._most:
            excess = self._count - self._most
            dropped += len(self._take(excess).items)
        return dropped

    def take(self, page_bytes: NDArray[np.int64], most_bytes: int) -> KeyedPages:
        """The oldest that were added together, at least one, and at most so many bytes of them."""
        sizes = np.cumsum(page_bytes[self._parts[0].items["group"]])
        return self._take(max(1, int(np.searchsorted(sizes, most_bytes, side="right"))))

    def give_back(self, keys: KeyedPages) -> None:
        """What could not be written now is the first to be taken again."""
        self._parts.insert(0, keys)
        self._count += len(keys.items)

    def _take(self, count: int) -> KeyedPages:
        first = self._parts[0]
        if len(first.items) <= count:
            del self._parts[0]
        else:
            self._parts[0] = first._replace(items=first.items[count:])
            first = first._replace(items=first.items[:count])
        self._count -= len(first.items)
        return first
