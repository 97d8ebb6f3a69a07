"""Recurrent state (Mamba2, GDN, KDA, linear attention): a fixed-size state after H tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.core.specs.base import GroupRules, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """A group of recurrent layers. One page is one whole state of all `layers`.

    A hit that ends at token H needs exactly one page: the state after H tokens, which exists only
    where it was snapshotted. The hit grid does not depend on the size of the state.
    Decoding with `speculative_tokens` drafted at a time takes a state page for each of them, so
    that those that are rejected can be taken back.
    """

    name: str
    layers: int
    state_bytes_per_layer: int
    speculative_tokens: int = 0
    kind: ClassVar[str] = "mamba"
    window_tokens: ClassVar[int | None] = None
    alignment_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_positive(self, "layers", "state_bytes_per_layer")
        require_not_negative(self, "speculative_tokens")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the state of every layer at one position, contiguous."""
        return self.layers * self.state_bytes_per_layer

    @property
    def rules(self) -> GroupRules:
        """The state at the position is needed."""
        return GroupRules("state", request_pages=self.speculative_tokens)
