"""Full attention (MHA, GQA): every token keeps its K and V for as long as the prefix is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class FullAttention:
    """A group of full-attention layers that share one block table.

    A page holds `block_tokens` tokens of all `layers`, laid out
    `[layers, 2 (K, V), block_tokens, kv_heads, head_dim]`.
    A hit that ends at token H needs every block of [0, H).

    Context parallel ranks (`dcp_shards`) take turns: a page of one rank holds `block_tokens`
    tokens of the `block_tokens * dcp_shards` that all ranks' pages of one number span.
    `lookahead_tokens` above 0 makes it a draft model's group (EAGLE, MTP), see `GroupRules`.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int = 2
    dcp_shards: int = 1
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "full_attention"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "block_tokens", "element_bytes")
        require_positive(self, "dcp_shards")
        require_not_negative(self, "lookahead_tokens")

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
        """Every block from the first token on is needed."""
        return GroupRules(
            "full",
            block_tokens=self.block_tokens * self.dcp_shards,
            lookahead_tokens=self.lookahead_tokens,
        )
