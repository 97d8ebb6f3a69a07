"""A host tier under the simulated clock: the real deciding side, copies that only take time.

Loads and stores each have the link's bandwidth in their direction, and go one after the other, as
they were submitted. Stamps, where there are any, are copied when a transfer ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    Connector,
    Direction,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
    failed,
)
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.core.errors import MisuseError
from kvcache.core.layout import Geometry
from kvcache.engine.simulated import SimulatedClock
from kvcache.engine.simulated_hardware import Hardware
from kvcache.engine.simulated_stamps import PageStamps

QUEUE_DEPTH = 32
"""Loads, and stores, in flight: as of `CpuConnector`."""

DEADLINE_SECONDS = 86_400.0
"""Of wall time: no simulated copy is late."""

NEVER = float("inf")


class _Copy(NamedTuple):
    """A transfer in flight."""

    transfer: Transfer
    ok: NDArray[np.uint8]
    bytes: int
    seconds: float
    ends: float


class SimulatedWorker(TierWorker):
    """Takes the time of copies.

    Args:
        page_bytes: of a page of each group.
        stamps: what lies in pages and slots; None: nothing.

    Attributes:
        busy_seconds: of the link, by direction.
        wake_at: `wait` lets no time pass beyond it: something else happens then.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        hardware: Hardware,
        clock: SimulatedClock,
        stamps: PageStamps | None = None,
    ) -> None:
        self.busy_seconds = dict.fromkeys(Direction, 0.0)
        self.wake_at = NEVER
        self._page_bytes = np.array(page_bytes, np.int64)
        self._hardware = hardware
        self._clock = clock
        self._stamps = stamps
        self._queues: dict[Direction, deque[_Copy]] = {d: deque() for d in Direction}
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._ended: list[TransferResult] = []
        self._registered = False

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Nothing is known of the pages but their number."""
        if self._registered:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        if len(regions) != len(self._page_bytes):
            raise MisuseError(
                f"register got {len(regions)} regions for {len(self._page_bytes)} groups"
            )
        self._registered = True

    @property
    def next_seconds(self) -> float:
        """When the next copy ends; `NEVER` where none is in flight."""
        return min((queue[0].ends for queue in self._queues.values() if queue), default=NEVER)

    def submit(self, transfer: Transfer) -> bool:
        """It ends when those before it have, and its bytes have gone over the link. O(items)."""
        if not self._registered:
            raise MisuseError("submit was called before register named the device pages")
        queue = self._queues[transfer.direction]
        if len(queue) >= QUEUE_DEPTH:
            return False
        good = transfer.slots >= 0
        size = int(self._page_bytes[transfer.groups[good]].sum())
        seconds = self._hardware.link_seconds + size / self._hardware.link
        ends = max(self._clock.now, self._free_at[transfer.direction]) + seconds
        self._free_at[transfer.direction] = ends
        self.busy_seconds[transfer.direction] += seconds
        queue.append(_Copy(transfer, good.astype(np.uint8), size, seconds, ends))
        return True

    def poll(self) -> list[TransferResult]:
        """Those whose time has come, in the order in which they ended."""
        copies = [
            queue.popleft()
            for queue in self._queues.values()
            for _ in range(sum(copy.ends <= self._clock.now for copy in queue))
        ]
        for copy in sorted(copies, key=lambda copy: copy.ends):
            self._copy_stamps(copy)
            self._ended.append(
                TransferResult(
                    copy.transfer.id,
                    copy.transfer.direction,
                    copy.ok,
                    error="" if copy.ok.all() else "BadItem: items that name no slot",
                    seconds=copy.seconds,
                    bytes=copy.bytes,
                )
            )
        ended, self._ended = self._ended, []
        return ended

    def _copy_stamps(self, copy: _Copy) -> None:
        if self._stamps is None:
            return
        transfer = copy.transfer
        move = self._stamps.load if transfer.direction is Direction.LOAD else self._stamps.store
        for group in np.unique(transfer.groups).tolist():
            rows = (transfer.groups == group) & (copy.ok == 1)
            move(group, transfer.pages[rows], transfer.slots[rows])

    def wait(self, timeout_seconds: float) -> bool:
        """The clock moves on to the next end of a copy, or so far, or to `wake_at`."""
        ends = self.next_seconds
        self._clock.advance_to(min(ends, self._clock.now + timeout_seconds, self.wake_at))
        return bool(self._ended) or ends <= self._clock.now

    def close(self, timeout_seconds: float = 5.0) -> bool:  # noqa: ARG002
        """What is in flight fails; `poll` gives those results."""
        for queue in self._queues.values():
            while queue:
                self._ended.append(failed(queue.popleft().transfer, "Closed: the tier was closed"))
        return True


def simulated_host(
    geometry: Geometry,
    slots: Sequence[int],
    hardware: Hardware,
    clock: SimulatedClock,
    *,
    stamps: PageStamps | None = None,
    seed: int | None = None,
) -> Connector:
    """Host memory of so many slots for each group, without the memory."""
    sizes = [group.page_bytes for group in geometry.groups]
    return Connector(
        name="simulated host",
        scheduler=PoolScheduler(sizes, slots, deadline_seconds=DEADLINE_SECONDS, seed=seed),
        worker=SimulatedWorker(sizes, hardware, clock, stamps),
    )
