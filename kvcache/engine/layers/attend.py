"""Softmax attention over gathered pages: decoding requests side by side, chunks in query blocks.

Shapes: T = tokens, K = KV heads, G = query heads for each of them, D = head dimension, V = value
dimension, S = tokens of a context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcache.engine.batch import QUERY_BLOCK_TOKENS, AttentionPlan, Bucket, Span
from kvcache.engine.ops import Ops

KV = tuple[Tensor, Tensor]
"""K `[requests, K, S, D]` and V `[requests, K, S, V]`."""

Gather = Callable[[Tensor, int], KV]
"""Page numbers of so many requests to their K and V."""


class Sight(NamedTuple):
    """How a layer looks at its context."""

    kv_heads: int
    value_dim: int
    scale: float
    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it."""

    def begin(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


def attend(queries: Tensor, gather: Gather, plan: AttentionPlan, sight: Sight, ops: Ops) -> Tensor:
    """What the rows of a step see of their contexts: `[T, K * G, D]` to `[T, K * G, V]`."""
    attended = queries.new_empty((*queries.shape[:2], sight.value_dim))
    for bucket in plan.buckets:
        kv = gather(bucket.pages, len(bucket.bias))
        attended[bucket.rows] = _decode(queries[bucket.rows], kv, bucket, sight)
    for span in plan.spans:
        kv = gather(span.pages, 1)
        if ops.exact:
            _token_by_token(queries[span.rows], kv, span, sight, attended[span.rows])
        else:
            assert plan.bias is not None
            _prefill(queries[span.rows], kv, span, plan.bias, sight, attended[span.rows])
    return attended


def _decode(queries: Tensor, kv: KV, bucket: Bucket, sight: Sight) -> Tensor:
    """One token for each request; the G heads of a KV head are the rows of one product."""
    keys, values = kv
    q = queries.view(len(queries), sight.kv_heads, -1, queries.shape[-1])
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=bucket.bias, scale=sight.scale
    ).flatten(1, 2)


def _prefill(queries: Tensor, kv: KV, span: Span, bias: Tensor, sight: Sight, out: Tensor) -> None:
    """A chunk, in query blocks; the rows of a product are (token, head of the group)."""
    group = queries.shape[1] // sight.kv_heads
    first = span.context - len(queries)
    for begin in range(0, len(queries), QUERY_BLOCK_TOKENS):
        block = queries[begin : begin + QUERY_BLOCK_TOKENS]
        context = first + begin + len(block)
        seen = slice(sight.begin(first + begin), context)
        q = block.view(len(block), sight.kv_heads, group, -1).transpose(0, 1)
        columns = bias.shape[1] - (seen.stop - seen.start)
        mask = bias[bias.shape[0] - len(block) * group :, columns:]
        keys, values = (part[:, :, seen] for part in kv)
        attended = F.scaled_dot_product_attention(
            q.flatten(1, 2)[None], keys, values, attn_mask=mask, scale=sight.scale
        )
        rows = attended.view(sight.kv_heads, len(block), group, -1).transpose(0, 1)
        out[begin : begin + len(block)] = rows.flatten(1, 2)


def _token_by_token(queries: Tensor, kv: KV, span: Span, sight: Sight, out: Tensor) -> None:
    """A chunk, with nothing in a product but what one token sees, in memory of its own.

    So neither the number of other rows nor the place of a context in its pages can matter.
    """
    first = span.context - len(queries)
    for i, query in enumerate(queries):
        seen = slice(sight.begin(first + i), first + i + 1)
        q = query.view(sight.kv_heads, -1, query.shape[-1])
        keys, values = (part[0, :, seen].contiguous() for part in kv)
        scores = torch.bmm(q, keys.transpose(1, 2)) * sight.scale
        out[i] = torch.bmm(scores.softmax(-1), values).flatten(0, 1)
