"""What a scheduler hands to a runner, and what a runner is. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.layout import Geometry
from kvcache.core.records import StatePlan


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens `[start, start + len(tokens))` of one request, to be computed in this step."""

    tokens: NDArray[np.int32]
    start: int
    tables: Sequence[NDArray[np.int32] | None]
    """For each group with blocks the request's pages, at least up to the chunk's end; else None.
    Of a span what lies before the first token that the chunk reads is no page of the request."""
    states: Sequence[StatePlan | None]
    """For each recurrent group where the state comes from and goes; None for the others."""

    @property
    def end(self) -> int:
        """One past the last token: the length of the context that the last token sees."""
        return self.start + len(self.tokens)


class Runner(Protocol):
    """Computes chunks against page memory that it owns."""

    geometry: Geometry
    vocab_size: int
    context_tokens: int

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        """Compute all chunks of a step.

        Writes the pages that the chunks name for their tokens and states, and no others: a page
        that a chunk only reads may be shared.

        Returns:
            The greedy next token after each chunk's last token.

        Raises:
            InputError: a token or a context out of range; nothing was written.
        """

    def move_pages(self, moves: NDArray[np.void]) -> None:
        """Copy pages that changed their place, in this order: `[n]` of `MOVE_DTYPE`, often none.

        Called before anything is read or written that was handed out since.
        """
