"""What a replay looks at beside its requests: moves, peaks, states that got a key, checks."""

from __future__ import annotations

import numpy as np

from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager

_CHECK_PAGES_PER_REQUEST = 1024
_CHECK_PAGES_PER_BLOCK = 1


class Watch:
    """Counts of one manager during a replay.

    A check costs the pages that exist. Each request earns a fixed number of them and one for each
    block it touches: small pools are checked at every request, and all checks together look at a few
    pages for each block of the trace.

    Args:
        checking: whether `check` does anything.

    Attributes:
        moved_pages, moved_bytes: cached pages that changed their place.
        peak_bytes: most bytes of held and cached pages, as far as `peak` was called.
        checks: times that `Manager.check` found nothing.
    """

    def __init__(self, manager: Manager, *, checking: bool) -> None:
        self.moved_pages = 0
        self.moved_bytes = 0
        self.peak_bytes = 0
        self.checks = 0
        self._manager = manager
        self._geometry: Geometry = manager.geometry
        self._strides = np.array(self._geometry.stride_bytes, np.int64)
        self._checking = checking
        self._credit_pages = 0

    def moves(self, moves: np.ndarray) -> None:
        """Pages that the manager moved."""
        if len(moves):
            self.moved_pages += len(moves)
            self.moved_bytes += int(self._strides[moves["size_class"]].sum())

    def peak(self) -> None:
        """Look at the bytes in use."""
        classes = self._manager.arena_stats().classes
        used = sum(
            (size.held + size.cached) * stride
            for size, stride in zip(classes, self._geometry.stride_bytes, strict=True)
        )
        self.peak_bytes = max(self.peak_bytes, used)

    def earn(self, blocks: int) -> bool:
        """A request of so many blocks: check the manager if it was paid for. Whether it was checked."""
        if not self._checking:
            return False
        self._credit_pages += _CHECK_PAGES_PER_REQUEST + _CHECK_PAGES_PER_BLOCK * blocks
        classes = self._manager.arena_stats().classes
        if self._credit_pages < sum(c.free + c.cached + c.held for c in classes):
            return False
        self._credit_pages = 0
        self.check()
        return True

    def check(self) -> None:
        """Check the manager now, if checks are wanted."""
        if self._checking:
            self._manager.check()
            self.checks += 1
