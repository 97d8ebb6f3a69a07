"""What a scheduler hands to a runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.core.records import StatePlan


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens `[start, start + len(tokens))` of one request, to be computed in this step."""

    tokens: NDArray[np.int32]
    start: int
    tables: Sequence[NDArray[np.int32] | None]
    """For each attention group the request's pages, at least up to the chunk's end; else None."""
    states: Sequence[StatePlan | None]
    """For each recurrent group where the state comes from and goes; None for attention."""

    @property
    def end(self) -> int:
        """One past the last token: the length of the context that the last token sees."""
        return self.start + len(self.tokens)
