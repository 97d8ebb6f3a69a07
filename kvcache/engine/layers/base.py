"""What every kind of layer has in common: the cache groups it keeps something in, and its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvcache.core.specs import GroupSpec
from kvcache.engine.batch import AttentionPlan, Reading, StatesPlan
from kvcache.engine.kv_format import KVFormat, Rows
from kvcache.engine.ops import Ops

BlockSizes = Callable[[str], int]
"""Tokens of a block, by the name of the group."""


class GroupUse(NamedTuple):
    """One cache group as a layer uses it. Layers with equal uses share the group."""

    spec: GroupSpec
    """As if this were the group's only layer."""
    format: KVFormat
    """Of its elements."""
    reading: Reading = Reading()


class LayerStep(NamedTuple):
    """One step as a layer sees it."""

    rotation: Tensor | None
    """The layer's table at each row's position, `[T, pairs]`; None where it has none."""
    plans: Sequence[AttentionPlan | StatesPlan]
    """Of its groups, in their order."""

    def attention(self, group: int) -> AttentionPlan:
        """The plan of a group of pages of tokens."""
        plan = self.plans[group]
        assert isinstance(plan, AttentionPlan)
        return plan

    def states(self) -> StatesPlan:
        """The plan of the only group, one of states."""
        (plan,) = self.plans
        assert isinstance(plan, StatesPlan)
        return plan


class Mixer(Protocol):
    """Mixes the tokens of a sequence. Immutable: what it keeps of them lies in pages."""

    @property
    def rotation(self) -> Tensor | None:
        """`ops.rotation_table`, or None where positions are not rotated."""

    def groups(self, block_tokens: BlockSizes, kv: KVFormat) -> tuple[GroupUse, ...]:
        """What the layer keeps, with K and V in a format."""

    def cache(self, parts: Sequence[Rows]) -> Any:
        """What `forward` takes, made from the layer's part of each group's pages, `[pages, n]`."""

    def forward(self, x: Tensor, step: LayerStep, cache: Any, ops: Ops) -> Tensor:
        """Mix `x [T, width]`: reads pages, writes those of the step's own tokens and states."""
