"""The moving side of a disk tier: files to pages and pages to files, on one copy thread."""

from __future__ import annotations

import errno
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from kvcache.connectors.disk_board import RECORDS, Change
from kvcache.connectors.disk_folder import DiskFolder
from kvcache.connectors.disk_news import DiskNews
from kvcache.connectors.region_copy import PageStage
from kvcache.connectors.settings import require_regions
from kvcache.connectors.slots_aside import NO_SPACE
from kvcache.core.errors import MisuseError
from kvcache.core.page_files import PageFault

CLOSE_SECONDS = 5.0

LOOK_SECONDS = 0.2
"""How often an idle thread looks what other processes did."""

CHECK_SECONDS = 1.0
"""How often it is looked whether somebody removed the folder."""

LIST_SECONDS = 60.0
"""How often at most all files are listed, as news were missed. About 10 us a file, in pieces: """

BUSY_SECONDS = 0.002
"""... beside each batch for so long, ..."""

IDLE_SECONDS = 0.02
"""... else at each look; so long a transfer that comes may wait."""

LISTED_FILES = 1024
"""Told at once: so many the scheduler's side takes up in its next call."""

LATEST = 1 << 62
"""Nanoseconds since 1970 of the year 2116: files that are said to be younger have no time to go by."""

_FAULTS: dict[int, tuple[str, str]] = {
    PageFault.LENGTH: ("Truncated", "are cut short"),
    PageFault.HEAD: ("OtherPage", "are of another page, layout or version"),
    PageFault.CHECKSUM: ("Damaged", "changed since they were written"),
    errno.ENOENT: ("Missing", "are not there"),
}
"""Of files that are read: kind of the error, and what it is."""

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
"""Errors that say nothing of the file."""


_NO_FILE = {errno.EISDIR, errno.ENOTDIR}
"""Of files that are to be removed: something else is in their place, and not ours."""

UNTOLD = "Untold"
"""Kind of error of a store that would go beyond the bound: a process that stands still keeps the board."""

MAX_STUCK = 256
"""Pieces of what could not be removed that are remembered; more the next start finds."""


class _Batch(NamedTuple):
    direction: Direction
    group: int
    region: PageRegion
    names: NDArray[np.uint8]
    pages: NDArray[np.int32]
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
        newest: time of the youngest file. What is stored now is younger, also when the clock was
            set back since.
        most_untold: files that may be stored, and a batch more, while others cannot be told of them.
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
        newest: int = 0,
        most_untold: int = 0,
    ) -> None:
        self._groups = tuple(groups)
        self._page_bytes = tuple(page_bytes)
        self._batch_bytes = batch_bytes
        self._pages: tuple[PageRegion, ...] = ()
        self._last_time = min(newest, LATEST)
        mover = _Mover(folder, news, self._page_bytes, most_untold)
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

    def at_end(self, call: Callable[[], None]) -> bool:
        """True: the copy thread calls it, as the last that it does."""
        return self._thread.at_end(call)

    def register(self, regions: Sequence[PageRegion]) -> None:
        """Names the device pages, which are host memory; starts the copy thread."""
        if self._pages:
            raise MisuseError("register was called twice: a worker serves one set of device pages")
        pages = require_regions(self._groups, self._page_bytes, regions, parts=True)
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
                batches.append(
                    _Batch(
                        transfer.direction,
                        group,
                        region,
                        transfer.names[items],
                        transfer.pages[items],
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

    def stop(self) -> None:
        """Ends what is queued."""
        self._thread.stop()

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

    def __init__(
        self, folder: DiskFolder, news: DiskNews, page_bytes: Sequence[int], most_untold: int
    ) -> None:
        self._folder = folder
        self._news = news
        self._page_bytes = page_bytes
        self._most_untold = min(most_untold, RECORDS // 4)
        self._checked = time.monotonic()
        self._missed, self._listed = False, -math.inf
        self._listing: Iterator[None] = iter(())
        self._stuck: list[tuple[int, NDArray[np.uint8]]] = []
        self._stage = PageStage()

    def move(self, batch: _Batch) -> Moved:
        """One batch; first what makes room for it."""
        self._attend(BUSY_SECONDS)
        load = batch.direction is Direction.LOAD
        untold = self._folder.board.untold_files
        if untold > self._most_untold and not load:
            nothing = np.zeros(len(batch.items), np.bool_)
            return Moved(0, nothing, error=f"{UNTOLD}: others do not know of {untold} files yet")
        moved = self._folder.read if load else self._folder.write
        addresses = self._stage.addresses(batch.region, batch.pages, filled=not load)
        outcomes = moved(batch.group, batch.names, addresses, batch.times)
        ok = outcomes == 0
        if load:
            self._stage.scatter(batch.region, batch.pages, ok)
        change = Change.USED if load else Change.STORED
        self._folder.board.post(change, batch.group, batch.names[ok])
        if self._stuck and not load:
            self._keep(batch.group, batch.names[ok])
        gone = ~ok & ~np.isin(outcomes, list(_PASSING)) if load else np.zeros_like(ok)
        # What is not there may be stored anew by another process right now.
        self._drop(batch.group, batch.names[gone & (outcomes != errno.ENOENT)])
        bytes_ = int(ok.sum()) * self._page_bytes[batch.group]
        return Moved(bytes_, ok, gone, _error(outcomes, _FAULTS if load else {}))

    def attend(self) -> None:
        """Remove what is to be removed, hear what others did."""
        self._attend(IDLE_SECONDS)

    def _attend(self, seconds: float) -> None:
        now = time.monotonic()
        if now >= self._checked + CHECK_SECONDS:
            self._checked = now
            self._missed |= self._folder.renew()
            self._missed |= self._folder.bury()
            stuck, self._stuck = self._stuck, []
            for group, names in stuck:
                self._drop(group, names)
        for group, names in self._news.discarded():
            self._drop(group, names)
        if self._news.attentive:
            seen = self._folder.board.look()
            self._news.tell(self._still_so(seen.records))
            self._missed |= seen.missed
            if self._missed and now >= self._listed + LIST_SECONDS:
                self._listing, self._missed, self._listed = self._list(), False, now
            self._go_on(now + seconds)

    def _still_so(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """Without what is told as removed and is there, as it was stored anew since."""
        keep = np.ones(len(records), np.bool_)
        for group in range(len(self._page_bytes)):
            rows = np.flatnonzero((records["kind"] == Change.REMOVED) & (records["group"] == group))
            keep[rows] = self._folder.absent(group, records["name"][rows])
        return records[keep]

    def _go_on(self, end: float) -> None:
        """With the listing, if there is one."""
        try:
            for _ in self._listing:
                if time.monotonic() >= end:
                    break
        except OSError:  # the folder was removed again
            self._missed = True

    def _list(self) -> Iterator[None]:
        """Tell what there is, file by file: what nobody knows of, nobody removes."""
        for group in range(len(self._page_bytes)):
            names = (yield from self._folder.scanning(group)).names
            for first in range(0, len(names), LISTED_FILES):
                piece = names[first : first + LISTED_FILES]
                self._news.list(group, piece[~self._folder.absent(group, piece)])
                yield

    def _drop(self, group: int, names: NDArray[np.uint8]) -> None:
        """Remove files. What cannot be removed now is tried again: else nobody would know of it."""
        if len(names):
            outcomes = self._folder.remove(group, names)
            self._folder.board.post(Change.REMOVED, group, names[outcomes == 0])
            stuck = names[(outcomes != 0) & ~np.isin(outcomes, list(_NO_FILE))]
            if len(stuck) and len(self._stuck) < MAX_STUCK:
                self._stuck.append((group, stuck))

    def _keep(self, group: int, names: NDArray[np.uint8]) -> None:
        """What could not be removed, and was stored anew since, is not to be removed any more."""
        new = {name.tobytes() for name in names}
        self._stuck = [
            (of, old if of != group else old[[row.tobytes() not in new for row in old]])
            for of, old in self._stuck
        ]

    def close(self) -> None:
        """Remove what is left to remove; let go of the folder."""
        for group, names in self._news.discarded():
            self._drop(group, names)
        self._folder.close()
        self._stage.close()


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
