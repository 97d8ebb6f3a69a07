"""Latent attention (MLA): one compressed row a token, read by every head.

Formulas: arXiv 2405.04434, section 2.1. K and V are never made: their up-projections are moved into
the queries and behind the attention, so that all heads attend to the row itself,

    row = [latent c (rank) | rotary key (rope_dim)]
    score of a head = (q_nope W_uk) . c + q_rope . key        out of a head = W_uv sum(p c)

Shapes: T = tokens, H = heads, R = rank of the latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache.core.specs import LatentAttention
from kvcache.engine.batch import AttentionPlan, Reading
from kvcache.engine.kv_format import KVFormat, Rows
from kvcache.engine.layers.attend import Attended, Sight, attend, merge
from kvcache.engine.layers.base import BlockSizes, GroupUse, LayerStep
from kvcache.engine.ops import Ops, rms_norm
from kvcache.engine.shards import Shards, even_heads, of_heads

NAME = "latent"


@dataclass(frozen=True, eq=False)
class LowRank:
    """Queries made by way of a smaller vector."""

    down: Tensor
    """`[q_rank, width]`."""
    norm: Tensor
    """`[q_rank]`."""


@dataclass(frozen=True, eq=False)
class Latent:
    """One layer. Positions, where there are any, are rotary with neighbouring elements as pairs."""

    query: Tensor
    """`[H * (nope_dim + rope_dim), width or q_rank]`."""
    row: Tensor
    """`[R + rope_dim, width]`: latent and rotary key."""
    row_norm: Tensor
    """`[R]`: weight of the latent's norm."""
    key_up: Tensor
    """`[H, R, nope_dim]`: takes queries to where latents are."""
    value_up: Tensor
    """`[H, value_dim, R]`."""
    out: Tensor
    """`[width, H * value_dim]`."""
    rope_dim: int
    epsilon: float
    rotation: Tensor | None
    """`ops.rotation_table` of rope_dim; None: no positions (Kimi Linear)."""
    low_rank: LowRank | None = None

    @property
    def rank(self) -> int:
        """R."""
        return len(self.row_norm)

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """One group, `latent`. Tensor-parallel ranks all have every row."""
        spec = LatentAttention(
            name=NAME,
            layers=1,
            rank=self.rank,
            rope_dim=self.rope_dim,
            block_tokens=block_tokens(NAME),
            element_bytes=kv.element_bytes,
            dcp_shards=shards.dcp,
        )
        return (GroupUse(spec, kv, Reading(len(self.key_up) // shards.tp, ranks=shards.dcp)),)

    def shard(self, rank: int, tp: int) -> Latent:
        """Its heads; every row."""
        if tp == 1:
            return self
        heads = even_heads(len(self.key_up), rank, tp)
        return replace(
            self,
            query=of_heads(self.query, heads, len(self.key_up)),
            key_up=self.key_up[heads],
            value_up=self.value_up[heads],
            out=of_heads(self.out, heads, len(self.key_up), dim=1),
        )

    def cache(self, parts: Sequence[Rows]) -> Rows:
        """`[pages, block, R + rope_dim]`."""
        return parts[0].shaped(-1, self.rank + self.rope_dim)

    def forward(self, x: Tensor, step: LayerStep, caches: Sequence[Rows], ops: Ops) -> Tensor:
        """Store the rows of `x [T, width]`, attend, project."""
        queries, rows = self._queries(x, ops), self._rows(x, ops)
        if step.rotation is not None:
            ops.rotate_(queries[..., self.rank :], step.rotation)
            ops.rotate_(rows[:, :, self.rank :], step.rotation)
        found = []
        for rank, cache in enumerate(caches):
            plan = step.attention(0, rank)
            cache.write((plan.pages, plan.offsets), plan.of_rank(rows[:, 0]))
            found.append(self._attend(queries, cache, plan, ops))
        latents = merge(found, ops)
        return ops.linear(ops.linear_by_head(latents, self.value_up).flatten(1), self.out)

    def _attend(self, queries: Tensor, cache: Rows, plan: AttentionPlan, ops: Ops) -> Attended:
        def gather(pages: Tensor, requests: int) -> tuple[Tensor, Tensor]:
            seen = cache.read(pages).view(requests, 1, -1, queries.shape[-1])
            return seen, seen[..., : self.rank]

        scale = (self.key_up.shape[2] + self.rope_dim) ** -0.5
        sight = Sight(kv_heads=1, value_dim=self.rank, scale=scale)
        return attend(queries, gather, plan, sight, ops)

    def _queries(self, x: Tensor, ops: Ops) -> Tensor:
        """`[T, H, R + rope_dim]`, not rotated yet."""
        if self.low_rank is not None:
            x = rms_norm(ops.linear(x, self.low_rank.down), self.low_rank.norm, self.epsilon)
        queries = torch.unflatten(ops.linear(x, self.query), 1, (len(self.key_up), -1))
        plain, rotary = queries.tensor_split([self.key_up.shape[2]], dim=-1)
        return torch.cat((ops.linear_by_head(plain, self.key_up), rotary), -1)

    def _rows(self, x: Tensor, ops: Ops) -> Tensor:
        """`[T, 1, R + rope_dim]`, the key not rotated yet."""
        latent, key = ops.linear(x, self.row).tensor_split([self.rank], dim=-1)
        return torch.cat((rms_norm(latent, self.row_norm, self.epsilon), key), -1).unsqueeze(1)
