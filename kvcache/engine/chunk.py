"""What a scheduler hands to a runner, and what a runner is. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

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
    following: int = -1
    """The token after the chunk; -1: this step makes it."""
    drafts: int = 0
    """So many guessed tokens after the chunk have pages and states too. For a `Guesser`."""
    guess: int = -1
    """The first of them: what the `Guesser` said when it made the chunk's token."""

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

        Called before anything is read, written or stored that was handed out since. It may call the
        engine (`abort`, `preempt`) once the copies are done.
        """


class Guesses(NamedTuple):
    """What came of one chunk."""

    tokens: NDArray[np.int32]
    """The greedy next token, and one more for each draft that was right, in order."""
    guess: int
    """The draft of the token after those, where the chunk was the last of what is known; or -1."""


@runtime_checkable
class Guesser(Protocol):
    """A runner that guesses tokens with a small model and checks several at once."""

    draft_tokens: int
    """Most drafts of a chunk."""

    def run_guessing(self, chunks: Sequence[Chunk]) -> list[Guesses]:
        """As `run`. Of a chunk with `drafts` it guesses these, the first one is `guess`.

        Pages and states that were granted for wrong guesses may be written, and are read by nobody.
        """

    def clear_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        """Zero pages of a draft group that a hit has no content for."""
