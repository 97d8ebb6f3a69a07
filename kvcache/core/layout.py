"""Geometry of a model's KV cache: groups, hash unit, hit grid, slabs, bytes. All byte arithmetic is here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcache.core.errors import ConfigError
from kvcache.core.slabs import SlabPlan, plan_slabs
from kvcache.core.specs.base import GroupRules, GroupSpec, require_positive
from kvcache.core.values import sequence, shown, whole

MAX_GRID_TOKENS = 2**31
MAX_GROUPS = 64
MAX_PAGE_BYTES = 2**42


@dataclass(frozen=True)
class Geometry:
    """The groups of one model, in a fixed order: the index of a group is its id everywhere.

    Three sizes in tokens follow from the groups. `grid_tokens`: where a hit may end.
    `hash_unit_tokens`: the span of one link of the hash chain. `block_tokens[g]`: the span of a
    page of group g. With recurrent (and private) groups only, `state_grid_tokens` sets the first
    two.

    The arena is made of slabs of `slab_bytes`. Groups belong to size classes; a slab that belongs
    to class c holds `pages_per_slab[c]` pages, so that page p of the class begins at byte
    `p * stride_bytes[c]` of the arena. Strides are multiples of `page_alignment_bytes` (a power of
    two), unless pages are so small that this would cost more than 2 percent.
    """

    groups: tuple[GroupSpec, ...]
    state_grid_tokens: int = 16
    page_alignment_bytes: int = 256

    def __post_init__(self) -> None:
        _check_groups(self.groups)
        require_positive(self, "state_grid_tokens", "page_alignment_bytes")
        if self.page_alignment_bytes & (self.page_alignment_bytes - 1):
            raise ConfigError(
                f"Geometry.page_alignment_bytes is {self.page_alignment_bytes}: it must be a power"
                " of two"
            )
        if self.grid_tokens >= MAX_GRID_TOKENS:
            raise ConfigError(
                f"the hit grid would be {self.grid_tokens} tokens (the least common multiple of the"
                f" groups' block_tokens): it must be below {MAX_GRID_TOKENS}"
            )

    # ---- tokens

    @cached_property
    def rules(self) -> tuple[GroupRules, ...]:
        """Each group as the block manager sees it."""
        return tuple(g.rules for g in self.groups)

    @cached_property
    def grid_tokens(self) -> int:
        """Hits end on multiples of this: the lcm of the blocks of all groups that have blocks."""
        blocks = [r.block_tokens for r in self.rules if r.block_tokens]
        return math.lcm(*blocks) if blocks else self.state_grid_tokens

    @cached_property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens per page of each group; for a state the grid of its snapshots, for private 0."""
        return tuple(self.grid_tokens if r.kind == "state" else r.block_tokens for r in self.rules)

    @cached_property
    def hash_unit_tokens(self) -> int:
        """Tokens that one link of the hash chain covers.

        The gcd of the full groups' blocks, lowered until every block divides it or is a multiple.
        Blocks smaller than the unit share its digest, told apart by their index in it.
        """
        full = [r.block_tokens for r in self.rules if r.kind == "full"]
        unit = math.gcd(*full) if full else self.grid_tokens
        blocks = [r.block_tokens for r in self.rules if r.block_tokens]
        while odd := [b for b in blocks if unit % b and b % unit]:
            unit = math.gcd(unit, *odd)
        return unit

    # ---- bytes

    @cached_property
    def _slabs(self) -> SlabPlan:
        return plan_slabs(
            [g.page_bytes for g in self.groups],
            [g.alignment_bytes for g in self.groups],
            self.page_alignment_bytes,
        )

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab of the arena."""
        return self._slabs.slab_bytes

    @property
    def pages_per_slab(self) -> tuple[int, ...]:
        """Pages of each size class that a slab holds."""
        return self._slabs.pages_per_slab

    @property
    def stride_bytes(self) -> tuple[int, ...]:
        """Bytes from a page of each size class to the next; times pages per slab: a slab."""
        return self._slabs.stride_bytes

    @property
    def class_of_group(self) -> tuple[int, ...]:
        """Size class of each group."""
        return self._slabs.class_of_group

    def padding(self) -> tuple[float, ...]:
        """Share of each group's memory that no page uses: at most 0.05 wherever a slab allows."""
        return tuple(
            1 - g.page_bytes / self.stride_bytes[c]
            for g, c in zip(self.groups, self.class_of_group, strict=True)
        )

    def slabs_in(self, arena_bytes: int) -> int:
        """Slabs of an arena of at most `arena_bytes`; 0 where not even one fits."""
        return whole(arena_bytes, "arena_bytes", least=0) // self.slab_bytes

    def slabs_needed(self, tokens: int) -> int:
        """Slabs with which one request of `tokens` tokens can always go on: the smallest arena."""
        of_class = [0] * len(self.pages_per_slab)
        for pages, c in zip(self.pages_needed(tokens), self.class_of_group, strict=True):
            of_class[c] += pages
        return sum(-(-n // k) for n, k in zip(of_class, self.pages_per_slab, strict=True))

    def pages_needed(self, tokens: int) -> tuple[int, ...]:
        """Most pages of each group that one request of `tokens` tokens must hold at one time.

        Full: every block. Span: what the last grid point behind the request needs, and a grid unit
        of new blocks; transient ones: what that point and the next token need. State: the newest
        snapshot, the working state, and the speculative ones.
        A grant that passes more at once takes more pages, and ends sooner where there are none.
        """
        tokens = whole(tokens, "tokens", least=0)
        return tuple(_pages_needed(r, tokens, self.grid_tokens) for r in self.rules)

    def pool_bytes(self, pages: Sequence[int]) -> int:
        """Bytes of pools of their own with `pages[g]` pages of group g, padding apart."""
        counts = sequence(pages, "pages")
        if len(counts) != len(self.groups):
            raise ConfigError(
                f"pages has {len(counts)} numbers for {len(self.groups)} groups: give one each"
            )
        return sum(
            whole(n, f"pages of group {g.name!r}", least=0) * g.page_bytes
            for n, g in zip(counts, self.groups, strict=True)
        )


def _pages_needed(rules: GroupRules, tokens: int, grid_tokens: int) -> int:
    if rules.kind == "private":
        return rules.request_pages
    if rules.kind == "state":
        return 2 + rules.request_pages
    block = rules.block_tokens
    every = -(-tokens // block)
    if rules.kind == "full":
        return every
    # Held: from need_begin(G) on, G the last grid point. G lies up to chunk - gcd(chunk, grid)
    # tokens behind the start of its chunk; the request may be a grid unit beyond G.
    behind = rules.chunk_tokens - math.gcd(rules.chunk_tokens, grid_tokens)
    lead = -(-rules.lead_tokens // block)
    held = lead + (behind + grid_tokens) // block
    if rules.transient:  # what G needs, and what the next token does
        held = min(held, 2 * lead + (behind + rules.chunk_tokens) // block)
    return min(every, held)


def _check_groups(groups: tuple[GroupSpec, ...]) -> None:
    if not isinstance(groups, tuple):
        raise ConfigError(
            f"Geometry.groups is a {type(groups).__name__}: give a tuple of group specs"
        )
    if not groups:
        raise ConfigError("Geometry.groups is empty: a model has at least one cache group")
    if len(groups) > MAX_GROUPS:
        raise ConfigError(
            f"Geometry.groups has {len(groups)} groups, at most {MAX_GROUPS} are supported: layers"
            " with equal rules belong into one group"
        )
    for group in groups:
        if not isinstance(getattr(group, "rules", None), GroupRules):
            raise ConfigError(
                f"Geometry.groups has a {type(group).__name__}: give group specs, such as those of"
                " kvcache.core.specs"
            )
        _check_group(group)
    names = [g.name for g in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"Geometry.groups has two groups of one name: {names}")


def _check_group(group: GroupSpec) -> None:
    rules = group.rules
    name: object = group.name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a group's name is {name!r}: give a text")
    if rules.kind not in {"full", "span", "state", "private"}:
        raise ConfigError(f"group {name!r} has rules of kind {rules.kind!r}: there is none such")
    for field, value in zip(rules._fields[2:], rules[2:], strict=True):  # the grid bounds blocks
        if not 0 <= value < MAX_GRID_TOKENS:
            raise ConfigError(
                f"group {name!r} has {field} {value}: it must be 0 or more and below"
                f" {MAX_GRID_TOKENS}"
            )
    paged = rules.kind in {"full", "span"}
    if rules.block_tokens < 0 or paged != bool(rules.block_tokens):
        raise ConfigError(
            f"group {name!r} is of kind {rules.kind!r} and has blocks of {rules.block_tokens}"
            " tokens: full and span groups have blocks, the others have none"
        )
    fits = rules.chunk_tokens == 1 or (paged and rules.chunk_tokens % rules.block_tokens == 0)
    if rules.chunk_tokens < 1 or not fits:
        raise ConfigError(
            f"group {name!r} has chunks of {rules.chunk_tokens} tokens and blocks of"
            f" {rules.block_tokens}: block_tokens must divide the chunk"
        )
    if rules.transient and (rules.kind != "span" or rules.chunk_tokens == 1):
        raise ConfigError(
            f"group {name!r} is transient: that is for spans with chunks, whose finished chunks are"
            " not read"
        )
    if not 1 <= group.page_bytes <= MAX_PAGE_BYTES:
        raise ConfigError(
            f"group {name!r} has pages of {group.page_bytes} bytes: they must have between 1 and"
            f" {MAX_PAGE_BYTES}"
        )


def require_geometry(value: object) -> None:
    """`ConfigError` unless it is a `Geometry`."""
    if not isinstance(value, Geometry):
        raise ConfigError(f"geometry is {shown(value)}: give a Geometry")
