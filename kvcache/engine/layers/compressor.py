"""Pooling of tokens into entries, and the index that picks entries: the growing part of compressed layers.

An entry stands for `ratio` tokens. With overlap each token is projected twice, once for its own
entry and once for the next one (DeepSeek V4, ratio 4; without: its ratio 128):

    tokens       0 1 2 3 | 4 5 6 7 | 8 9 ...
    entry 0      b b b b
    entry 1      a a a a   b b b b
    entry 2                a a a a   b b ...

    entry = rotated(norm(sum over its rows of softmax(gate + bias) * value)), per channel

Formulas: the DeepSeek-V4 report, section 2.3, as `DeepseekV4CSACompressor`, `DeepseekV4HCACompressor`
and `DeepseekV4Indexer` of transformers have them, against which this is tested.

Shapes: T = tokens, E = entries, D = their elements, S = series (2 with overlap, else 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.engine.ops import Ops, rms_norm


@dataclass(frozen=True, eq=False)
class Series:
    """What one kind of entries is pooled from."""

    value: Tensor
    """`[S * D, width]`: for the next entry (with overlap), then for a token's own."""
    gate: Tensor
    """`[S * D, width]`."""
    bias: Tensor
    """`[ratio, S * D]`, by a token's place in its entry."""
    norm: Tensor
    """`[D]`."""

    @property
    def elements(self) -> int:
        """D."""
        return len(self.norm)

    @property
    def row_elements(self) -> int:
        """Of one token's pooling row."""
        return 2 * len(self.value)

    def rows(self, x: Tensor, ops: Ops) -> Tensor:
        """Pooling rows `[T, row_elements]`: values, then gates."""
        return torch.cat((ops.linear(x, self.value), ops.linear(x, self.gate)), -1)

    def pool(self, rows: Tensor, epsilon: float, *, exact: bool) -> Tensor:
        """Entries `[E, D]`, neither rotated, from rows `[S, E, ratio, row_elements]`.

        The first of two series are the rows of the entry before. Exact: one entry at a time.
        """
        if exact and rows.shape[1] > 1:
            each = rows.unsqueeze(1).unbind(2)
            return torch.cat([self.pool(one.contiguous(), epsilon, exact=True) for one in each])
        value, gate = rows.chunk(2, dim=-1)
        gate = gate + self.bias
        if len(rows) == 2:
            low, high = slice(0, self.elements), slice(self.elements, None)
            value = torch.cat((value[0, ..., low], value[1, ..., high]), 1)
            gate = torch.cat((gate[0, ..., low], gate[1, ..., high]), 1)
        else:
            value, gate = value[0], gate[0]
        return rms_norm((value * gate.softmax(1)).sum(1), self.norm, epsilon)


@dataclass(frozen=True, eq=False)
class Index:
    """Picks the entries that a query reads."""

    series: Series
    """Of the index keys; they lie beside the entries."""
    query: Tensor
    """`[heads * D, q_rank]`."""
    weight: Tensor
    """`[heads, width]`: how much each head counts."""
    top: int
    """Entries that a query reads at most."""

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """`[T, E]` of rotated queries `[T, heads, D]`, weights `[T, heads]`, keys `[E, D]`."""
        scale: float = (keys.shape[1] * len(self.weight)) ** -0.5
        return (torch.relu(queries @ keys.t()) * weights.unsqueeze(-1)).sum(1) * scale


@dataclass(frozen=True, eq=False)
class Compressor:
    """Entries of one layer, with an index or without (then a query reads all of them)."""

    ratio: int
    series: Series
    index: Index | None

    @property
    def parts(self) -> tuple[Series, ...]:
        """What is pooled side by side."""
        return (self.series,) if self.index is None else (self.series, self.index.series)

    @property
    def overlap(self) -> bool:
        """Whether an entry pools the tokens of the one before too."""
        return len(self.series.value) == 2 * self.series.elements

    @property
    def row_elements(self) -> int:
        """Of one token's pooling row, all parts."""
        return sum(part.row_elements for part in self.parts)

    @property
    def entry_elements(self) -> int:
        """Of one entry and its index key."""
        return sum(part.elements for part in self.parts)

    def rows(self, x: Tensor, ops: Ops) -> Tensor:
        """Pooling rows `[T, row_elements]` of a step's tokens."""
        return torch.cat([part.rows(x, ops) for part in self.parts], -1)

    def entries(
        self,
        rows: Tensor,
        first: int,
        numbers: range,
        mine: slice,
        *,
        rotation: Tensor,
        epsilon: float,
        ops: Ops,
    ) -> Tensor:
        """Entries `[E, entry_elements]`: `mine` of those that `rows` complete.

        Their place in the text is that of their first token.

        Args:
            rows: the pooling rows from token `first` on.
            numbers: neighbouring entries.
        """
        end = numbers.stop * self.ratio - first
        own = self._windows(rows[numbers.start * self.ratio - first : end])
        windows = [own]
        if self.overlap:
            begin = (numbers.start - 1) * self.ratio - first
            before = self._windows(rows[max(0, begin) : end - self.ratio])
            if begin < 0:
                before = torch.cat((self._nothing(rows), before))
            windows = [before, own]
        wanted = torch.stack(windows)[:, mine]
        split = torch.split(wanted, [p.row_elements for p in self.parts], dim=-1)
        turns = rotation[numbers.start * self.ratio : numbers.stop * self.ratio : self.ratio][mine]
        pooled = []
        for part, its in zip(self.parts, split, strict=True):
            entries = part.pool(its, epsilon, exact=ops.exact)
            ops.rotate_(entries[:, None, part.elements - 2 * turns.shape[1] :], turns)
            pooled.append(entries)
        return torch.cat(pooled, -1)

    def _windows(self, rows: Tensor) -> Tensor:
        """`[E, ratio, n]`."""
        return torch.unflatten(rows, 0, (-1, self.ratio))

    def _nothing(self, rows: Tensor) -> Tensor:
        """What the first entry finds before it: values of 0 with no weight, `[1, ratio, n]`."""
        empty = [
            torch.cat((rows.new_zeros(n), rows.new_full((n,), -torch.inf)))
            for n in (part.row_elements // 2 for part in self.parts)
        ]
        return torch.cat(empty).expand(1, self.ratio, -1)
