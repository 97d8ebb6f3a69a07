"""Attention (GQA) whose keys and values lie in pages: over everything, or over a sliding window.

Shapes: T = tokens, K = KV heads, G = query heads for each of them, D = head dimension, B = tokens
of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcache.engine.batch import QUERY_BLOCK_TOKENS, AttentionPlan, Bucket, Span
from kvcache.engine.ops import Ops, rotate_


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention layer. Positions are rotary, with neighbouring elements as pairs."""

    qkv: Tensor
    """`[(G * K + 2 * K) * D, width]`: queries, keys, values."""
    out: Tensor
    """`[width, G * K * D]`."""
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it."""

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.out.shape[1] // (self.kv_heads * self.head_dim)

    def forward(
        self, x: Tensor, rotation: Tensor, plan: AttentionPlan, cache: Tensor, ops: Ops
    ) -> Tensor:
        """Store the K and V of `x [T, width]`, attend, project. `cache [pages, 2, B, K * D]`."""
        heads = self.qkv.shape[0] // self.head_dim
        qkv = ops.linear(x, self.qkv).contiguous().view(len(x), heads, self.head_dim)
        queries, kv = qkv.tensor_split([heads - 2 * self.kv_heads], dim=1)
        rotate_(qkv[:, : heads - self.kv_heads], rotation)
        cache[plan.pages, :, plan.offsets] = kv.reshape(len(x), 2, -1)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        keys, values = cache.new_empty((2, plan.gathered_pages, cache.shape[2] * cache.shape[3]))
        for bucket in plan.buckets:
            parts = self._gather(cache, bucket.pages, len(bucket.bias), keys, values)
            attended[bucket.rows] = self._decode(queries[bucket.rows], *parts, bucket)
        for span in plan.spans:
            assert plan.bias is not None
            parts = self._gather(cache, span.pages, 1, keys, values)
            if ops.exact:
                self._token_by_token(queries[span.rows], *parts, span, attended[span.rows])
            else:
                self._prefill(queries[span.rows], *parts, span, plan.bias, attended[span.rows])
        return ops.linear(attended.flatten(1), self.out)

    def _gather(
        self, cache: Tensor, pages: Tensor, requests: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """K and V of whole pages, `[requests, K, tokens, D]`, in the given scratch memory."""
        shape = (requests, -1, self.kv_heads, self.head_dim)
        for half, scratch in enumerate((keys, values)):
            torch.index_select(cache[:, half].flatten(1), 0, pages, out=scratch[: len(pages)])
        return (
            keys[: len(pages)].view(shape).transpose(1, 2),
            values[: len(pages)].view(shape).transpose(1, 2),
        )

    def _decode(self, queries: Tensor, keys: Tensor, values: Tensor, bucket: Bucket) -> Tensor:
        """One token for each request; the G heads of a KV head are the rows of one product."""
        q = queries.view(len(queries), self.kv_heads, -1, self.head_dim)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bucket.bias).flatten(1, 2)

    def _prefill(
        self, queries: Tensor, keys: Tensor, values: Tensor, span: Span, bias: Tensor, out: Tensor
    ) -> None:
        """A chunk, in query blocks; the rows of a product are (token, head of the group)."""
        group = self.heads_per_kv
        first = span.context - len(queries)
        for begin in range(0, len(queries), QUERY_BLOCK_TOKENS):
            block = queries[begin : begin + QUERY_BLOCK_TOKENS]
            context = first + begin + len(block)
            seen = slice(self._begin(first + begin), context)
            q = block.view(len(block), self.kv_heads, group, self.head_dim).transpose(0, 1)
            columns = bias.shape[1] - (seen.stop - seen.start)
            mask = bias[bias.shape[0] - len(block) * group :, columns:]
            attended = F.scaled_dot_product_attention(
                q.flatten(1, 2)[None], keys[:, :, seen], values[:, :, seen], attn_mask=mask
            )
            rows = attended.view(self.kv_heads, len(block), group, self.head_dim).transpose(0, 1)
            out[begin : begin + len(block)] = rows.flatten(1, 2)

    def _token_by_token(
        self, queries: Tensor, keys: Tensor, values: Tensor, span: Span, out: Tensor
    ) -> None:
        """A chunk, with nothing in a product but what one token sees."""
        first = span.context - len(queries)
        for i, query in enumerate(queries):
            seen = slice(self._begin(first + i), first + i + 1)
            q = query.view(1, self.kv_heads, -1, self.head_dim)
            scores = q @ keys[:, :, seen].transpose(-1, -2) * self.head_dim**-0.5
            out[i] = (scores.softmax(-1) @ values[:, :, seen]).flatten(0, 2)

    def _begin(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)
