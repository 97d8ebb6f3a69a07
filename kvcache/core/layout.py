"""Geometry of a model's KV cache: groups, hash unit, hit grid, bytes. All byte arithmetic is here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcache.core.errors import ConfigError
from kvcache.core.specs import FullAttention, GroupSpec, RecurrentState

MAX_GRID_TOKENS = 2**31


@dataclass(frozen=True)
class Geometry:
    """The groups of one model, in a fixed order: the index of a group is its id everywhere.

    `hash_unit_tokens` is the span of one link of the hash chain; `grid_tokens` the positions at
    which a hit may end. Both follow from the attention groups' block sizes (gcd and lcm); with
    recurrent groups only, `state_grid_tokens` sets them.
    """

    groups: tuple[GroupSpec, ...]
    state_grid_tokens: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple):
            raise ConfigError(
                f"Geometry.groups is a {type(self.groups).__name__}: give a tuple of group specs"
            )
        if not self.groups:
            raise ConfigError("Geometry.groups is empty: a model has at least one cache group")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"Geometry.groups has two groups of one name: {names}")
        for group in self.groups:
            if not isinstance(group, FullAttention | RecurrentState):
                raise ConfigError(
                    f"group {group.name!r} is a {type(group).__name__}: supported kinds are"
                    " FullAttention and RecurrentState"
                )
        if self.state_grid_tokens < 1:
            raise ConfigError(
                f"Geometry.state_grid_tokens is {self.state_grid_tokens}: it must be above 0"
            )
        if self.grid_tokens >= MAX_GRID_TOKENS:
            raise ConfigError(
                f"the hit grid would be {self.grid_tokens} tokens (the least common multiple of the"
                f" groups' block_tokens): it must be below {MAX_GRID_TOKENS}"
            )

    @cached_property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens per page of each group; for a recurrent group the grid of its snapshots."""
        return tuple(
            g.block_tokens if isinstance(g, FullAttention) else self.grid_tokens
            for g in self.groups
        )

    @cached_property
    def _attention_blocks(self) -> list[int]:
        return [g.block_tokens for g in self.groups if isinstance(g, FullAttention)]

    @cached_property
    def hash_unit_tokens(self) -> int:
        """Tokens that one link of the hash chain covers."""
        return (
            math.gcd(*self._attention_blocks) if self._attention_blocks else self.state_grid_tokens
        )

    @cached_property
    def grid_tokens(self) -> int:
        """Hits end on multiples of this."""
        return (
            math.lcm(*self._attention_blocks) if self._attention_blocks else self.state_grid_tokens
        )

    def pages_needed(self, tokens: int) -> tuple[int, ...]:
        """Pages of each group with which one request of `tokens` tokens can always go on.

        Attention: every block. Recurrent: two (the newest snapshot and the working state); a grant
        that passes more states at once takes more pages, and ends sooner where there are none.
        """
        return tuple(
            -(-tokens // g.block_tokens) if isinstance(g, FullAttention) else 2 for g in self.groups
        )

    def pool_bytes(self, pages: Sequence[int]) -> int:
        """Bytes of a pool with `pages[g]` pages of group g."""
        return sum(n * g.page_bytes for n, g in zip(pages, self.groups, strict=True))
