"""Chunked local attention (Llama 4): a query reads its own chunk of the text up to itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import GroupRules, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal:
    """A group of layers whose attention stays inside chunks of `chunk_tokens`.

    Pages as those of `FullAttention`. A hit that ends at token H needs the blocks from the start of
    H's chunk on; where H is the start of a chunk it needs nothing.
    `lookahead_tokens` as in `FullAttention`.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    block_tokens: int
    element_bytes: int = 2
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "chunked_local_attention"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "chunk_tokens", "block_tokens")
        require_positive(self, "element_bytes")
        require_not_negative(self, "lookahead_tokens")
        if self.chunk_tokens % self.block_tokens:
            raise ConfigError(
                f"ChunkedLocal.block_tokens is {self.block_tokens}: it must divide chunk_tokens,"
                f" {self.chunk_tokens}, so that no page lies in two chunks"
            )

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
        """The part of the chunk before the position is needed."""
        return GroupRules(
            "span",
            block_tokens=self.block_tokens,
            chunk_tokens=self.chunk_tokens,
            lookahead_tokens=self.lookahead_tokens,
        )
