"""From chunks to index tensors: what every layer of one step needs, made once.

Rows are the tokens of all chunks, one after another. Decoding requests (chunks of one token) come
first, longest context first, so that a bucket of them is a slice:

    rows   | bucket 0 | bucket 1 | span 0 .......... | span 1 ...... |
             one row per request   a chunk's tokens

Of a sliding window only the blocks that a chunk reads are gathered; positions then count from the
first of these.

Of a transient group (pooling states) a step stores only the rows whose block has a page; it reads
none of the rows that it writes.

Where ranks take turns with the tokens, each has a plan of its own: what of the step's rows it
stores, and which of its own tokens, in their order, a query sees. Token p is the `p // ranks`-th of
rank `p % ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.core.layout import Geometry
from kvcache.core.records import StatePlan
from kvcache.core.specs.base import GroupRules
from kvcache.engine.chunk import Chunk
from kvcache.engine.ops import causal_bias

QUERY_BLOCK_TOKENS = 256
"""A chunk's queries are taken in blocks of this many, each with no more context than it needs."""

NOWHERE = -1
"""In a block table: of a transient group a block without a page, whose rows are not stored."""

BUCKET_RATIO = 2
"""A bucket's longest context has less than this many times the blocks of its shortest."""


class Reading(NamedTuple):
    """How layers read the pages of a group."""

    heads_per_row: int = 1
    """Query heads that share one row of K."""
    by_request: bool = False
    """One request after the other, also while decoding, and masked by the layer itself."""
    ranks: int = 1
    """Context-parallel ranks that take turns with the tokens of the group."""


class Turn(NamedTuple):
    """The tokens of one context-parallel rank."""

    rank: int = 0
    ranks: int = 1

    def count(self, tokens: int) -> int:
        """How many of the first so many tokens are this rank's."""
        return (tokens - self.rank + self.ranks - 1) // self.ranks


WHOLE = Turn()
"""One rank has all tokens."""


@dataclass(frozen=True)
class Bucket:
    """Decoding requests side by side. Where K and V are gathered, contexts are padded to one length."""

    rows: slice
    block_tables: NDArray[np.int32]
    """`[requests, blocks]`; a shorter request repeats its first page."""
    positions: NDArray[np.int64]
    """`[tokens of the blocks]`, from the first page on."""
    begin: NDArray[np.int64]
    """`[requests]`: the first token that is seen, from the first page on, ..."""
    end: NDArray[np.int64]
    """... and the one after the last."""

    @cached_property
    def pages(self) -> Tensor:
        """`[requests * blocks]`."""
        return torch.from_numpy(self.block_tables.ravel())

    @cached_property
    def bias(self) -> Tensor:
        """`[requests, 1, 1, tokens of the blocks]`: 0 inside what the token sees, -inf elsewhere."""
        begin, end = self.begin[:, None], self.end[:, None]
        hidden = torch.from_numpy((self.positions < begin) | (self.positions >= end))
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None, :]


@dataclass(frozen=True, slots=True)
class Span:
    """The chunk of one request in an attention group."""

    rows: slice
    pages: Tensor
    """`[blocks]` up to the chunk's end; of a window from the first block that is read. -1: no page."""
    context: int
    """Tokens up to the chunk's end, from the first page on."""
    first: int
    """Position of the first token of the first page."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One attention group in one step."""

    pages: Tensor
    """`[rows]`: the page of each stored token's K and V (-1: of a transient group, stored nowhere) ..."""
    offsets: Tensor
    """... and its place there."""
    buckets: list[Bucket]
    spans: list[Span]
    bias: Tensor | None
    """Bias of one query block with the longest context of the spans: causal, inside the window.
    None where there are no spans, the group is read by request, or ranks take turns."""
    gathered_pages: int
    """Most pages that a bucket, if it is not read in place, or a span gathers."""
    turn: Turn = WHOLE
    stored: Tensor | None = None
    """Which rows of the step `pages` and `offsets` are of: those of this rank. None: all."""

    def of_rank(self, rows: Tensor) -> Tensor:
        """Of a step's rows those that this rank stores."""
        return rows if self.stored is None else rows[self.stored]


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The chunk of one request in a recurrent group."""

    source: int
    """Page of the state before the first row, -1: zero."""
    segments: list[tuple[slice, int]]
    """Rows, and the page that takes the state after them."""


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """One recurrent group in one step: decoding requests all at once, then the spans."""

    rows: slice
    sources: Tensor
    """`[requests]`: page of the state before the token; any page where there is none."""
    fresh: Tensor
    """`[requests]`: there is none, the state is zero."""
    targets: Tensor
    spans: list[StateSpan]


Plans = Sequence[AttentionPlan | StatesPlan]
"""One group in one step: a plan for all ranks, or one for each that takes turns with the tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work for a model."""

    tokens: Tensor
    positions: Tensor
    last: Tensor
    """`[chunks]`: row of each chunk's last token, in the order of the chunks."""
    groups: list[Plans]


def make_batch(
    chunks: Sequence[Chunk],
    geometry: Geometry,
    readings: Sequence[Reading],
    *,
    by_request: bool = False,
) -> Batch:
    """The plan of one step for chunks that are known to be valid, at least one.

    Args:
        readings: of each group.
        by_request: decoding requests are taken one by one, as spans, in every group.
    """
    order = sorted(range(len(chunks)), key=lambda i: _place(i, chunks[i]))
    ordered = [chunks[i] for i in order]
    ends = np.cumsum([len(c.tokens) for c in ordered])
    rows = [slice(int(e) - len(c.tokens), int(e)) for e, c in zip(ends, ordered, strict=True)]
    positions = np.concatenate([np.arange(c.start, c.end) for c in ordered])
    last = np.empty(len(chunks), np.int64)
    last[order] = ends - 1
    return Batch(
        tokens=torch.from_numpy(np.concatenate([c.tokens for c in ordered])),
        positions=torch.from_numpy(positions),
        last=torch.from_numpy(last),
        groups=[
            [_plan_states(g, ordered, rows, 0 if by_request else _decoding(ordered))]
            if rules.kind == "state"
            else [
                _plan_attention(
                    g,
                    rules,
                    ordered,
                    rows,
                    reading._replace(by_request=by_request or reading.by_request),
                    Turn(rank, reading.ranks),
                )
                for rank in range(reading.ranks)
            ]
            for g, (rules, reading) in enumerate(zip(geometry.rules, readings, strict=True))
        ],
    )


def _place(index: int, chunk: Chunk) -> tuple[bool, int]:
    """Decoding requests first, longest context first; then chunks as they came."""
    decoding = len(chunk.tokens) == 1
    return (not decoding, -chunk.start if decoding else index)


def _decoding(chunks: Sequence[Chunk]) -> int:
    return sum(len(c.tokens) == 1 for c in chunks)


# ---- attention -------------------------------------------------------------------------------------


def _plan_attention(
    group: int,
    rules: GroupRules,
    chunks: Sequence[Chunk],
    rows: Sequence[slice],
    reading: Reading,
    turn: Turn,
) -> AttentionPlan:
    block = rules.block_tokens
    firsts = [first_block(rules, c.start) for c in chunks]
    tables = [_table(c, group, first, block) for c, first in zip(chunks, firsts, strict=True)]
    contexts = [c.end - first * block for c, first in zip(chunks, firsts, strict=True)]
    positions = [
        np.arange(context - len(c.tokens), context)
        for c, context in zip(chunks, contexts, strict=True)
    ]
    pages = np.concatenate([t[p // block] for t, p in zip(tables, positions, strict=True)])
    places = np.concatenate(positions) % block
    stored = None
    if turn.ranks > 1:
        (own,) = np.nonzero(places % turn.ranks == turn.rank)
        pages, places, stored = pages[own], places[own] // turn.ranks, torch.from_numpy(own)
    decoding = 0 if reading.by_request else _decoding(chunks)
    window = rules.lead_tokens + 1 if rules.kind == "span" else None
    spans = [
        Span(rows[i], torch.from_numpy(tables[i]), contexts[i], firsts[i] * block)
        for i in range(decoding, len(chunks))
    ]
    buckets = _buckets(tables[:decoding], contexts[:decoding], block, window, turn)
    gathered = [bucket.block_tables.size for bucket in buckets] + [len(s.pages) for s in spans]
    return AttentionPlan(
        pages=torch.from_numpy(pages),
        offsets=torch.from_numpy(places),
        buckets=buckets,
        spans=spans,
        bias=None
        if reading.by_request or turn.ranks > 1
        else _span_bias(chunks[decoding:], contexts[decoding:], reading.heads_per_row, window),
        gathered_pages=max(gathered),
        turn=turn,
        stored=stored,
    )


def first_block(rules: GroupRules, start: int) -> int:
    """The first block that a chunk from `start` on reads."""
    return rules.need_begin(start) // rules.block_tokens if rules.kind == "span" else 0


def _table(chunk: Chunk, group: int, first: int, block: int) -> NDArray[np.int64]:
    table = chunk.tables[group]
    assert table is not None
    return table[first : -(-chunk.end // block)].astype(np.int64)


def _span_bias(
    chunks: Sequence[Chunk], contexts: Sequence[int], heads_per_row: int, window: int | None
) -> Tensor | None:
    if not chunks:
        return None
    longest = max(len(c.tokens) for c in chunks)
    return causal_bias(min(QUERY_BLOCK_TOKENS, longest), max(contexts), heads_per_row, window)


def _buckets(
    tables: Sequence[NDArray[np.int64]],
    contexts: Sequence[int],
    block: int,
    window: int | None,
    turn: Turn,
) -> list[Bucket]:
    """Slices of the decoding requests, which come with the longest context first."""
    buckets, first = [], 0
    for i in range(1, len(tables) + 1):
        if i < len(tables) and len(tables[i]) * BUCKET_RATIO > len(tables[first]):
            continue
        blocks = max(map(len, tables[first:i]))
        pages = np.empty((i - first, blocks), np.int32)
        for row, table in zip(pages, tables[first:i], strict=True):
            row[: len(table)] = table
            row[len(table) :] = table[0]
        end = np.array(contexts[first:i], np.int64)
        begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
        positions = np.arange(turn.rank, blocks * block, turn.ranks)
        buckets.append(Bucket(slice(first, i), pages, positions, begin, end))
        first = i
    return buckets


# ---- recurrent state ---------------------------------------------------------------------------------


def _plan_states(
    group: int, chunks: Sequence[Chunk], rows: Sequence[slice], decoding: int
) -> StatesPlan:
    plans = [_state(c, group) for c in chunks]
    sources = np.array([p.source for p in plans[:decoding]], np.int64)
    targets = np.array([p.pages[-1] for p in plans[:decoding]], np.int64)
    return StatesPlan(
        rows=slice(0, decoding),
        sources=torch.from_numpy(sources.clip(min=0)),
        fresh=torch.from_numpy(sources < 0),
        targets=torch.from_numpy(targets),
        spans=[
            StateSpan(p.source, _segments(c, p, r.start))
            for c, p, r in zip(chunks[decoding:], plans[decoding:], rows[decoding:], strict=True)
        ],
    )


def _state(chunk: Chunk, group: int) -> StatePlan:
    plan = chunk.states[group]
    assert plan is not None
    return plan


def _segments(chunk: Chunk, plan: StatePlan, first_row: int) -> list[tuple[slice, int]]:
    ends = [first_row + int(p) - chunk.start for p in plan.positions]
    starts = [first_row, *ends[:-1]]
    return [(slice(a, b), int(page)) for a, b, page in zip(starts, ends, plan.pages, strict=True)]
