"""The moving side of a disk tier: files to pages and pages to files, on one copy thread."""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import (
    Direction,
    PageRegion,
    TierWorker,
    Transfer,
    TransferResult,
)
from kvcache.connectors.copy_thread import CopyThread, Moved
from kvcache.connectors.disk_board import Change
from kvcache.connectors.disk_folder import DiskFolder
from kvcache.connectors.disk_news import DiskNews
from kvcache.connectors.settings import require_regions
from kvcache.connectors.slots_aside import NO_SPACE
from kvcache.core.errors import MisuseError
from kvcache.core.page_files import PageFault

CLOSE_SECONDS = 5.0

LOOK_SECONDS = 0.2
"""How often an idle thread looks what other processes did."""

_FAULTS: dict[int, tuple[str, str]] = {
    PageFault.LENGTH: ("Truncated", "are cut short"),
    PageFault.HEAD: ("OtherPage", "are of another page, layout or version"),
    PageFault.CHECKSUM: ("Damaged", "changed since they were written"),
    errno.ENOENT: ("Missing", "are not there"),
}
"""Of files that are read: kind of the error, and what it is."""

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
"""Errors that say nothing of the file."""


class _Batch(NamedTuple):
    direction: Direction
    group: int
    names: NDArray[np.uint8]
    addresses: NDArray[np.uint64]
    times: NDArray[np.int64]
    items: NDArray[np.intp]


class DiskWorker(TierWorker):
    """Cuts transfers into batches of files and lets the copy thread run them.

    Args:
        folder: closed when the thread has ended, by `close` or otherwise.
        news: where it meets the scheduler's side.
        groups: names of the geometry's groups, for messages.
        page_bytes: of each group.
        batch_bytes: moved between two looks at queue and deadline.
    """

    def __init__(
        self,
        folder: DiskFolder,
        news: DiskNews,
        *,
        groups: Sequence[str],
        page_bytes: Sequence[int],
        queue_depth: int,
        batch_bytes: int,
    ) -> None:
        self._groups = tuple(groups)
        self._page_bytes = tuple(page_bytes)
        self._batch_bytes = batch_bytes
        self._pages: tuple[PageRegion, ...] = ()
        self._last_time = 0
        mover = _Mover(folder, news, self._page_bytes)
        self._thread = CopyThread(
            mover.move,
            queue_depth=queue_depth,
            on_exit=mover.close,
            on_idle=mover.attend,
            idle_seconds=LOOK_SECONDS,
        )
        # Also at interpreter exit: a thread must not use memory that is being torn down.
        self._closing = weakref.finalize(self, self._thread.close, CLOSE_SECONDS)

    def notify(self, call: Callable[[], None]) -> bool:
        """True: the copy thread calls it."""
        return self._thread.notify(call)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages, which are host memory; starts the copy thread."""
        if self._pages:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        pages = require_regions(self._groups, self._page_bytes, regions)
        if not self._closing.alive:
            raise MisuseError("register was called after close")
        self._pages = pages
        self._thread.start()

    def submit(self, transfer: Transfer) -> bool:
        """Items that name no existing page, slot or file fail; the rest is queued. O(items)."""
        if not self._pages:
            raise MisuseError("submit was called before register named the device pages")
        good = self._valid(transfer)
        bad = int(len(good) - good.sum())
        error = f"BadItem: {bad} of {len(good)} items name no page or no file" if bad else ""
        return self._thread.submit(transfer, self._batches(transfer, good), error)

    def _valid(self, transfer: Transfer) -> NDArray[np.bool_]:
        groups, pages = transfer.groups, transfer.pages
        good = (groups >= 0) & (groups < len(self._pages)) & (pages >= 0) & (transfer.slots >= 0)
        known = np.where(good, groups, 0)
        valid: NDArray[np.bool_] = good & (pages < np.array([r.pages for r in self._pages])[known])
        if transfer.names is None or transfer.names.shape != (len(groups), 64):
            return np.zeros_like(valid)
        return valid

    def _batches(self, transfer: Transfer, good: NDArray[np.bool_]) -> list[_Batch]:
        # Of one transfer, the head of a prefix is the youngest: after a restart its tail goes first.
        self._last_time = max(self._last_time + len(good), time.time_ns())
        times = self._last_time - np.arange(len(good))
        batches = []
        for group, region in enumerate(self._pages):
            rows = np.flatnonzero(good & (transfer.groups == group))
            step = max(1, self._batch_bytes // region.page_bytes)
            for first in range(0, len(rows), step):
                items = rows[first : first + step]
                assert transfer.names is not None
                addresses = region.address + transfer.pages[items].astype(np.uint64) * np.uint64(
                    region.step_bytes
                )
                batches.append(
                    _Batch(
                        transfer.direction,
                        group,
                        transfer.names[items],
                        addresses,
                        times[items],
                        items,
                    )
                )
        return batches

    def poll(self) -> list[TransferResult]:
        """Results since the last call."""
        return self._thread.poll()

    def wait(self, timeout_seconds: float) -> bool:
        """Until there is a result, or the time is over."""
        return self._thread.wait(timeout_seconds)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """Ends every transfer; `poll` still gives their results.

        False: a read or write did not end in time; the folder stays locked until it does.
        """
        closed = self._thread.close(timeout_seconds)
        if closed:
            self._closing.detach()
        return closed


class _Mover:
    """What the copy thread does. It knows nothing of the worker, which may be gone before it."""

    def __init__(self, folder: DiskFolder, news: DiskNews, page_bytes: Sequence[int]) -> None:
        self._folder = folder
        self._board = folder.board
        self._news = news
        self._page_bytes = page_bytes

    def move(self, batch: _Batch) -> Moved:
        """One batch; first what makes room for it."""
        self.attend()
        load = batch.direction is Direction.LOAD
        moved = self._folder.read if load else self._folder.write
        outcomes = moved(batch.group, batch.names, batch.addresses, batch.times)
        ok = outcomes == 0
        self._board.post(Change.USED if load else Change.STORED, batch.group, batch.names[ok])
        gone = ~ok & ~np.isin(outcomes, list(_PASSING)) if load else np.zeros_like(ok)
        # What is not there may be stored anew by another process right now.
        self._drop(batch.group, batch.names[gone & (outcomes != errno.ENOENT)])
        bytes_ = int(ok.sum()) * self._page_bytes[batch.group]
        return Moved(bytes_, ok, gone, _error(outcomes, _FAULTS if load else {}))

    def attend(self) -> None:
        """Remove what is to be removed, hear what others did."""
        for group, names in self._news.discarded():
            self._drop(group, names)
        if self._news.attentive:
            self._news.tell(self._board.look())

    def _drop(self, group: int, names: NDArray[np.uint8]) -> None:
        if len(names):
            self._folder.remove(group, names)
            self._board.post(Change.REMOVED, group, names)

    def close(self) -> None:
        """Remove what is left to remove; let go of the folder."""
        for group, names in self._news.discarded():
            self._drop(group, names)
        self._folder.close()


def _error(outcomes: NDArray[np.int32], faults: dict[int, tuple[str, str]]) -> str:
    """What went wrong, the most frequent first; empty: nothing."""
    kinds = Counter(outcomes[outcomes != 0].tolist()).most_common()
    described = ((*_described(outcome, faults), count) for outcome, count in kinds)
    return "; ".join(
        f"{kind}: {count} of {len(outcomes)} files {what}" for kind, what, count in described
    )


def _described(outcome: int, faults: dict[int, tuple[str, str]]) -> tuple[str, str]:
    if outcome in faults:
        return faults[outcome]
    text = os.strerror(outcome)
    if outcome in {errno.ENOSPC, errno.EDQUOT}:
        return NO_SPACE, f"found no room ({text})"
    return errno.errorcode.get(outcome, "OSError"), f"failed ({text})"
