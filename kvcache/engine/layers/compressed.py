"""Compressed attention: a window of single rows, and before it entries that stand for many tokens.

Three cache groups keep what a layer needs: `rows` (one row a token, K and V in one, of the window
alone), `entries` (with their index keys, of the whole text) and `pool` (what the next entries are
pooled from: a step reads the rows of earlier steps there, and stores those that later ones read).

    scores of a query = its own rows in the window | entries that are complete, and picked | a sink

All heads read the same rows. As V has been rotated with K, what is read is rotated back at the
query. Context-parallel ranks all have the rows and pool what they keep; entry e is kept by rank
`e % ranks`. Of the window each rank reads a share too, so that all is read once; the scores of the
index come together from all ranks before entries are picked. Formulas: the DeepSeek-V4 report,
section 2.3, as `DeepseekV4Attention` of transformers has them, against which this is tested.

Shapes: T = tokens, H = heads, D = head dimension, W = rows of the window, E = entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache.core.errors import ConfigError
from kvcache.core.specs import Compressed, GroupSpec, LatentWindow, PoolingState
from kvcache.engine.batch import QUERY_BLOCK_TOKENS, Reading, Span, Turn
from kvcache.engine.kv_format import FP32, KVFormat, Rows
from kvcache.engine.layers.attend import Attended, merge, weigh
from kvcache.engine.layers.base import BlockSizes, GroupUse, LayerStep
from kvcache.engine.layers.compressor import Compressor
from kvcache.engine.layers.latent import LowRank
from kvcache.engine.ops import Ops, rms_norm
from kvcache.engine.shards import Shards, even_heads, of_heads

ROWS = "rows"
ENTRIES = "entries"
POOL = "pool"
_BY_REQUEST = Reading(by_request=True)


class CompressedCache(NamedTuple):
    """One layer's part of the pages."""

    rows: Rows
    """`[pages, block, D]`."""
    entries: Rows | None = None
    """`[pages, entries of a block, D + index D]`."""
    pool: Rows | None = None
    """`[pages, block, pooling row]`."""


class _Queries(NamedTuple):
    """What asks, by token."""

    heads: Tensor
    """`[T, H, D]`, rotated."""
    asking: Tensor | None
    """`[T, index heads, index D]`, rotated."""
    weights: Tensor | None
    """`[T, index heads]`."""

    def at(self, rows: slice) -> _Queries:
        """Those of some rows."""
        heads, *others = (None if part is None else part[rows] for part in self)
        assert heads is not None
        return _Queries(heads, *others)


class _Context(NamedTuple):
    """What a request's tokens read on one rank."""

    turn: Turn
    rows: Tensor
    """`[W, D]`, from token `first` on."""
    first: int
    entries: Tensor
    """`[E, D]`."""
    keys: Tensor
    """Of the index, `[E, index D]`."""


@dataclass(frozen=True, eq=False)
class CompressedAttention:
    """One layer."""

    low_rank: LowRank
    query: Tensor
    """`[H * D, q_rank]`; each head is normed without a weight, then rotated at its end."""
    row: Tensor
    """`[D, width]`: K and V in one."""
    row_norm: Tensor
    """`[D]`."""
    sinks: Tensor
    """`[H]`: a score that takes weight and gives nothing."""
    out_in: Tensor
    """`[parts, rank, H / parts * D]`; with `out [width, parts * rank]`: neighbouring heads first."""
    out: Tensor
    window: int
    """Tokens whose rows a query sees, its own among them."""
    rotation: Tensor
    """`ops.rotation_table` of the rotated end of a head."""
    epsilon: float
    compressor: Compressor | None
    """None: the window alone."""

    @property
    def head_dim(self) -> int:
        """D."""
        return len(self.row_norm)

    def groups(
        self, block_tokens: BlockSizes, kv: KVFormat, shards: Shards
    ) -> tuple[GroupUse, ...]:
        """`rows`, and with a compressor `entries` and `pool`; pooling rows are float32 always.

        Tensor-parallel ranks all have all of it.
        """
        specs: list[tuple[GroupSpec, KVFormat]] = [
            (
                LatentWindow(
                    name=ROWS,
                    layers=1,
                    entry_bytes=self.head_dim * kv.element_bytes,
                    window=self.window,
                    block_tokens=block_tokens(ROWS),
                ),
                kv,
            )
        ]
        if self.compressor is not None:
            c = self.compressor
            index_elements = c.entry_elements - self.head_dim
            entries = Compressed(
                name=ENTRIES,
                layers=1,
                ratio=c.ratio,
                entry_bytes=self.head_dim * kv.element_bytes,
                index_bytes=index_elements * kv.element_bytes,
                block_tokens=block_tokens(ENTRIES),
                dcp_shards=shards.dcp,
            )
            pool = PoolingState(
                name=POOL,
                layers=1,
                ratio=c.ratio,
                token_bytes=c.row_elements * FP32.element_bytes,
                block_tokens=min(c.ratio, block_tokens(POOL)),
                overlap=c.overlap,
            )
            specs += [(entries, kv), (pool, FP32)]
        return tuple(GroupUse(spec, of, _BY_REQUEST) for spec, of in specs)

    def shard(self, rank: int, tp: int) -> CompressedAttention:
        """Its heads; the whole compressor, as all ranks pick the same entries."""
        if tp == 1:
            return self
        count, parts = len(self.sinks), len(self.out_in)
        heads = even_heads(count, rank, tp)
        of_part, each = count // parts, count // tp
        if each % of_part and of_part % each:
            raise ConfigError(
                f"tp is {tp}: a rank would have {each} heads, and {of_part} heads share a part of the"
                " output; one of these must be a multiple of the other"
            )
        first = heads.start // of_part
        mine = slice(first, -(-heads.stop // of_part))
        inside = slice(heads.start - first * of_part, heads.stop - first * of_part)
        whole = each >= of_part
        out_in = self.out_in[mine]
        return replace(
            self,
            query=of_heads(self.query, heads, count),
            sinks=self.sinks[heads],
            out_in=out_in if whole else of_heads(out_in, inside, of_part, dim=2),
            out=of_heads(self.out, mine, parts, dim=1),
        )

    def cache(self, parts: Sequence[Rows]) -> CompressedCache:
        """Rows of each group."""
        rows = parts[0].shaped(-1, self.head_dim)
        if self.compressor is None:
            return CompressedCache(rows)
        return CompressedCache(
            rows,
            parts[1].shaped(-1, self.compressor.entry_elements),
            parts[2].shaped(-1, self.compressor.row_elements),
        )

    def forward(
        self, x: Tensor, step: LayerStep, caches: Sequence[CompressedCache], ops: Ops
    ) -> Tensor:
        """Store rows, pooling rows and finished entries of `x [T, width]`; attend; project."""
        assert step.rotation is not None
        turned = slice(self.head_dim - 2 * step.rotation.shape[1], None)
        row = rms_norm(ops.linear(x, self.row).contiguous(), self.row_norm, self.epsilon)
        row = row.unsqueeze(1)
        ops.rotate_(row[..., turned], step.rotation)
        plan = step.attention(0)
        turns = [Turn(rank, len(caches)) for rank in range(len(caches))]
        for cache in caches:
            cache.rows.write((plan.pages, plan.offsets), row[:, 0])
        if self.compressor is not None:
            new = self.compressor.rows(x, ops)
            for turn, cache in zip(turns, caches, strict=True):
                self._compress(self.compressor, new, step, cache, turn, ops)

        queries = self._queries(x, step.rotation, ops)
        attended = torch.empty_like(queries.heads)
        for i, span in enumerate(plan.spans):
            contexts = [
                self._context(span, step, i, cache, turn)
                for turn, cache in zip(turns, caches, strict=True)
            ]
            for asked in _blocks(span.rows, 1 if ops.exact else QUERY_BLOCK_TOKENS):
                at = span.first + span.context - (span.rows.stop - asked.start)
                attended[asked] = self._attend(queries.at(asked), at, contexts, ops)
        ops.rotate_(attended[..., turned], step.rotation.conj())
        mixed = ops.linear_by_head(attended.reshape(len(x), len(self.out_in), -1), self.out_in)
        return ops.linear(mixed.flatten(1), self.out)

    # ---- entries -------------------------------------------------------------------------------

    def _compress(
        self,
        compressor: Compressor,
        new: Tensor,
        step: LayerStep,
        cache: CompressedCache,
        turn: Turn,
        ops: Ops,
    ) -> None:
        """Pool what is complete with this step's tokens; store what a later step pools."""
        assert cache.entries is not None
        assert cache.pool is not None
        plan, ratio = step.attention(2), compressor.ratio
        for target, span in zip(step.attention(1).spans, plan.spans, strict=True):
            count = span.rows.stop - span.rows.start
            start, end = span.first + span.context - count, span.first + span.context
            numbers = range(start // ratio, end // ratio)
            mine = slice((turn.rank - numbers.start) % turn.ranks, None, turn.ranks)
            if not numbers[mine]:
                continue
            earlier = _read(cache.pool, span.pages, start - span.first)
            rows = torch.cat((earlier, new[span.rows]))
            entries = compressor.entries(
                rows,
                span.first,
                numbers,
                mine,
                rotation=self.rotation,
                epsilon=self.epsilon,
                ops=ops,
            )
            places = torch.arange(numbers.start, numbers.stop)[mine] // turn.ranks
            of_block = cache.entries.pages.shape[1]
            index = target.pages[places // of_block], places % of_block
            cache.entries.write(index, entries)
        kept = torch.nonzero(plan.pages >= 0)[:, 0]
        cache.pool.write((plan.pages[kept], plan.offsets[kept]), new[kept])

    # ---- attention -----------------------------------------------------------------------------

    def _queries(self, x: Tensor, rotation: Tensor, ops: Ops) -> _Queries:
        small = rms_norm(ops.linear(x, self.low_rank.down), self.low_rank.norm, self.epsilon)
        queries = torch.unflatten(ops.linear(small, self.query), 1, (len(self.sinks), -1))
        queries = rms_norm(queries, None, self.epsilon).contiguous()
        ops.rotate_(queries[..., self.head_dim - 2 * rotation.shape[1] :], rotation)
        if self.compressor is None or self.compressor.index is None:
            return _Queries(queries, None, None)
        index = self.compressor.index
        asking = ops.linear(small, index.query).contiguous()
        asking = asking.view(len(x), len(index.weight), -1)
        ops.rotate_(asking[..., asking.shape[2] - 2 * rotation.shape[1] :], rotation)
        return _Queries(queries, asking, ops.linear(x, index.weight))

    def _context(
        self, span: Span, step: LayerStep, i: int, cache: CompressedCache, turn: Turn
    ) -> _Context:
        """Rows and entries of the i-th request, those of this step among them."""
        rows = _read(cache.rows, span.pages, span.context)
        if self.compressor is None or cache.entries is None:
            nothing = rows[:0]
            return _Context(turn, rows, span.first, nothing, nothing)
        target = step.attention(1).spans[i]
        count = turn.count(target.context // self.compressor.ratio)
        split = _read(cache.entries, target.pages, count).tensor_split([self.head_dim], dim=1)
        return _Context(turn, rows, span.first, *split)

    def _attend(self, queries: _Queries, at: int, contexts: Sequence[_Context], ops: Ops) -> Tensor:
        """`[T, H, D]` of queries at neighbouring positions from `at` on, over all ranks' contexts."""
        count = len(queries.heads)
        ratio = 1 if self.compressor is None else self.compressor.ratio
        entries = 0 if self.compressor is None else (at + count) // ratio
        positions = torch.arange(at, at + count)[:, None]
        picked = torch.arange(entries) < (positions + 1) // ratio
        if queries.asking is not None:
            picked = self._pick(queries, contexts, picked)
        found = [
            self._attend_in_turn(queries.heads, at, positions, context, picked, exact=ops.exact)
            for context in contexts
        ]
        sink = Attended(torch.zeros_like(queries.heads), self.sinks.expand(count, -1))
        return merge([*found, sink], ops)

    def _attend_in_turn(
        self,
        heads: Tensor,
        at: int,
        positions: Tensor,
        context: _Context,
        picked: Tensor,
        *,
        exact: bool,
    ) -> Attended:
        """Over one rank's entries and its share of the window.

        Exact, for one query: over exactly what it sees.
        """
        turn, end = context.turn, at + len(heads)
        begin = max(0, at + 1 - self.window)
        begin += (turn.rank - begin) % turn.ranks
        places = torch.arange(begin, max(begin, end), turn.ranks)
        rows = context.rows[begin - context.first : end - context.first : turn.ranks]
        inside = (places <= positions) & (places > positions - self.window)
        picked = picked[:, turn.rank :: turn.ranks]
        entries = context.entries[: picked.shape[1]]
        if exact:
            entries, picked = entries[picked[0]], picked[:, picked[0]]
        hidden = ~torch.cat((inside, picked), 1)
        keys = torch.cat((rows, entries))
        scores = heads @ keys.t() * self.head_dim**-0.5
        return Attended(*weigh(scores.masked_fill_(hidden.unsqueeze(1), -torch.inf), keys))

    def _pick(self, queries: _Queries, contexts: Sequence[_Context], visible: Tensor) -> Tensor:
        """`[T, E]`: of the visible entries those with the best scores, of equal ones the earlier.

        Many are equal: a score is 0 where no head of the index matches.
        """
        assert self.compressor is not None
        assert self.compressor.index is not None
        index, entries = self.compressor.index, visible.shape[1]
        if entries <= index.top:
            return visible
        assert queries.asking is not None
        assert queries.weights is not None
        scores = queries.weights.new_empty(visible.shape)
        for context in contexts:
            keys = context.keys[: context.turn.count(entries)]
            mine = index.scores(queries.asking, queries.weights, keys)
            scores[:, context.turn.rank :: context.turn.ranks] = mine
        scores = scores.masked_fill_(~visible, -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return torch.zeros_like(visible).scatter_(1, order[:, : index.top], 1) & visible


def _blocks(rows: slice, most: int) -> list[slice]:
    """The same rows, so many at a time."""
    return [slice(b, min(b + most, rows.stop)) for b in range(rows.start, rows.stop, most)]


def _read(cache: Rows, pages: Tensor, count: int) -> Tensor:
    """The first `count` rows `[count, n]` of a request's pages; none of the others is looked at."""
    of_page = cache.pages.shape[1]
    return cache.read(pages[: -(-count // of_page)]).flatten(0, 1)[:count]
