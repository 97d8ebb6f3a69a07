"""Pooling state of a compressor (DeepSeek V4): the rows that have not become an entry yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.errors import ConfigError
from kvcache.core.specs.base import GroupRules, require_positive


@dataclass(frozen=True, kw_only=True)
class PoolingState:
    """What the layers of a `Compressed` group need to make their next entry.

    A page holds `block_tokens` rows of `token_bytes` of all `layers`, laid out
    `[layers, block_tokens, token_bytes]`. A hit that ends at token H needs the rows since the last
    multiple of `ratio`, and with `overlap` (an entry pools its own `ratio` tokens and the `ratio`
    before them) those of the `ratio` tokens before that multiple too. So without overlap a hit at
    a multiple of the ratio needs nothing.

    Rows of a finished entry are read by nobody, so a long prefill stores only those that a kept
    position or its own end needs (`GroupRules.transient`): the engine pools what a step computes
    from its activations, and writes rows where the block table has a page.
    """

    name: str
    layers: int
    ratio: int
    token_bytes: int
    block_tokens: int
    overlap: bool = False
    kind: ClassVar[str] = "sliding_window_mla"
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "ratio", "token_bytes", "block_tokens")
        if self.ratio % self.block_tokens:
            raise ConfigError(
                f"PoolingState.block_tokens is {self.block_tokens}: it must divide the ratio,"
                f" {self.ratio}, so that no page lies in two entries"
            )

    @property
    def window_tokens(self) -> int:
        """The most rows that one entry pools: vLLM's window of such a state."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def bytes_per_token(self) -> int:
        """The row of one token over all layers of the group."""
        return self.layers * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `block_tokens` rows of every layer, contiguous."""
        return self.block_tokens * self.bytes_per_token

    @property
    def rules(self) -> GroupRules:
        """The entry being pooled is needed, with overlap the one before it too."""
        return GroupRules(
            "span",
            block_tokens=self.block_tokens,
            chunk_tokens=self.ratio,
            lead_tokens=self.ratio if self.overlap else 0,
            transient=self.ratio > 1,
        )
