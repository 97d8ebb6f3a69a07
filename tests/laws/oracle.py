"""What must be a hit, computed slowly: sets of keys, one per group. No hashing, no pages.

A key names the tokens that its digest covers and where its block, or its state, ends. For most
groups both are one number. A block smaller than a hash unit is covered by its whole unit; the
block of a draft group by the tokens that its last entry depends on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from laws.prompts import Token

from kvcache import Geometry
from kvcache.core.retain import RetentionPolicy
from kvcache.core.specs.base import GroupRules
from kvcache.retention import Sparse

Space = tuple[str, ...]
"""Who may share: native or foreign keys, salt; and if there are any, adapter, its version, weights."""


class Key(NamedTuple):
    """What a page is found under, in one group."""

    space: Space
    tokens: tuple[Token, ...]
    end: int


Keys = Sequence[set[Key]]
"""For each group, the keys that are there."""


class Walk(NamedTuple):
    """The longest common hit, and the longest that the full groups alone would serve."""

    hit: int
    full: int


class Oracle:
    """Rules of a hit for one geometry. `grid` and `unit` in tokens."""

    def __init__(
        self, rules: Sequence[GroupRules], grid: int, unit: int, names: Sequence[str]
    ) -> None:
        self.rules, self.grid, self.unit, self.names = rules, grid, unit, names
        self.groups = range(len(rules))
        self.blocks = [grid if r.kind == "state" else r.block_tokens for r in rules]
        """Tokens between two places where a page may end; 0 in private groups."""
        self.drafts = [g for g in self.groups if rules[g].lookahead_tokens]
        self.full = self._of("full")
        self.span = self._of("span")
        self.state = self._of("state")
        self.private = self._of("private")
        self.kept_in_part = [g for g in self.groups if rules[g].kind in ("span", "state")]
        """Groups that key only what a policy names and the end of a turn, drafts too."""
        self.tabled = [g for g in self.groups if rules[g].kind in ("full", "span")]
        """Groups with a block table that grows, drafts too."""
        self.transient = [g for g in self.groups if rules[g].transient]
        """Those of them that give pages only to what later steps read."""
        self.whole_grants = bool(self.state or self.transient)
        """What a grant covers is committed, but for its drafts."""

    @classmethod
    def of(cls, geometry: Geometry) -> Oracle:
        names = [group.name for group in geometry.groups]
        return cls(geometry.rules, geometry.grid_tokens, geometry.hash_unit_tokens, names)

    def _of(self, kind: str) -> list[int]:
        return [g for g in self.groups if self.rules[g].kind == kind and g not in self.drafts]

    @property
    def sparse(self) -> list[int]:
        """Groups that keep only what a policy names, and have a say in hits."""
        return [*self.span, *self.state]

    # ---- positions

    def floor(self, tokens: int) -> int:
        return tokens // self.grid * self.grid

    def limit(self, tokens: int) -> int:
        """The last token is always recomputed, and hits end on the grid."""
        return self.floor(max(tokens - 1, 0))

    def begin(self, group: int, at: int) -> int:
        """First token that is read by what follows position `at`."""
        rule = self.rules[group]
        if rule.kind != "span":
            return 0
        return max(0, at // rule.chunk_tokens * rule.chunk_tokens - rule.lead_tokens)

    def first_block(self, group: int, at: int) -> int:
        return self.begin(group, at) // self.blocks[group]

    def needs(self, group: int, at: int) -> list[int]:
        """Where the pages end that what follows grid point `at` reads; drafts as others."""
        rule, block = self.rules[group], self.blocks[group]
        if rule.kind == "state":
            return [at] if at else []
        if rule.kind == "private" or self.begin(group, at) == at:
            return []
        return list(range((self.first_block(group, at) + 1) * block, at + 1, block))

    def blocks_read(self, group: int, at: int) -> set[int]:
        """Blocks of a span that are read by what follows any position `at`."""
        first = self.first_block(group, at)
        return (
            set(range(first, -(-at // self.blocks[group]))) if self.begin(group, at) < at else set()
        )

    # ---- keys

    def covered(self, group: int, end: int) -> int:
        """How many tokens must be known before the block that ends there has a key."""
        return -(-(end + self.rules[group].lookahead_tokens) // self.unit) * self.unit

    def key(
        self,
        group: int,
        space: Space,
        tokens: Sequence[Token],
        end: int,
        key_limit: int | None = None,
    ) -> Key | None:
        """None: not enough tokens are known, or the request brings no key for them."""
        covered = self.covered(group, end)
        known = len(tokens) if key_limit is None else min(key_limit, len(tokens))
        if not 0 < end <= covered <= known:
            return None
        return Key(space, tuple(tokens[:covered]), end)

    def serves(
        self, group: int, keys: Keys, space: Space, tokens: Sequence[Token], at: int
    ) -> bool:
        return all(self.key(group, space, tokens, e) in keys[group] for e in self.needs(group, at))

    def hits(
        self, space: Space, tokens: Sequence[Token], keys: Keys, key_limit: int | None = None
    ) -> list[int]:
        """Every position that all groups can serve, ascending, 0 among them."""
        voters = [*self.full, *self.sparse]
        return self._served(voters, space, tokens, keys, key_limit)

    def walk(
        self, space: Space, tokens: Sequence[Token], keys: Keys, key_limit: int | None = None
    ) -> Walk:
        """Brute force over every grid point. Draft and private groups have no say.

        `key_limit`: the request brings no keys for positions beyond (foreign keys).
        """
        hit = self.hits(space, tokens, keys, key_limit)[-1]
        return Walk(hit, self._served(self.full, space, tokens, keys, key_limit)[-1])

    def _served(
        self,
        groups: Sequence[int],
        space: Space,
        tokens: Sequence[Token],
        keys: Keys,
        key_limit: int | None,
    ) -> list[int]:
        last = self.limit(len(tokens))
        if key_limit is not None:
            last = min(last, self.floor(key_limit))
        points = range(0, last + 1, self.grid)
        return [at for at in points if all(self.serves(g, keys, space, tokens, at) for g in groups)]

    def junction(self, walk: Walk) -> int:
        """Where full groups went on and a sparse one did not."""
        return walk.full if self.full and walk.full > walk.hit else 0

    # ---- retention

    def kept(
        self,
        policy: RetentionPolicy,
        group: int,
        prompt: int,
        marks: Iterable[int],
        start: int,
        end: int,
    ) -> list[int]:
        """Positions in (start, end] that a group keeps: by interval, replay boundary, marks."""
        points = {self.floor(mark) for mark in marks}
        interval = self.grid
        if isinstance(policy, Sparse):
            points.add(self.limit(prompt))
            interval = policy.group_intervals.get(self.names[group], policy.interval_tokens)
        if interval:
            points |= set(range(interval, end + 1, interval))
        return sorted(p for p in points if start < p <= end)

    def keyed(self, group: int, positions: Iterable[int], start: int, end: int) -> set[int]:
        """Ends of what a group keys when a request goes from `start` to `end`.

        Full groups key every block; the sparse ones what a lookup at one of `positions` reads.
        """
        if self.rules[group].kind == "private":
            return set()
        if self.rules[group].kind == "full":
            block = self.blocks[group]
            return set(range(start // block * block + block, end + 1, block))
        return {e for p in positions if start < p <= end for e in self.needs(group, p)}

    # ---- space

    def pages(self, group: int, tokens: int) -> int:
        """Most pages that one request of so many tokens holds at one time, when run alone."""
        rule, block = self.rules[group], self.blocks[group]
        if rule.kind == "private":
            return rule.request_pages
        if rule.kind == "state":
            return 2 + rule.request_pages
        whole = -(-tokens // block)
        if rule.kind == "full":
            return whole
        chunk = rule.chunk_tokens
        inside = (chunk - math.gcd(chunk, self.grid)) // block if chunk > 1 else 0
        lead = -(-rule.lead_tokens // block)
        most = lead + inside + self.grid // block
        if rule.transient:
            most = min(most, 2 * lead + inside + chunk // block)
        return min(whole, most)
