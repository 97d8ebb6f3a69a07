"""The CPU connector: host memory as the tier below the device, copies on a thread of their own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

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
from kvcache.connectors.copy_thread import Batch, CopyFunction, CopyThread
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.core.copy import CopySegment, copy_pages
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events.records import MEDIUM_CPU
from kvcache.core.layout import Geometry
from kvcache.core.values import flag, index_seed, sequence, shown

DEFAULT_BATCH_BYTES = 16 << 20
"""About 2 ms of copying: how fine deadlines are, and how long a load waits for a store."""

CLOSE_SECONDS = 5.0


def native_copy(
    source: PageRegion,
    target: PageRegion,
    source_pages: NDArray[np.int32],
    target_pages: NDArray[np.int32],
) -> None:
    """The native gather/scatter copy, whole pages."""
    segment = CopySegment(
        source.address,
        source.step_bytes,
        source.pages,
        target.address,
        target.step_bytes,
        target.pages,
        source.page_bytes,
    )
    copy_pages([segment], source_pages, target_pages)


def split_bytes(
    geometry: Geometry, capacity_bytes: int, *, state_interval_tokens: int = 1024
) -> tuple[int, ...]:
    """Pages of each group that share a byte budget so that all groups cover as many tokens.

    Args:
        geometry: the groups.
        capacity_bytes: the budget; the result never exceeds it.
        state_interval_tokens: tokens between two recurrent states that are stored, on average.

    Raises:
        ConfigError: the budget does not hold one page of each group.
    """
    _require_whole("capacity_bytes", capacity_bytes)
    _require_whole("state_interval_tokens", state_interval_tokens)
    least = sum(group.page_bytes for group in geometry.groups)
    if capacity_bytes < least:
        raise ConfigError(
            f"CpuConnector.capacity_bytes is {capacity_bytes}: one page of each group takes"
            f" {least} bytes, give at least that"
        )
    spans = [
        rules.block_tokens or (state_interval_tokens if rules.kind == "state" else 0)
        for rules in geometry.rules
    ]
    cached = [(g.page_bytes, span) for g, span in zip(geometry.groups, spans, strict=True) if span]
    # One page of each first, the rest by tokens: rounding down keeps the sum within the budget.
    # Private pages are never stored.
    common = math.lcm(*(span for _, span in cached))
    common_bytes = sum(size * (common // span) for size, span in cached)
    tokens = (capacity_bytes - least) * common // common_bytes if cached else 0
    return tuple(1 + (tokens // span if span else 0) for span in spans)


def _require_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"CpuConnector.{name} is {value!r}: it must be a whole number above 0")


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
        self._thread = CopyThread(copy, queue_depth=queue_depth, on_exit=pool.close)
        # Also at interpreter exit: a thread must not copy from memory that is being torn down.
        self._closing = weakref.finalize(self, self._thread.close, CLOSE_SECONDS)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages; starts the copy thread."""
        if self._pages:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        if len(regions) != len(self._slots):
            raise ConfigError(
                f"register got {len(regions)} regions: this connector has {len(self._slots)} groups"
            )
        for name, region, slot in zip(self._groups, regions, self._slots, strict=True):
            if (
                region.page_bytes != slot.page_bytes
                or region.step_bytes < region.page_bytes
                or region.pages < 1
                or region.address < 1
            ):
                raise ConfigError(
                    f"register: the region of group {name!r} has {region.pages} pages of"
                    f" {region.page_bytes} bytes, {region.step_bytes} apart, at address"
                    f" {region.address}: it needs pages of"
                    f" {slot.page_bytes} bytes, as the geometry says"
                )
        if not self._closing.alive:
            raise MisuseError("register was called after close")
        self._pages = tuple(regions)
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
        _require_whole("queue_depth", queue_depth)
        _require_whole("batch_bytes", batch_bytes)
        if not _is_time(deadline_seconds):
            raise ConfigError(
                f"CpuConnector.deadline_seconds is {shown(deadline_seconds)}: it must be a number of"
                " seconds, above 0 and finite"
            )
        if (capacity_bytes is None) == (pages is None):
            raise ConfigError("CpuConnector needs either capacity_bytes or pages, and not both")
        if capacity_bytes is not None:
            setting = "CpuConnector.capacity_bytes"
            slots = split_bytes(
                geometry, capacity_bytes, state_interval_tokens=state_interval_tokens
            )
        elif pages is not None:
            setting = "CpuConnector.pages"
            slots = tuple(sequence(pages, setting))
        _require_slots(geometry, slots, setting)
        sizes = [group.page_bytes for group in geometry.groups]
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


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0 and math.isfinite(value)


def _require_slots(geometry: Geometry, slots: Sequence[object], setting: str) -> None:
    if len(slots) != len(geometry.groups):
        raise ConfigError(
            f"{setting} has {len(slots)} numbers for {len(geometry.groups)} groups: give one each"
        )
    for group, count in zip(geometry.groups, slots, strict=True):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**31 - 1:
            raise ConfigError(
                f"{setting} gives group {group.name!r} {count!r} slots: it must be a whole number"
                " above 0 and below 2^31 - 1"
            )
