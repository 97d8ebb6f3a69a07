"""The shared connector: one pool of host memory for all processes of a user on one host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Connector, Direction, PageRegion, TierStats
from kvcache.connectors.copy_thread import Moved
from kvcache.connectors.disk_format import layout_digest, layout_text
from kvcache.connectors.host_worker import HostBatch, HostWorker
from kvcache.connectors.pool_records import Part, names_of
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.pool_spaces import PoolSpaces
from kvcache.connectors.region_copy import PageStage
from kvcache.connectors.settings import (
    copy_threads,
    folder_path,
    layout_setting,
    require_fingerprint,
    require_seconds,
    require_whole,
    slots_of_groups,
)
from kvcache.connectors.shared_region import SharedRegion
from kvcache.connectors.slots_aside import NO_SPACE
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry, require_geometry
from kvcache.core.pool import PoolBusyError
from kvcache.core.values import flag, index_seed, text, whole

DEFAULT_BATCH_BYTES = 16 << 20
"""About 4 ms of copying with checksums: how fine deadlines are, how long a load waits for a store."""

LOOK_SECONDS = 0.5
"""How often each process looks whether another has died."""


class SharedConnector(Connector):
    """A region of host memory as a tier, with one index for all processes that attach to it.

    What one stores all find at once; what one looks up, or reads, none replaces. A page is copied
    with a checksum of bytes and key, which is compared on its way back: a wrong byte is a miss, and
    is counted. A process that is killed leaves no lock, no half-written page that can be found, and
    no pin. The last user to leave removes the region. Reports no events.

    Args:
        geometry: the groups, as the manager has them.
        name: of the region; those that give the same name share it.
        fingerprint: that of the manager. Its model must be named.
        layout: whose bytes they are, as for `DiskConnector`. Users of one region must give the same.
        capacity_bytes: host memory to use, split over the groups by `split_bytes`. Or:
        pages: slots of each group.
        folder: where regions lie; None: a folder of this user's in /dev/shm.
        queue_depth, deadline_seconds, state_interval_tokens, batch_bytes, lock, numa_node: as for
            `CpuConnector`.
        huge_pages: True: the folder's file system must take them (tmpfs: `huge=within_size`); None:
            where it does; False: none.
        threads: that copy at once, no more than the cores given to this process.
        seed: of the index's hash function, for who makes the region; None: a random one.
        before_copy: called before each batch; for tests.

    Raises:
        ConfigError: a setting that cannot work, a region that was made for something else, or more
            than a limit leaves: of the machine, a control group, /dev/shm, locked memory.
    """

    __slots__ = ()

    def __init__(
        self,
        geometry: Geometry,
        *,
        name: str,
        fingerprint: Fingerprint,
        layout: str,
        capacity_bytes: int | None = None,
        pages: Sequence[int] | None = None,
        folder: str | os.PathLike[str] | None = None,
        queue_depth: int = 32,
        deadline_seconds: float = 30.0,
        state_interval_tokens: int = 1024,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        lock: bool = False,
        threads: int = 1,
        seed: int | None = None,
        before_copy: Callable[[], None] = lambda: None,
    ) -> None:
        require_geometry(geometry)
        require_fingerprint("SharedConnector", fingerprint)
        if seed is not None:
            seed = index_seed(seed, "SharedConnector.seed")
        require_whole("SharedConnector.queue_depth", queue_depth)
        require_whole("SharedConnector.batch_bytes", batch_bytes)
        require_seconds("SharedConnector.deadline_seconds", deadline_seconds)
        threads = copy_threads("SharedConnector", threads)
        sizes = [group.page_bytes for group in geometry.groups]
        slots, setting = slots_of_groups(
            "SharedConnector",
            geometry,
            capacity_bytes=capacity_bytes,
            pages=pages,
            state_interval_tokens=state_interval_tokens,
            slot_bytes=sizes,
        )
        described = layout_text(geometry, fingerprint, layout_setting("SharedConnector", layout))
        region = SharedRegion(
            None if folder is None else folder_path("SharedConnector", folder),
            text(name, "SharedConnector.name"),
            slots=slots,
            page_bytes=sizes,
            layout=layout_digest(described),
            setting=setting,
            lock=flag(lock, "SharedConnector.lock"),
            huge_pages=None
            if huge_pages is None
            else flag(huge_pages, "SharedConnector.huge_pages"),
            numa_node=None
            if numa_node is None
            else whole(numa_node, "SharedConnector.numa_node", least=0),
            seed=seed,
        )
        super().__init__(
            name="shared",
            scheduler=SharedScheduler(region, sizes, slots, deadline_seconds=deadline_seconds),
            worker=HostWorker(
                region.regions,
                region.chunks,
                _SharedMover(region, before_copy, threads),
                groups=[group.name for group in geometry.groups],
                queue_depth=queue_depth,
                batch_bytes=batch_bytes,
                named=True,
                idle_seconds=LOOK_SECONDS,
            ),
            medium=MEDIUM_CPU,
        )


class SharedScheduler(PoolScheduler):
    """`PoolScheduler` over slots that other processes use too, by names that are the same in all."""

    def __init__(
        self,
        region: SharedRegion,
        slot_bytes: Sequence[int],
        slots: Sequence[int],
        *,
        deadline_seconds: float,
    ) -> None:
        super().__init__(
            slot_bytes,
            slots,
            deadline_seconds=deadline_seconds,
            pools=region.tables.pools,
            spaces=SharedSpaces(),
            chunks=region.chunks,
        )
        self._region = region

    @property
    def busy_calls(self) -> int:
        """Calls that did not get the lock in time: another process was stopped in the middle of a change."""
        return self._region.tables.busy

    @property
    def repairs(self) -> int:
        """How often the tables were made anew after a death in the middle of a change."""
        return max(pool.shared_stats().recoveries for pool in self._region.tables.pools)

    def stats(self) -> TierStats:
        """As `PoolScheduler.stats`, with what the region itself counts."""
        return replace(super().stats(), busy_calls=self.busy_calls, repairs=self.repairs)

    @property
    def tables_bytes(self) -> int:
        """Of the region: bookkeeping of all slots, beside `capacity_bytes`."""
        return self._region.tables_bytes

    def _acquire(
        self, group: int, number: int, digests: NDArray[np.uint8], held: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        pool = self._region.tables.pools[group]
        slots = pool.acquire_held(number, digests, held)
        rest = np.flatnonzero(slots < 0)
        if len(rest):
            with suppress(PoolBusyError):
                slots[rest] = pool.acquire(number, digests[rest])
        return slots

    def _names(self, items: NDArray[np.void], parts: list[Part]) -> NDArray[np.uint8]:
        return names_of(items, parts)


class SharedSpaces(PoolSpaces):
    """Numbers of namespaces that are the namespaces: equal in all processes, and none is kept."""

    def __init__(self) -> None:
        super().__init__([])

    def get(self, namespace: bytes) -> int:
        """Every namespace has one."""
        return int.from_bytes(namespace, "little")

    give = get


class _SharedMover:
    """Copies with checksums, and looks after the dead. Owns the region."""

    def __init__(self, region: SharedRegion, before_copy: Callable[[], None], threads: int) -> None:
        self._region = region
        self._before_copy = before_copy
        self._threads = threads
        self._looked = time.monotonic()
        self._stage = PageStage()

    def move(self, batch: HostBatch, pages: PageRegion) -> Moved:
        """Stores go only where memory is reserved; loads are right, or their keys go."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self.attend()
        self._before_copy()
        assert batch.names is not None
        load = batch.direction is Direction.LOAD
        addresses = self._stage.addresses(pages, batch.pages, filled=not load)
        tables, total = self._region.tables, len(batch.items)
        if load:
            ok = (
                tables.load(batch.group, addresses, batch.slots, batch.names, threads=self._threads)
                == 1
            )
            self._stage.scatter(pages, batch.pages, ok)
            why = "pages are not what was stored under their key"
            error = "" if ok.all() else f"Damaged: {total - int(ok.sum())} of {total} {why}"
            return Moved(int(ok.sum()) * pages.page_bytes, ok, ~ok, error)
        ready, missing = self._region.chunks.ensure(batch.group, batch.slots)
        tables.store(
            batch.group,
            addresses[ready],
            batch.slots[ready],
            batch.names[ready],
            threads=self._threads,
        )
        count = int(ready.sum())
        error = f"{NO_SPACE}: {total - count} of {total} pages: {missing}" if missing else ""
        return Moved(count * pages.page_bytes, ready, error=error)

    def attend(self) -> None:
        """Take back what the dead hold."""
        self._looked = time.monotonic()
        self._region.bury()

    def close(self) -> None:
        """Leave the region."""
        self._region.close()
        self._stage.close()
