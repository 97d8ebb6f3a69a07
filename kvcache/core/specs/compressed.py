"""Compressed attention (DeepSeek V4's CSA and HCA): one entry stands for `ratio` tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import GroupRules, padded, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """The growing part of layers that pool `ratio` tokens into one entry.

    A page holds the `block_tokens / ratio` entries of all `layers`, laid out
    `[layers, entries, entry_bytes + index_bytes]`; the part of a layer is padded to
    `alignment_bytes`. Tensor parallel ranks all hold every entry.
    A hit that ends at token H needs every block of [0, H), and of the same layers the pooling
    state (`PoolingState`) and, where they have one, the window (`LatentWindow`): groups of their
    own. `dcp_shards` as in `FullAttention`.

    There is no `lookahead_tokens`: a draft model's layers that compress would need a `PoolingState`
    that looks ahead too. DeepSeek V4's own draft layer keeps a window only: `LatentWindow` has it.
    """

    name: str
    layers: int
    ratio: int
    entry_bytes: int
    block_tokens: int
    index_bytes: int = 0
    alignment_bytes: int = 1
    dcp_shards: int = 1
    kind: ClassVar[str] = "mla_attention"
    window_tokens: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        require_positive(self, "layers", "ratio", "entry_bytes", "block_tokens", "alignment_bytes")
        require_positive(self, "dcp_shards")
        require_not_negative(self, "index_bytes")
        if self.block_tokens % self.ratio:
            raise ConfigError(
                f"Compressed.block_tokens is {self.block_tokens}: it must be a multiple of the"
                f" ratio, {self.ratio}, so that no entry lies in two pages"
            )

    @property
    def bytes_per_token(self) -> float:
        """What one token keeps over all layers of the group, padding apart."""
        return self.layers * (self.entry_bytes + self.index_bytes) / self.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the entries of every layer, each layer's part padded."""
        entries = self.block_tokens // self.ratio
        part = entries * (self.entry_bytes + self.index_bytes)
        return self.layers * padded(part, self.alignment_bytes)

    @property
    def rules(self) -> GroupRules:
        """Every block from the first token on is needed."""
        return GroupRules("full", block_tokens=self.block_tokens * self.dcp_shards)
