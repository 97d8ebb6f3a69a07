"""Private ring buffers: the last rows of one request, overwritten in a circle, never cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, require_positive


@dataclass(frozen=True, kw_only=True)
class RingBuffer:
    """A group of layers with one ring of `ring_tokens` rows a request, in one page.

    Laid out `[layers, ring_tokens, token_bytes]`. A ring has no key and does not count in a hit:
    after a hit the model fills it again (bounded replay).
    """

    name: str
    layers: int
    ring_tokens: int
    token_bytes: int
    kind: ClassVar[str] = "unknown"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "ring_tokens", "token_bytes")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the whole ring of every layer, contiguous."""
        return self.layers * self.ring_tokens * self.token_bytes

    @property
    def rules(self) -> GroupRules:
        """One page as long as the request is open."""
        return GroupRules("private", request_pages=1)
