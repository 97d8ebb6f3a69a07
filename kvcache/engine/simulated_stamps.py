"""What lies in simulated pages: one stamp each, in place of their bytes.

The stamp of a page is the token that its content ends with, and how many tokens that are from the
begin: of a page of tokens the last one written, of a recurrent state the last one in it. Tokens of
simulated requests name the prefix that ends in their block, so equal stamps mean equal prefixes;
token 0 says that nothing is known. Stamps move, are stored and loaded with their pages, and every
prefill chunk compares those that it reads: a wrong byte of a real engine would be a wrong stamp here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.core.errors import InvariantError
from kvcache.core.layout import Geometry
from kvcache.engine.chunk import Chunk


class PageStamps:
    """Stamps of the device pages of an arena, and of a tier's slots.

    Args:
        geometry: the groups.
        slabs: of the arena.
        slots: of the tier, for each group; empty: there is none.

    Attributes:
        compared: stamps that were found right so far.
    """

    def __init__(self, geometry: Geometry, slabs: int, slots: Sequence[int] = ()) -> None:
        self.compared = 0
        self._geometry = geometry
        self._classes = [np.zeros((slabs * n, 2), np.int64) for n in geometry.pages_per_slab]
        """For each page the token that its content ends with, and where it ends."""
        self._slots = [np.zeros((n, 2), np.int64) for n in slots]

    def compute(self, chunks: Sequence[Chunk]) -> None:
        """Compare what the chunks read, then write what they compute. O(blocks of their contexts).

        Raises:
            InvariantError: a page that a chunk reads holds another prefix.
        """
        for chunk in chunks:
            if len(chunk.tokens) > 1:
                self._compare(chunk)
        for chunk in chunks:
            self._write(chunk)

    def _compare(self, chunk: Chunk) -> None:
        tokens, start = chunk.tokens.base, chunk.start
        assert tokens is not None, "chunks are views of their request's tokens"
        for group, rules in enumerate(self._geometry.rules):
            if rules.kind in {"full", "span"}:
                table, block = chunk.tables[group], rules.block_tokens
                assert table is not None
                first = rules.need_begin(start) // block if rules.kind == "span" else 0
                last = -(-start // block)
                ends = np.minimum(np.arange(first + 1, last + 1) * block, start)
                self._require(group, table[first:last], tokens, ends, f"block {first} and on")
            elif rules.kind == "state" and start:
                plan = chunk.states[group]
                assert plan is not None
                source, ends = np.array([plan.source], np.int32), np.array([start])
                self._require(group, source, tokens, ends, "state")

    def _require(
        self,
        group: int,
        pages: NDArray[np.int32],
        tokens: NDArray[np.int32],
        ends: NDArray[np.int64],
        role: str,
    ) -> None:
        found = self._classes[self._geometry.class_of_group[group]][pages]
        wanted = tokens[ends - 1]
        named = (wanted != 0) & (found[:, 0] != wanted)
        wrong = np.flatnonzero(named | (found[:, 1] != ends) | (pages < 0))
        if len(wrong):
            at = int(wrong[0])
            name = self._geometry.groups[group].name
            raise InvariantError(
                f"group {name!r}: page {int(pages[at])}, number {at} read as {role}, holds the"
                f" {int(found[at, 1])} tokens of prefix {int(found[at, 0])}, not the {int(ends[at])}"
                f" of {int(wanted[at])}"
            )
        self.compared += len(found)

    def _write(self, chunk: Chunk) -> None:
        tokens, start, end = chunk.tokens.base, chunk.start, chunk.end
        assert tokens is not None
        for group, rules in enumerate(self._geometry.rules):
            if rules.kind in {"full", "span"}:
                table, block = chunk.tables[group], rules.block_tokens
                assert table is not None
                first, last = start // block, -(-end // block)
                pages = table[first:last]
                ends = np.minimum(np.arange(first + 1, last + 1) * block, end)
            elif rules.kind == "state":
                plan = chunk.states[group]
                assert plan is not None
                pages, ends = plan.pages, plan.positions
            else:
                continue
            there = pages >= 0
            stamps = self._classes[self._geometry.class_of_group[group]]
            stamps[pages[there]] = np.stack([tokens[ends - 1], ends], axis=1)[there]

    def move(self, moves: NDArray[np.void]) -> None:
        """Cached pages change their place, one after the other."""
        for size_class, source, target in moves.tolist():
            stamps = self._classes[size_class]
            stamps[target] = stamps[source]

    def store(self, group: int, pages: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """From device pages into slots."""
        self._slots[group][slots] = self._classes[self._geometry.class_of_group[group]][pages]

    def load(self, group: int, pages: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """From slots into device pages."""
        self._classes[self._geometry.class_of_group[group]][pages] = self._slots[group][slots]
