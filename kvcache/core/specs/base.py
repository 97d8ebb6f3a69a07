"""What every kind of attention group has in common: its rules for the block manager, and its bytes."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from kvcache.core.errors import ConfigError
from kvcache.core.values import shown


class GroupRules(NamedTuple):
    """All that the block manager has to know of a group. Sizes in bytes are not among it.

    `kind` says what a hit that ends at position H needs of the group:

    | kind | a page is | needed at H |
    |---|---|---|
    | full | `block_tokens` tokens | every block of [0, H) |
    | span | `block_tokens` tokens | every block that overlaps [need_begin(H), H) |
    | state | the whole state after some position | the state after H tokens |
    | private | memory of one request | nothing: never cached |
    """

    kind: Literal["full", "span", "state", "private"]
    block_tokens: int = 0
    """Tokens that one page spans, over all ranks; 0 where a page is not a span of tokens."""
    chunk_tokens: int = 1
    """Of a span: positions are rounded down to a multiple of this first."""
    lead_tokens: int = 0
    """Of a span: tokens needed before that multiple."""
    request_pages: int = 0
    """Private: pages of a request. State: pages beyond the two that every request has."""
    lookahead_tokens: int = 0
    """Above 0: a draft group; its K and V at a token depend on as many tokens after it."""
    transient: bool = False
    """Of a span with chunks: a step has the rows that it writes at hand, only later ones read pages.

    So a grant gives pages only to what is read at a kept position, at its last grid point, or at
    its end; `Manager.block_table` has -1 for the other blocks, whose rows are never stored.
    """

    def need_begin(self, position: int) -> int:
        """First token that a query or a hit at `position` reads of a span group."""
        return max(0, position // self.chunk_tokens * self.chunk_tokens - self.lead_tokens)


class GroupSpec(Protocol):
    """One group of layers that share a page size and a block table. Immutable.

    Bytes are those of one rank: with tensor parallelism give the heads of one rank.
    """

    @property
    def name(self) -> str:
        """Name of the group, unique in a geometry."""

    @property
    def kind(self) -> str:
        """What cache events call the group; vLLM's word where it has one."""

    @property
    def window_tokens(self) -> int | None:
        """What cache events call the group's window, in tokens; None where vLLM tells none."""

    @property
    def layers(self) -> int:
        """Number of model layers in the group."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers of the group, contiguous."""

    @property
    def alignment_bytes(self) -> int:
        """Pages must start at multiples of this; 1 where kernels do not care."""

    @property
    def rules(self) -> GroupRules:
        """The group as the block manager sees it."""


def require_positive(spec: object, *fields: str) -> None:
    """Raise `ConfigError` unless each named field is an int above zero."""
    for field in fields:
        value = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{type(spec).__name__}.{field} is {shown(value)}: it must be a whole number above 0"
            )


def require_not_negative(spec: object, *fields: str) -> None:
    """Raise `ConfigError` unless each named field is an int of zero or more."""
    for field in fields:
        value = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{type(spec).__name__}.{field} is {shown(value)}: it must be a whole number, 0 or more"
            )


def padded(size_bytes: int, alignment_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes
