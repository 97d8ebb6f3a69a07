"""What every kind of layer has in common: the cache groups it keeps something in, and its forward.

A layer is dealt out to tensor-parallel ranks as smaller layers of its kind (`shard`), whose results
add up. The context-parallel ranks of one share compute side by side in one `forward`, each over its
own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvcache.core.specs import GroupSpec
from kvcache.engine.batch import AttentionPlan, Plans, Reading, StatesPlan
from kvcache.engine.kv_format import KVFormat, Rows
from kvcache.engine.ops import Ops
from kvcache.engine.shards import Shards

BlockSizes = Callable[[str], int]
"""Tokens of a block, by the name of the group."""


class GroupUse(NamedTuple):
    """One cache group as a layer uses it. Layers with equal uses share the group."""

    spec: GroupSpec
    """As if this were the group's only layer."""
    format: KVFormat
    """Of its elements."""
    reading: Reading = Reading()
    parts: int = 1
    """Different contents that tensor-parallel ranks have in a page; 1: all have the same."""


class LayerStep(NamedTuple):
    """One step as a layer sees it."""

    rotation: Tensor | None
    """The layer's table at each row's position, `[T, pairs]`; None where it has none."""
    plans: Sequence[Plans]
    """Of its groups, in their order."""

    def attention(self, group: int, rank: int = 0) -> AttentionPlan:
        """The plan of a group of pages of tokens, for a context-parallel rank."""
        plans = self.plans[group]
        plan = plans[rank if len(plans) > 1 else 0]
        assert isinstance(plan, AttentionPlan)
        return plan

    def states(self) -> StatesPlan:
        """The plan of the only group, one of states."""
        ((plan,),) = self.plans
        assert isinstance(plan, StatesPlan)
        return plan


class Mixer(Protocol):
    """Mixes the tokens of a sequence. Immutable: what it keeps of them lies in pages."""

    @property
    def rotation(self) -> Tensor | None:
        """`ops.rotation_table`, or None where positions are not rotated."""

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """What a rank of the whole layer keeps, with K and V in a format."""

    def shard(self, rank: int, tp: int) -> Mixer:
        """The part of a tensor-parallel rank: what they compute adds up to what this one does.

        Raises:
            ConfigError: heads that cannot be dealt out.
        """

    def cache(self, parts: Sequence[Rows]) -> Any:
        """What `forward` takes of a rank, made from the layer's part of each group's pages.

        `[pages, n]`. Called on the part of a rank.
        """

    def forward(self, x: Tensor, step: LayerStep, caches: Sequence[Any], ops: Ops) -> Tensor:
        """Mix `x [T, width]`: reads pages, writes those of the step's own tokens and states.

        Called on the part of a rank, with the caches of its context-parallel ranks.
        """
