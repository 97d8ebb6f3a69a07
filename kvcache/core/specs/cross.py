"""Cross-attention: K and V of an encoder's output, made once a request, never cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, require_positive


@dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """A group of layers that attend to at most `max_encoder_tokens` encoder positions.

    Pages of `block_tokens` encoder positions, laid out as those of `FullAttention`; every request
    holds as many as the longest encoder output takes.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    max_encoder_tokens: int
    block_tokens: int
    element_bytes: int = 2
    kind: ClassVar[str] = "cross_attention"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "kv_heads", "head_dim", "max_encoder_tokens")
        require_positive(self, "block_tokens", "element_bytes")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` encoder positions of every layer, contiguous."""
        row = self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes
        return self.block_tokens * row

    @property
    def rules(self) -> GroupRules:
        """All pages as long as the request is open."""
        return GroupRules("private", request_pages=-(-self.max_encoder_tokens // self.block_tokens))
