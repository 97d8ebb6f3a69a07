"""One turn of the demo, whoever played it."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.engine.request import Usage


class Turn(NamedTuple):
    """One request and what became of it."""

    session: int
    number: int
    shared_tokens: int
    """Of the prompt: computed by the turn before. 0 for a first turn."""
    usage: Usage
    first_token_seconds: float
    output: list[int]
    gaps: list[float]
    """For each output token, by how much its logit beat the second best."""

    @property
    def recomputed_tokens(self) -> int:
        """Computed by an earlier turn, and now again."""
        return max(0, self.shared_tokens - self.usage.cached_tokens)
