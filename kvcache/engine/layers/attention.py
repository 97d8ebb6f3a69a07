"""Attention (GQA) whose keys and values lie in pages: over everything, or over a sliding window.

Shapes: T = tokens, K = KV heads, G = query heads for each of them, D = head dimension, B = tokens
of a block. Grouped queries: arXiv 2305.13245; window: arXiv 2310.06825, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.core.specs import FullAttention, GroupSpec, SlidingWindow
from kvcache.engine.batch import Reading
from kvcache.engine.kv_format import FP32, KVFormat, Rows
from kvcache.engine.layers.attend import Gather, Sight, attend
from kvcache.engine.layers.base import BlockSizes, GroupUse, LayerStep
from kvcache.engine.ops import Ops

FULL = "attention"
WINDOW = "window"


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention layer. Positions are rotary, with neighbouring elements as pairs."""

    qkv: Tensor
    """`[(G * K + 2 * K) * D, width]`: queries, keys, values."""
    out: Tensor
    """`[width, G * K * D]`."""
    kv_heads: int
    head_dim: int
    rotation: Tensor
    """`ops.rotation_table` of D."""
    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it."""

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.out.shape[1] // (self.kv_heads * self.head_dim)

    def groups(self, block_tokens: BlockSizes, kv: KVFormat) -> tuple[GroupUse, ...]:
        """One group: `attention` or `window`."""
        spec: GroupSpec
        if self.window is None:
            spec = FullAttention(
                name=FULL,
                layers=1,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                block_tokens=block_tokens(FULL),
                element_bytes=kv.element_bytes,
            )
        else:
            spec = SlidingWindow(
                name=WINDOW,
                layers=1,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                window=self.window,
                block_tokens=block_tokens(WINDOW),
                element_bytes=kv.element_bytes,
            )
        return (GroupUse(spec, kv, Reading(self.heads_per_kv)),)

    def cache(self, parts: Sequence[Rows]) -> Rows:
        """`[pages, 2, B, K * D]`: K, then V."""
        return parts[0].shaped(2, -1, self.kv_heads * self.head_dim)

    def forward(self, x: Tensor, step: LayerStep, cache: Rows, ops: Ops) -> Tensor:
        """Store the K and V of `x [T, width]`, attend, project."""
        plan, rotation = step.attention(0), step.rotation
        assert rotation is not None
        heads = self.qkv.shape[0] // self.head_dim
        qkv = ops.linear(x, self.qkv).contiguous().view(len(x), heads, self.head_dim)
        queries, kv = qkv.tensor_split([heads - 2 * self.kv_heads], dim=1)
        ops.rotate_(qkv[:, : heads - self.kv_heads], rotation)
        cache.write((plan.pages, slice(None), plan.offsets), kv.reshape(len(x), 2, -1))
        sight = Sight(self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window)
        attended = attend(queries, self._gather(cache, plan.gathered_pages), plan, sight, ops)
        return ops.linear(attended.flatten(1), self.out)

    def _gather(self, cache: Rows, most_pages: int) -> Gather:
        """K and V of whole pages, `[requests, K, tokens, D]`; in one scratch memory where it can."""
        pages = cache.pages
        scratch = pages.new_empty((2, most_pages, pages.shape[2] * pages.shape[3]))

        def gather(numbers: Tensor, requests: int) -> tuple[Tensor, Tensor]:
            shape = (requests, -1, self.kv_heads, self.head_dim)
            halves = []
            for half, room in enumerate(scratch):
                part = room[: len(numbers)]
                torch.index_select(pages[:, half].flatten(1), 0, numbers, out=part)
                values = part if cache.format is FP32 else cache.format.decode(part)
                halves.append(values.view(shape).transpose(1, 2))
            return halves[0], halves[1]

        return gather
