"""Latent attention (MLA): every token keeps one compressed row, shared by all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, padded, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """A group of MLA layers that share one block table.

    A page holds `block_tokens` rows of all `layers`, laid out `[layers, block_tokens, row]`, where
    a row is the latent of `rank` elements and the rotary key of `rope_dim`. Rows in a packed
    format have `entry_bytes` instead (fp8_ds_mla of vLLM: 656 bytes for 512 + 64). Layers with a
    sparse-attention indexer add `index_bytes` a token (DeepSeek V3.2: 128 fp8 and a scale, 132).
    The part of a layer is padded to `alignment_bytes`. Tensor parallel ranks all hold every row.
    A hit that ends at token H needs every block of [0, H).

    `dcp_shards` and `lookahead_tokens` as in `FullAttention`.
    """

    name: str
    layers: int
    block_tokens: int
    rank: int = 512
    rope_dim: int = 64
    element_bytes: int = 2
    entry_bytes: int = 0
    index_bytes: int = 0
    alignment_bytes: int = 1
    dcp_shards: int = 1
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "mla_attention"
    window_tokens: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        require_positive(self, "layers", "block_tokens", "rank", "element_bytes", "alignment_bytes")
        require_positive(self, "dcp_shards")
        require_not_negative(self, "rope_dim", "entry_bytes", "index_bytes", "lookahead_tokens")

    @property
    def row_bytes(self) -> int:
        """What one token keeps in one layer, its index entry included."""
        row = self.entry_bytes or (self.rank + self.rope_dim) * self.element_bytes
        return row + self.index_bytes

    @property
    def bytes_per_token(self) -> int:
        """What one token keeps over all layers of the group, padding apart."""
        return self.layers * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` rows of every layer, each layer's part padded."""
        return self.layers * padded(self.block_tokens * self.row_bytes, self.alignment_bytes)

    @property
    def rules(self) -> GroupRules:
        """Every block from the first token on is needed."""
        return GroupRules(
            "full",
            block_tokens=self.block_tokens * self.dcp_shards,
            lookahead_tokens=self.lookahead_tokens,
        )
