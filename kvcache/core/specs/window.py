"""Sliding-window attention: a query reads the K and V of the last `window` tokens, its own among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """A group of sliding-window layers (MHA, GQA) that share one block table.

    Pages as those of `FullAttention`. The next query after a hit at token H is token H itself, so
    the hit needs every block that overlaps the `window - 1` tokens before H, and nothing else.
    `lookahead_tokens` as in `FullAttention`.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int
    block_tokens: int
    element_bytes: int = 2
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "sliding_window"
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "window", "block_tokens")
        require_positive(self, "element_bytes")
        require_not_negative(self, "lookahead_tokens")

    @property
    def window_tokens(self) -> int:
        """The window, the query's own token among it."""
        return self.window

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers of the group."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` tokens of every layer, contiguous."""
        return self.block_tokens * self.bytes_per_token

    @property
    def rules(self) -> GroupRules:
        """The window less the query itself is needed."""
        return GroupRules(
            "span",
            block_tokens=self.block_tokens,
            lead_tokens=self.window - 1,
            lookahead_tokens=self.lookahead_tokens,
        )
