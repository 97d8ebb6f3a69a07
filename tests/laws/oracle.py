"""What must be a hit, computed slowly: sets of prefixes, one per group. No hashing, no pages.

A prefix is `(space, tokens)`: the space names who may share (native or foreign keys, salt).
Attention blocks are filed under the prefix that ends with the block, states under the prefix that
they summarise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache import FullAttention, Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.retention import Dense, Sparse

Space = tuple[str, str]
Prefix = tuple[Space, tuple[int, ...]]
Keys = Sequence[set[Prefix]]
"""For each group, the prefixes that have a key."""


class Walk(NamedTuple):
    """The longest common hit, and the longest that attention alone would serve."""

    hit: int
    attention: int


class Oracle:
    """Rules of a hit for one geometry."""

    def __init__(self, geometry: Geometry) -> None:
        self.grid = geometry.grid_tokens
        self.blocks = geometry.block_tokens
        self.is_attention = [isinstance(g, FullAttention) for g in geometry.groups]

    def limit(self, tokens: int) -> int:
        """The last token is always recomputed, and hits end on the grid."""
        return max(tokens - 1, 0) // self.grid * self.grid

    def needs(self, group: int, end: int) -> list[int]:
        """Where the pages end that a hit of `end` tokens reads in a group."""
        if self.is_attention[group]:
            return list(range(self.blocks[group], end + 1, self.blocks[group]))
        return [end] if end else []

    def serves(self, group: int, keys: Keys, space: Space, tokens: Sequence[int], end: int) -> bool:
        return all((space, tuple(tokens[:e])) in keys[group] for e in self.needs(group, end))

    def walk(
        self, space: Space, tokens: Sequence[int], keys: Keys, key_limit: int | None = None
    ) -> Walk:
        """Brute force over every grid point, from the right.

        `key_limit`: the request brings no keys for positions beyond (foreign keys).
        """

        def longest(groups: list[int]) -> int:
            last = self.limit(len(tokens))
            if key_limit is not None:
                last = min(last, key_limit // self.grid * self.grid)
            ends = range(last, 0, -self.grid)
            good = (e for e in ends if all(self.serves(g, keys, space, tokens, e) for g in groups))
            return next(good, 0)

        everyone = list(range(len(self.blocks)))
        return Walk(longest(everyone), longest([g for g in everyone if self.is_attention[g]]))

    def kept(
        self, policy: RetentionPolicy, prompt: int, marks: Sequence[int], start: int, end: int
    ) -> list[int]:
        """States in (start, end] that a policy keeps: by interval, replay boundary, marks."""
        interval = self.grid if isinstance(policy, Dense) else 0
        points: set[int] = set()
        if isinstance(policy, Sparse):
            interval = policy.interval_tokens
            floors = {mark // self.grid * self.grid for mark in marks}
            points = {self.limit(prompt), *(p for p in floors if p <= prompt)}
        if interval:
            points |= set(range(interval, end + 1, interval))
        return sorted(p for p in points if start < p <= end)
