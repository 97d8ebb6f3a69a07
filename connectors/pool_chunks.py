"""Host memory of a pool made ready in chunks: by a thread, from the front, or by who needs one first.

    group 0:  | chunk 0 | chunk 1 | ... |     a chunk = whole slots, about CHUNK_BYTES
    group 1:  | chunk n | ...

A slot may be written when its chunk is ready. Until then nothing of it exists, so that a limit that
was not there at the start is found before memory is touched: the store fails, not the process.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import PageRegion
from kvcache.core import host_memory

CHUNK_BYTES = 32 << 20
"""Some 10 ms: for two of them a store may wait, that which it needs and the one that is begun."""

CLOSE_SECONDS = 10.0


def require_room(size_bytes: int) -> None:
    """`OSError` where the machine, or a control group, does not have so much left now."""
    available, limit = host_memory.available()
    if size_bytes > available:
        raise OSError(errno.ENOMEM, f"{limit} leaves {available} bytes")


class PoolChunks:
    """Chunks of regions, each made ready once. For any threads.

    Args:
        regions: slots of each group.
        make_ready: `(address, bytes)`; `OSError` where it cannot be done now. It may be asked again.
        is_there: `(address, bytes)`: whether another process has made this ready.
    """

    def __init__(
        self,
        regions: Sequence[PageRegion],
        make_ready: Callable[[int, int], None],
        is_there: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        self._regions = tuple(regions)
        self._make_ready, self._is_there = make_ready, is_there
        self._slots = [max(1, CHUNK_BYTES // region.step_bytes) for region in self._regions]
        self._ready = [
            np.zeros(-(-region.pages // slots), np.bool_)
            for region, slots in zip(self._regions, self._slots, strict=True)
        ]
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-prepare", daemon=True)
        self.error = ""
        """Why the thread ended before all was ready. Stores try again then, each for itself.

        In a tier's statistics: `TierStats.not_ready`."""

    @property
    def ready_bytes(self) -> int:
        """So much may be written. All of the pool, in the end."""
        return sum(
            int(ready.sum()) * slots * region.step_bytes
            - (region.step_bytes * (len(ready) * slots - region.pages) if ready[-1] else 0)
            for region, slots, ready in zip(self._regions, self._slots, self._ready, strict=True)
        )

    def ready(self, group: int, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each slot whether it may be written now."""
        flags: NDArray[np.bool_] = self._ready[group][slots // self._slots[group]]
        return flags

    def have_memory(self, group: int, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each slot whether there is memory behind it, ready or not. A system call for each chunk."""
        flags = self._ready[group].copy()
        for chunk in np.unique(slots // self._slots[group]).tolist():
            flags[chunk] = flags[chunk] or self._is_there(*self._range(group, chunk))
        there: NDArray[np.bool_] = flags[slots // self._slots[group]]
        return there

    def _range(self, group: int, chunk: int) -> tuple[int, int]:
        """Address and bytes."""
        region, slots = self._regions[group], self._slots[group]
        first = chunk * slots
        count = min(slots, region.pages - first)
        return region.address + first * region.step_bytes, count * region.step_bytes

    def start(self) -> None:
        """Let the thread begin. Once."""
        self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Until the thread has ended. For tests and benchmarks; an engine need not wait."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def ensure(self, group: int, slots: NDArray[np.int32]) -> tuple[NDArray[np.bool_], str]:
        """For each slot whether it may be written, and why not. Waits for its chunk, and the one before."""
        good, error = self.ready(group, slots), ""
        if good.all():
            return good, error
        for chunk in np.unique(slots[~good] // self._slots[group]).tolist():
            error = self._prepare(group, chunk) or error
        return self.ready(group, slots), error

    def _prepare(self, group: int, chunk: int) -> str:
        """Empty, or why it cannot be."""
        with self._lock:
            if self._ready[group][chunk]:
                return ""
            if self._stop.is_set():
                return "the pool is closed"
            try:
                self._make_ready(*self._range(group, chunk))
            except OSError as fault:
                return fault.strerror or os.strerror(fault.errno or errno.ENOMEM)
            self._ready[group][chunk] = True
        return ""

    def _run(self) -> None:
        try:
            for group, ready in enumerate(self._ready):
                for chunk in range(len(ready)):
                    if self._stop.is_set():
                        return
                    self.error = self._prepare(group, chunk)
                    if self.error:
                        return
        except BaseException as fault:  # noqa: BLE001  (told, and each store finds it for itself)
            self.error = f"{type(fault).__name__}: {fault}"

    def stop(self) -> None:
        """Nothing more is made ready. Waits for nothing."""
        self._stop.set()

    def close(self) -> bool:
        """Nothing is made ready any more. False: something still is; the memory must stay."""
        self.stop()
        if not self.wait(CLOSE_SECONDS):
            return False
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            return False
        self._lock.release()
        return True
