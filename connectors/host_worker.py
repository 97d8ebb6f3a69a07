"""The moving side of a tier whose slots lie in host memory: transfers cut into batches for a copy thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import Direction, PageRegion, TierWorker, Transfer, TransferResult
from kvcache.connectors.copy_thread import IDLE_SECONDS, CopyThread, Moved
from kvcache.connectors.memory_users import Users
from kvcache.connectors.pool_chunks import PoolChunks
from kvcache.connectors.settings import require_regions
from kvcache.connectors.slots_aside import no_space
from kvcache.core.errors import MisuseError

CLOSE_SECONDS = 5.0


class HostBatch(NamedTuple):
    """What is copied in one go: a bounded number of bytes of one group."""

    direction: Direction
    group: int
    pages: NDArray[np.int32]
    slots: NDArray[np.int32]
    names: NDArray[np.uint8] | None
    """`[n, 64]`, as `Transfer.names`."""
    items: NDArray[np.intp]
    """Indices into the transfer."""
    moves: bool = True
    """False: its slots are to be made ready, and that is all."""


class Mover(Protocol):
    """What the copy thread does. It knows nothing of the worker, which may be gone before it."""

    def move(self, batch: HostBatch, pages: PageRegion) -> Moved:
        """Copy one batch, from or to the device pages of its group."""

    def attend(self) -> None:
        """Called now and then where nothing is to be moved."""

    def close(self) -> None:
        """Nothing is moved any more: let go of the memory."""


class HostWorker(TierWorker):
    """Cuts transfers into batches and lets the copy thread run them.

    The memory is let go (`mover.close`) when the copy thread has ended, by `close` or otherwise, and
    nobody has it lent.

    Args:
        slots: where the slots of each group lie.
        chunks: the memory behind them, made ready from `register` on.
        groups: names of the geometry's groups, for messages.
        named: transfers without names are refused, item by item.
        idle_seconds: how often `mover.attend` is called.
    """

    def __init__(
        self,
        slots: Sequence[PageRegion],
        chunks: PoolChunks,
        mover: Mover,
        *,
        groups: Sequence[str],
        queue_depth: int,
        batch_bytes: int,
        named: bool = False,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._groups = tuple(groups)
        self._slots = tuple(slots)
        self.chunks = chunks
        self._named = named
        self._pages: tuple[PageRegion, ...] = ()
        self._batch_bytes = batch_bytes
        regions: list[PageRegion] = []
        self._regions = regions  # the thread must not keep the worker alive

        def move(batch: HostBatch) -> Moved:
            if not batch.moves:
                ready, error = chunks.ensure(batch.group, batch.slots)
                return Moved(0, ready, error=no_space(ready, error))
            return mover.move(batch, regions[batch.group])

        self._users = Users(mover.close)
        leave = self._users.add()

        def end() -> None:
            chunks.stop()  # also where the memory stays for somebody else
            leave()

        self._thread = CopyThread(
            move,
            queue_depth=queue_depth,
            on_exit=end,
            on_idle=mover.attend,
            idle_seconds=idle_seconds,
        )
        # Also at interpreter exit: a thread must not copy from memory that is being torn down.
        self._closing = weakref.finalize(self, self._thread.close, CLOSE_SECONDS)

    def notify(self, call: Callable[[], None]) -> bool:
        """True: the copy thread calls it."""
        return self._thread.notify(call)

    def at_end(self, call: Callable[[], None]) -> bool:
        """True: the copy thread calls it, as the last that it does."""
        return self._thread.at_end(call)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages; starts the threads that copy, and that make memory ready."""
        if self._pages:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        sizes = [slot.page_bytes for slot in self._slots]
        pages = require_regions(self._groups, sizes, regions, parts=True)
        if not self._closing.alive:
            raise MisuseError("register was called after close")
        self._pages = pages
        self._regions += pages
        self._thread.start()
        self.chunks.start()

    def submit(self, transfer: Transfer) -> bool:
        """Items that name no existing page or slot fail; the rest is queued. O(items)."""
        return self._queue(transfer, moves=True)

    def slots_ready(self, transfer: Transfer) -> bool:
        """Whether the memory of every slot is there already. O(items)."""
        slots = transfer.slots.astype(np.int32)
        return all(
            bool(self.chunks.ready(group, slots[(transfer.groups == group) & (slots >= 0)]).all())
            for group in range(len(self._slots))
        )

    def make_ready(self, transfer: Transfer) -> bool:
        """On the copy thread: getting memory takes its time."""
        return self._queue(transfer, moves=False)

    def _queue(self, transfer: Transfer, *, moves: bool) -> bool:
        if not self._pages:
            raise MisuseError("submit was called before register named the device pages")
        good = self._valid(transfer)
        bad = int(len(good) - good.sum())
        error = f"BadItem: {bad} of {len(good)} items name no page or no slot" if bad else ""
        return self._thread.submit(transfer, self._batches(transfer, good, moves=moves), error)

    def _valid(self, transfer: Transfer) -> NDArray[np.bool_]:
        groups, pages, slots = transfer.groups, transfer.pages, transfer.slots
        good = (groups >= 0) & (groups < len(self._slots)) & (pages >= 0) & (slots >= 0)
        known = np.where(good, groups, 0)
        page_counts = np.array([r.pages for r in self._pages])
        slot_counts = np.array([r.pages for r in self._slots])
        valid: NDArray[np.bool_] = (
            good & (pages < page_counts[known]) & (slots < slot_counts[known])
        )
        if self._named and (transfer.names is None or transfer.names.shape != (len(groups), 64)):
            return np.zeros_like(valid)
        return valid

    def _batches(
        self, transfer: Transfer, good: NDArray[np.bool_], *, moves: bool
    ) -> list[HostBatch]:
        batches = []
        for group, region in enumerate(self._pages):
            rows = np.flatnonzero(good & (transfer.groups == group))
            step = max(1, self._batch_bytes // region.page_bytes)
            for first in range(0, len(rows), step):
                items = rows[first : first + step]
                batches.append(
                    HostBatch(
                        transfer.direction,
                        group,
                        transfer.pages[items],
                        transfer.slots[items].astype(np.int32),
                        None if transfer.names is None else transfer.names[items],
                        items,
                        moves,
                    )
                )
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
