"""Recurrent state (Mamba2, GDN, KDA, linear attention): a fixed-size state after H tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcache.core.specs.base import require_positive


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """A group of recurrent layers. One page is one whole state of all `layers`.

    A hit that ends at token H needs exactly one page: the state after H tokens, which exists only
    where it was snapshotted. The hit grid does not depend on the size of the state.
    """

    name: str
    layers: int
    state_bytes_per_layer: int
    kind: ClassVar[Literal["recurrent"]] = "recurrent"

    def __post_init__(self) -> None:
        require_positive(self, "layers", "state_bytes_per_layer")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the state of every layer at one position, contiguous."""
        return self.layers * self.state_bytes_per_layer
