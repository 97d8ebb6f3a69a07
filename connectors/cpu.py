"""The CPU connector: host memory as the tier below the device, copies on a thread of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
)
from kvcache.connectors.copy_thread import CopyThread, Moved
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.region_copy import native_copy
from kvcache.connectors.settings import (
    require_regions,
    require_seconds,
    require_whole,
    slots_of_groups,
)
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.layout import Geometry
from kvcache.core.values import flag, index_seed, shown

DEFAULT_BATCH_BYTES = 16 << 20
"""About 2 ms of copying: how fine deadlines are, and how long a load waits for a store."""

CLOSE_SECONDS = 5.0

CopyFunction = Callable[[PageRegion, PageRegion, NDArray[np.int32], NDArray[np.int32]], None]
"""`(source, target, source_pages, target_pages)`: copies pair by pair; all or an exception."""


class Batch(NamedTuple):
    """What is copied in one go: a bounded number of bytes of one group."""

    source: PageRegion
    target: PageRegion
    source_pages: NDArray[np.int32]
    target_pages: NDArray[np.int32]
    items: NDArray[np.intp]
    """Indices into the transfer."""


class CpuWorker(TierWorker):
    """Cuts transfers into batches and lets the copy thread run them.

    The host memory is unmapped when the copy thread has ended, by `close` or otherwise.

    Args:
        groups: names of the geometry's groups, for messages.
    """

    def __init__(
        self,
        pool: HostPool,
        *,
        groups: Sequence[str],
        queue_depth: int,
        batch_bytes: int,
        copy: CopyFunction,
    ) -> None:
        self._groups = tuple(groups)
        self._slots = pool.regions
        self._pages: tuple[PageRegion, ...] = ()
        self._batch_bytes = batch_bytes

        def move(batch: Batch) -> Moved:
            copy(batch.source, batch.target, batch.source_pages, batch.target_pages)
            return Moved(len(batch.items) * batch.source.page_bytes)

        self._thread = CopyThread(move, queue_depth=queue_depth, on_exit=pool.close)
        # Also at interpreter exit: a thread must not copy from memory that is being torn down.
        self._closing = weakref.finalize(self, self._thread.close, CLOSE_SECONDS)

    @property
    def slot_regions(self) -> tuple[PageRegion, ...]:
        """The host memory."""
        return self._slots

    def notify(self, call: Callable[[], None]) -> bool:
        """True: the copy thread calls it."""
        return self._thread.notify(call)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages; starts the copy thread."""
        if self._pages:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        sizes = [slot.page_bytes for slot in self._slots]
        pages = require_regions(self._groups, sizes, regions, parts=True)
        if not self._closing.alive:
            raise MisuseError("register was called after close")
        self._pages = pages
        self._thread.start()

    def submit(self, transfer: Transfer) -> bool:
        """Items that name no existing page or slot fail; the rest is queued. O(items)."""
        if not self._pages:
            raise MisuseError("submit was called before register named the device pages")
        good = self._valid(transfer)
        bad = int(len(good) - good.sum())
        error = f"BadItem: {bad} of {len(good)} items name no page or no slot" if bad else ""
        return self._thread.submit(transfer, self._batches(transfer, good), error)

    def _valid(self, transfer: Transfer) -> NDArray[np.bool_]:
        groups, pages, slots = transfer.groups, transfer.pages, transfer.slots
        good = (groups >= 0) & (groups < len(self._slots)) & (pages >= 0) & (slots >= 0)
        known = np.where(good, groups, 0)
        page_counts = np.array([r.pages for r in self._pages])
        slot_counts = np.array([r.pages for r in self._slots])
        valid: NDArray[np.bool_] = (
            good & (pages < page_counts[known]) & (slots < slot_counts[known])
        )
        return valid

    def _batches(self, transfer: Transfer, good: NDArray[np.bool_]) -> list[Batch]:
        batches = []
        for group, (pages, slots) in enumerate(zip(self._pages, self._slots, strict=True)):
            rows = np.flatnonzero(good & (transfer.groups == group))
            step = max(1, self._batch_bytes // pages.page_bytes)
            for first in range(0, len(rows), step):
                items = rows[first : first + step]
                ids = transfer.pages[items], transfer.slots[items].astype(np.int32)
                if transfer.direction is Direction.STORE:
                    batches.append(Batch(pages, slots, *ids, items))
                else:
                    batches.append(Batch(slots, pages, *ids[::-1], items))
        return batches

    def poll(self) -> list[TransferResult]:
        """Results since the last call."""
        return self._thread.poll()

    def wait(self, timeout_seconds: float) -> bool:
        """Until there is a result, or the time is over."""
        return self._thread.wait(timeout_seconds)

    def stop(self) -> None:
        """Ends what is queued."""
        self._thread.stop()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """Ends every transfer; `poll` still gives their results.

        A copy that does not end within the timeout keeps the host memory mapped until it does; the
        interpreter's exit waits for it once more.
        """
        closed = self._thread.close(timeout_seconds)
        if closed:
            self._closing.detach()
        return closed


class CpuConnector(Connector):
    """Host memory as a tier.

    Args:
        geometry: the groups, as the manager has them.
        capacity_bytes: host memory to use, split over the groups by `split_bytes`. Or:
        pages: slots of each group.
        queue_depth: loads, and stores, that may be in flight at once; more are refused.
        deadline_seconds: after so long a transfer counts as late.
        state_interval_tokens: for `split_bytes`: tokens between two stored recurrent states.
        batch_bytes: copied between two looks at queue and deadline.
        events: whether `Offload.take_events` will be read: what becomes visible here and what goes.
        copy: replaces the native copy; for tests.
        seed: of the hash functions of its indexes; None: random ones, as in `Manager`.

    Raises:
        ConfigError: a size that is not above 0, or more than the machine or control group has.
    """

    __slots__ = ()

    def __init__(
        self,
        geometry: Geometry,
        *,
        capacity_bytes: int | None = None,
        pages: Sequence[int] | None = None,
        queue_depth: int = 32,
        deadline_seconds: float = 30.0,
        state_interval_tokens: int = 1024,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        events: bool = False,
        copy: CopyFunction = native_copy,
        seed: int | None = None,
    ) -> None:
        if not isinstance(geometry, Geometry):
            raise ConfigError(f"geometry is {shown(geometry)}: give a Geometry")
        events, seed = flag(events, "CpuConnector.events"), index_seed(seed, "CpuConnector.seed")
        require_whole("CpuConnector.queue_depth", queue_depth)
        require_whole("CpuConnector.batch_bytes", batch_bytes)
        require_seconds("CpuConnector.deadline_seconds", deadline_seconds)
        sizes = [group.page_bytes for group in geometry.groups]
        slots, setting = slots_of_groups(
            "CpuConnector",
            geometry,
            capacity_bytes=capacity_bytes,
            pages=pages,
            state_interval_tokens=state_interval_tokens,
            slot_bytes=sizes,
        )
        pool = HostPool(sizes, slots, setting=setting)
        super().__init__(
            name="cpu",
            scheduler=PoolScheduler(
                sizes,
                slots,
                deadline_seconds=deadline_seconds,
                events=events,
                seed=seed,
            ),
            worker=CpuWorker(
                pool,
                groups=[group.name for group in geometry.groups],
                queue_depth=queue_depth,
                batch_bytes=batch_bytes,
                copy=copy,
            ),
            medium=MEDIUM_CPU,
        )
