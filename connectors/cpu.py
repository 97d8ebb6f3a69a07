"""The CPU connector: host memory as the tier below the device, copies on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Connector, Direction, PageRegion
from kvcache.connectors.copy_thread import Moved
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.host_worker import HostBatch, HostWorker
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.region_copy import native_copy
from kvcache.connectors.settings import (
    copy_threads,
    require_seconds,
    require_whole,
    slots_of_groups,
)
from kvcache.connectors.slots_aside import no_space
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.layout import Geometry, require_geometry
from kvcache.core.values import flag, index_seed, whole

DEFAULT_BATCH_BYTES = 16 << 20
"""About 2 ms of copying: how fine deadlines are, and how long a load waits for a store."""

CopyFunction = Callable[[PageRegion, PageRegion, NDArray[np.int32], NDArray[np.int32]], None]
"""`(source, target, source_pages, target_pages)`: copies pair by pair; all or an exception."""


class _CpuMover:
    """Copies between device pages and the slots of a pool, which it owns."""

    def __init__(self, pool: HostPool, copy: CopyFunction) -> None:
        self._pool = pool
        self._copy = copy

    def move(self, batch: HostBatch, pages: PageRegion) -> Moved:
        """Stores go only where memory is ready: what has none fails, the rest is copied."""
        slots = self._pool.regions[batch.group]
        if batch.direction is Direction.LOAD:
            self._copy(slots, pages, batch.slots, batch.pages)
            return Moved(len(batch.items) * pages.page_bytes)
        ready, error = self._pool.chunks.ensure(batch.group, batch.slots)
        self._copy(pages, slots, batch.pages[ready], batch.slots[ready])
        count = int(ready.sum())
        return Moved(count * pages.page_bytes, ready, error=no_space(ready, error))

    def attend(self) -> None:
        """Nothing to attend to."""

    def close(self) -> None:
        """Unmap."""
        self._pool.close()


class CpuWorker(HostWorker):
    """A `HostWorker` over private memory."""

    def __init__(
        self,
        pool: HostPool,
        *,
        groups: Sequence[str],
        queue_depth: int,
        batch_bytes: int,
        copy: CopyFunction,
    ) -> None:
        super().__init__(
            pool.regions,
            pool.chunks,
            _CpuMover(pool, copy),
            groups=groups,
            queue_depth=queue_depth,
            batch_bytes=batch_bytes,
        )

    @property
    def slot_regions(self) -> tuple[PageRegion, ...]:
        """The host memory."""
        return self._slots

    def lend_slots(self) -> Callable[[], None]:
        """The pool stays until the result is called."""
        return self._users.add()


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
        huge_pages: True: reserved ones (`vm.nr_hugepages`); False: none; None: reserved ones where
            they are enough, else transparent ones where the kernel has them.
        numa_node: where the memory is to come from, as long as there is some; None: wherever.
        lock: keep it from being swapped, within RLIMIT_MEMLOCK.
        threads: that copy at once, no more than the cores given to this process. One leaves the others
            to the engine; a machine with cores to spare copies faster with two (docs/copy.md).
        copy: replaces the native copy; for tests.
        seed: of the hash functions of its indexes; None: random ones, as in `Manager`.

    Raises:
        ConfigError: a size that is not above 0, or more than a limit leaves: of the machine, a
            control group, huge pages, a NUMA node, locked memory.

    Memory is made ready in the background from `register` on (`worker.chunks`); the tier may be
    used at once.
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
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        lock: bool = False,
        events: bool = False,
        threads: int = 1,
        copy: CopyFunction | None = None,
        seed: int | None = None,
    ) -> None:
        require_geometry(geometry)
        events, seed = flag(events, "CpuConnector.events"), index_seed(seed, "CpuConnector.seed")
        lock = flag(lock, "CpuConnector.lock")
        if huge_pages is not None:
            huge_pages = flag(huge_pages, "CpuConnector.huge_pages")
        if numa_node is not None:
            numa_node = whole(numa_node, "CpuConnector.numa_node", least=0)
        require_whole("CpuConnector.queue_depth", queue_depth)
        require_whole("CpuConnector.batch_bytes", batch_bytes)
        require_seconds("CpuConnector.deadline_seconds", deadline_seconds)
        threads = copy_threads("CpuConnector", threads)
        sizes = [group.page_bytes for group in geometry.groups]
        slots, setting = slots_of_groups(
            "CpuConnector",
            geometry,
            capacity_bytes=capacity_bytes,
            pages=pages,
            state_interval_tokens=state_interval_tokens,
            slot_bytes=sizes,
        )
        pool = HostPool(
            sizes, slots, setting=setting, huge_pages=huge_pages, numa_node=numa_node, lock=lock
        )
        super().__init__(
            name="cpu",
            scheduler=PoolScheduler(
                sizes,
                slots,
                deadline_seconds=deadline_seconds,
                events=events,
                seed=seed,
                chunks=pool.chunks,
            ),
            worker=CpuWorker(
                pool,
                groups=[group.name for group in geometry.groups],
                queue_depth=queue_depth,
                batch_bytes=batch_bytes,
                copy=copy or partial(native_copy, threads=threads),
            ),
            medium=MEDIUM_CPU,
        )
