"""The hit rate that no cache can beat: nothing evicted, every state kept, full blocks, last token recomputed.

Computed from block numbers alone, with no part of the block manager, so that the two check each
other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class IdealCache:
    """Remembers every block that it has seen.

    Block numbers are dense from 0 (`TraceRequest.blocks`, or every g-th of them), so one byte for
    each number is enough.

    Args:
        grid_tokens: hits end on multiples of this; a multiple of `block_tokens`, which it is where
            it is not given.
    """

    def __init__(self, block_tokens: int, grid_tokens: int | None = None) -> None:
        self._block_tokens = block_tokens
        self._grid_tokens = block_tokens if grid_tokens is None else grid_tokens
        self._seen = np.zeros(1024, dtype=np.bool_)

    def hit_tokens(self, blocks: NDArray[np.int64], prompt_tokens: int) -> int:
        """Tokens of the longest prefix seen before, without the last token; then remembers all.

        `blocks` has one number for each full block of the prompt.
        """
        if not len(blocks):
            return 0
        self._grow(int(blocks.max()) + 1)
        known = self._seen[blocks]
        run = len(known) if known.all() else int(known.argmin())
        self._seen[blocks] = True
        hit = min(run * self._block_tokens, prompt_tokens - 1)
        return hit // self._grid_tokens * self._grid_tokens

    def _grow(self, size: int) -> None:
        if size > len(self._seen):
            bigger = np.zeros(max(size, 2 * len(self._seen)), dtype=np.bool_)
            bigger[: len(self._seen)] = self._seen
            self._seen = bigger
