"""Softmax attention over pages: decoding requests side by side, read in place or gathered; chunks gathered.

Where ranks take turns with the tokens, each attends to its own and says how much they weigh; `merge`
makes of these what one rank with all tokens would have found (arXiv 1805.02867, section 3):

    lse of a rank = log sum exp(scores)      out = sum exp(lse - max lse) out of rank / sum of these

always in the order of the ranks, so that the same tokens give the same bits.

Shapes: T = tokens, K = KV heads, G = query heads for each of them, D = head dimension, V = value
dimension, S = tokens of a context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvcache.core.errors import InvariantError
from kvcache.engine.batch import QUERY_BLOCK_TOKENS, AttentionPlan, Bucket, Span, Turn
from kvcache.engine.ops import Ops

KV = tuple[Tensor, Tensor]
"""K `[requests, K, S, D]` and V `[requests, K, S, V]`."""

Gather = Callable[[Tensor, int], KV]
"""Page numbers of so many requests to their K and V."""

InPlace = Callable[[Tensor, Bucket], Tensor]
"""What decoding requests `[requests, K * G, D]` see, read where it lies: `[requests, K * G, V]`."""

_LEAST = -1e30
"""Below the log of any weight but that of nothing, which is -inf."""


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


class Attended(NamedTuple):
    """What rows of a step see."""

    values: Tensor
    """`[T, K * G, V]`."""
    weights: Tensor | None = None
    """`[T, K * G]`: log of the sum of exp(score); None: nobody else has tokens of the contexts."""


def attend(
    queries: Tensor,
    gather: Gather,
    plan: AttentionPlan,
    sight: Sight,
    ops: Ops,
    in_place: InPlace | None = None,
) -> Attended:
    """What the rows `[T, K * G, D]` of a step see of their contexts, or of a rank's share of them.

    Args:
        in_place: for decoding requests; None: K and V are gathered for them too.
    """
    if plan.turn.ranks > 1:
        return _attend_in_turn(queries, gather, plan, sight, ops)
    attended = queries.new_empty((*queries.shape[:2], sight.value_dim))
    for bucket in plan.buckets:
        asked = queries[bucket.rows]
        if in_place is not None:
            attended[bucket.rows] = in_place(asked, bucket)
            continue
        kv = gather(bucket.pages, len(asked))
        attended[bucket.rows] = _decode(asked, kv, bucket, sight)
    for span in plan.spans:
        kv = gather(span.pages, 1)
        if ops.exact:
            _token_by_token(queries[span.rows], kv, span, sight, attended[span.rows])
        else:
            assert plan.bias is not None
            _prefill(queries[span.rows], kv, span, plan.bias, sight, attended[span.rows])
    return Attended(attended)


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


# ---- ranks that take turns -------------------------------------------------------------------------


def merge(parts: Sequence[Attended], ops: Ops) -> Tensor:
    """`[T, K * G, V]` from what each context-parallel rank found, in their order.

    Raises:
        InvariantError: ranks that each have all tokens differ, with exact operations: see `agreed`.
    """
    weights = [part.weights for part in parts]
    if weights[0] is None:
        return agreed([part.values for part in parts], ops)
    logs = torch.stack([w for w in weights if w is not None])
    shares = torch.exp(logs - logs.amax(0)).unsqueeze(-1)
    total, values = shares[0], shares[0] * parts[0].values
    for share, part in zip(shares[1:], parts[1:], strict=True):
        total, values = total + share, values + share * part.values
    return values / total


def agreed(results: Sequence[Tensor], ops: Ops) -> Tensor:
    """What ranks computed that have the same tokens.

    Raises:
        InvariantError: with exact operations they must be equal bits; pages of a rank are wrong.
    """
    for rank, other in enumerate(results[1:], 1):
        if ops.exact and not torch.equal(results[0], other):
            raise InvariantError(
                f"context-parallel ranks 0 and {rank} computed different things from what should be"
                " equal pages"
            )
    return results[0]


def weigh(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention `[..., V]` from scores `[..., S]`, some -inf, and the log of their weight.

    Rows that see nothing give 0, and weigh nothing.
    """
    logs = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - logs.clamp(min=_LEAST)) @ values, logs.squeeze(-1)


def _attend_in_turn(
    queries: Tensor, gather: Gather, plan: AttentionPlan, sight: Sight, ops: Ops
) -> Attended:
    """As `attend`, over the tokens of one rank."""
    values = queries.new_empty((*queries.shape[:2], sight.value_dim))
    logs = queries.new_empty(queries.shape[:2])
    for bucket in plan.buckets:
        asked = queries[bucket.rows]
        keys, seen = gather(bucket.pages, len(asked))
        q = asked.view(len(asked), sight.kv_heads, -1, asked.shape[-1])
        scores = q @ keys.transpose(2, 3) * sight.scale + bucket.bias
        found, weight = weigh(scores, seen)
        values[bucket.rows], logs[bucket.rows] = found.flatten(1, 2), weight.flatten(1, 2)
    for span in plan.spans:
        kv = gather(span.pages, 1)
        most = 1 if ops.exact else QUERY_BLOCK_TOKENS
        for begin in range(span.rows.start, span.rows.stop, most):
            rows = slice(begin, min(begin + most, span.rows.stop))
            first = span.context - (span.rows.stop - begin)
            values[rows], logs[rows] = _block_in_turn(queries[rows], first, kv, plan.turn, sight)
    return Attended(values, logs)


def _block_in_turn(
    queries: Tensor, first: int, kv: KV, turn: Turn, sight: Sight
) -> tuple[Tensor, Tensor]:
    """Neighbouring queries from position `first` on; of the tokens no more than the last one sees."""
    count, heads = queries.shape[:2]
    keys, values = (part[0, :, : turn.count(first + count)].contiguous() for part in kv)
    q = queries.view(count, sight.kv_heads, -1, queries.shape[-1]).transpose(0, 1)
    scores = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)) * sight.scale
    if count > 1:
        places = torch.arange(keys.shape[1]) * turn.ranks + turn.rank
        hidden = places > torch.arange(first, first + count)[:, None]
        scores.masked_fill_(hidden.repeat_interleave(heads // sight.kv_heads, 0), -torch.inf)
    found, logs = weigh(scores, values)
    by_token = [torch.unflatten(part, 1, (count, -1)).transpose(0, 1) for part in (found, logs)]
    return by_token[0].flatten(1, 2), by_token[1].flatten(1, 2)
