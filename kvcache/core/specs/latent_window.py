"""A sliding window over latent rows (DeepSeek V4): one row a token and layer, the last `window` tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, padded, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class LatentWindow:
    """A group of sliding-window layers whose K and V are one row of `entry_bytes`.

    A page holds `block_tokens` rows of all `layers`, laid out `[layers, block_tokens, entry_bytes]`;
    the part of a layer is padded to `alignment_bytes`. Tensor parallel ranks all hold every row.
    A hit at token H needs every block that overlaps the `window - 1` tokens before H.
    `lookahead_tokens` as in `FullAttention`.
    """

    name: str
    layers: int
    entry_bytes: int
    window: int
    block_tokens: int
    alignment_bytes: int = 1
    lookahead_tokens: int = 0
    kind: ClassVar[str] = "sliding_window_mla"

    def __post_init__(self) -> None:
        require_positive(self, "layers", "entry_bytes", "window", "block_tokens", "alignment_bytes")
        require_not_negative(self, "lookahead_tokens")

    @property
    def window_tokens(self) -> int:
        """The window, the query's own token among it."""
        return self.window

    @property
    def bytes_per_token(self) -> int:
        """What one token keeps over all layers of the group, padding apart."""
        return self.layers * self.entry_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` rows of every layer, each layer's part padded."""
        return self.layers * padded(self.block_tokens * self.entry_bytes, self.alignment_bytes)

    @property
    def rules(self) -> GroupRules:
        """The window less the query itself is needed."""
        return GroupRules(
            "span",
            block_tokens=self.block_tokens,
            lead_tokens=self.window - 1,
            lookahead_tokens=self.lookahead_tokens,
        )
