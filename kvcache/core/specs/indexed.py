"""GQA with index keys (MiniMax M3): a small key beside K and V picks the blocks that a query reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import GroupRules, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class IndexedAttention:
    """A group of attention layers, of which `indexed_layers` (0: all) also keep index keys.

    A page holds `block_tokens` tokens of all `layers`: K and V as `FullAttention` lays them out,
    then the index keys `[indexed_layers, block_tokens, index_dim]`. Tensor parallel ranks all hold
    every index key. Which blocks a query reads is known only then, so a hit that ends at token H
    needs every block of [0, H). `dcp_shards` and `lookahead_tokens` as in `FullAttention`.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    index_dim: int
    block_tokens: int
    indexed_layers: int = 0
    element_bytes: int = 2
    index_element_bytes: int = 2
    dcp_shards: int = 1
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "full_attention"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "index_dim", "block_tokens")
        require_positive(self, "element_bytes", "index_element_bytes", "dcp_shards")
        require_not_negative(self, "indexed_layers", "lookahead_tokens")
        if self.indexed_layers > self.layers:
            raise ConfigError(
                f"IndexedAttention.indexed_layers is {self.indexed_layers}, more than the group's"
                f" {self.layers} layers"
            )

    @property
    def bytes_per_token(self) -> int:
        """K, V and index keys of one token over all layers of the group."""
        kv = self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes
        index = (self.indexed_layers or self.layers) * self.index_dim * self.index_element_bytes
        return kv + index

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
