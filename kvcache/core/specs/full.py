"""Full attention (MHA, GQA): every token keeps its K and V for as long as the prefix is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcache.core.specs.base import require_positive


@dataclass(frozen=True, kw_only=True)
class FullAttention:
    """A group of full-attention layers that share one block table.

    A page holds `block_tokens` tokens of all `layers`, laid out
    `[layers, 2 (K, V), block_tokens, kv_heads, head_dim]`.
    A hit that ends at token H needs every block of [0, H).
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int = 2
    kind: ClassVar[Literal["full"]] = "full"

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "block_tokens", "element_bytes")

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers of the group."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` tokens of every layer, contiguous."""
        return self.block_tokens * self.bytes_per_token
