"""Attention (GQA) whose keys and values lie in pages: over everything, or over a sliding window.

Shapes: T = tokens, K = KV heads, G = query heads for each of them, D = head dimension, B = tokens
of a block. Grouped queries: arXiv 2305.13245; window: arXiv 2310.06825, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvcache.core.attention import MOST_THREADS, PagedKV
from kvcache.core.specs import FullAttention, GroupSpec, SlidingWindow
from kvcache.engine.batch import Bucket, Reading
from kvcache.engine.kv_format import FP32, KVFormat, Rows
from kvcache.engine.layers.attend import Gather, InPlace, Sight, attend, merge
from kvcache.engine.layers.base import BlockSizes, GroupUse, LayerStep
from kvcache.engine.ops import Ops
from kvcache.engine.shards import Shards, even_heads, heads_of_rank, of_heads

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
    def heads(self) -> int:
        """Of queries: G * K."""
        return self.out.shape[1] // self.head_dim

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """One group: `attention` or `window`."""
        part = self.shard(0, shards.tp)
        reading = Reading(part.heads // part.kv_heads)
        spec: GroupSpec
        if self.window is None:
            spec = FullAttention(
                name=FULL,
                layers=1,
                kv_heads=part.kv_heads,
                head_dim=self.head_dim,
                block_tokens=block_tokens(FULL),
                element_bytes=kv.element_bytes,
                dcp_shards=shards.dcp,
            )
            reading = reading._replace(ranks=shards.dcp)
        else:
            spec = SlidingWindow(
                name=WINDOW,
                layers=1,
                kv_heads=part.kv_heads,
                head_dim=self.head_dim,
                window=self.window,
                block_tokens=block_tokens(WINDOW),
                element_bytes=kv.element_bytes,
            )
        return (GroupUse(spec, kv, reading, min(shards.tp, self.kv_heads)),)

    def shard(self, rank: int, tp: int) -> Attention:
        """Its query heads, and the KV heads that these read."""
        if tp == 1:
            return self
        kv_heads = heads_of_rank(self.kv_heads, rank, tp, "KV heads")
        queries = even_heads(self.heads, rank, tp)
        wanted = zip(
            torch.split(self.qkv, [n * self.head_dim for n in self._split]),
            (queries, kv_heads, kv_heads),
            self._split,
            strict=True,
        )
        return replace(
            self,
            qkv=torch.cat([of_heads(rows, heads, of) for rows, heads, of in wanted]),
            out=of_heads(self.out, queries, self.heads, dim=1),
            kv_heads=kv_heads.stop - kv_heads.start,
        )

    @property
    def _split(self) -> tuple[int, int, int]:
        """Heads of queries, keys, values."""
        return self.heads, self.kv_heads, self.kv_heads

    def cache(self, parts: Sequence[Rows]) -> Rows:
        """`[pages, 2, B, K * D]`: K, then V."""
        return parts[0].shaped(2, -1, self.kv_heads * self.head_dim)

    def forward(self, x: Tensor, step: LayerStep, caches: Sequence[Rows], ops: Ops) -> Tensor:
        """Store the K and V of `x [T, width]`, attend, project."""
        rotation, heads = step.rotation, sum(self._split)
        assert rotation is not None
        qkv = ops.linear(x, self.qkv).contiguous().view(len(x), heads, self.head_dim)
        queries, kv = qkv.tensor_split([self.heads], dim=1)
        ops.rotate_(qkv[:, : heads - self.kv_heads], rotation)
        kv = kv.reshape(len(x), 2, -1)
        sight = Sight(self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window)
        found = []
        for rank, cache in enumerate(caches):
            plan = step.attention(0, rank)
            cache.write((plan.pages, slice(None), plan.offsets), plan.of_rank(kv))
            gather = self._gather(cache, plan.gathered_pages)
            in_place = self._in_place(cache, sight)
            found.append(attend(queries, gather, plan, sight, ops, in_place))
        return ops.linear(merge(found, ops).flatten(1), self.out)

    def _gather(self, cache: Rows, most_pages: int) -> Gather:
        """K and V of whole pages, `[requests, K, tokens, D]`; in one scratch memory where it can."""
        pages = cache.pages

        @lru_cache(maxsize=1)
        def scratch() -> Tensor:
            return pages.new_empty((2, most_pages, pages.shape[2] * pages.shape[3]))

        def gather(numbers: Tensor, requests: int) -> tuple[Tensor, Tensor]:
            shape = (requests, -1, self.kv_heads, self.head_dim)
            halves = []
            for half, room in enumerate(scratch()):
                part = room[: len(numbers)]
                torch.index_select(pages[:, half].flatten(1), 0, numbers, out=part)
                values = part if cache.format is FP32 else cache.format.decode(part)
                halves.append(values.view(shape).transpose(1, 2))
            return halves[0], halves[1]

        return gather

    def _in_place(self, cache: Rows, sight: Sight) -> InPlace | None:
        """The core reads float32 in host memory; what else there is, is gathered."""
        pages = cache.pages
        if cache.format is not FP32 or pages.device.type != "cpu":
            return None
        kv = PagedKV(
            address=pages.data_ptr(),
            stride_bytes=pages.stride(0) * cache.format.element_bytes,
            pages=len(pages),
            value_offset=pages.stride(1),
            block_tokens=pages.shape[2],
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

        def attend(queries: Tensor, bucket: Bucket) -> Tensor:
            found = kv.attend(
                queries.numpy(),
                bucket.block_tables,
                bucket.begin,
                bucket.end,
                scale=sight.scale,
                threads=min(torch.get_num_threads(), MOST_THREADS),
            )
            return torch.from_numpy(found)

        return attend
