"""A batch of pages cut into parts, each for a thread of its own. For calls that let the GIL go."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

R = TypeVar("R")


class CopyThreads:
    """So many threads, which wait between two batches. One thread: the caller's, and no other."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "kvcache-part") if threads > 1 else None

    def run(self, call: Callable[..., R], *arrays: NDArray[Any]) -> list[R]:
        """`call` with the same rows of each array, for all rows; its results in their order.

        Returns when all have ended; an exception is that of the first part that raised one.
        """
        count = min(self._threads, len(arrays[0]))
        if self._pool is None or count < 2:
            return [call(*arrays)]
        parts = [np.array_split(array, count) for array in arrays]
        futures = [self._pool.submit(call, *rows) for rows in zip(*parts, strict=True)]
        for future in futures:
            future.exception()  # none may still copy when this one returns
        return [future.result() for future in futures]

    def close(self) -> None:
        """The threads end."""
        if self._pool is not None:
            self._pool.shutdown()
