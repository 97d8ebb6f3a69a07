"""What lies in simulated pages: one stamp each, in place of their bytes.

The stamp of a page whose block is complete is the last token of that block. Tokens of simulated
requests name the prefix that ends in their block, so equal stamps mean equal prefixes; 0 says that
nothing is known. Stamps move, are stored and loaded with their pages, and every prefill chunk
compares those before it: a wrong byte of a real engine would be a wrong stamp here.
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
        self._classes = [np.zeros(slabs * n, np.int32) for n in geometry.pages_per_slab]
        self._slots = [np.zeros(n, np.int32) for n in slots]
        self._spans = [
            (group, rules, geometry.class_of_group[group])
            for group, rules in enumerate(geometry.rules)
            if rules.kind in {"full", "span"} and not rules.transient
        ]

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
        tokens = chunk.tokens.base
        assert tokens is not None, "chunks are views of their request's tokens"
        for group, rules, size_class in self._spans:
            block, table = rules.block_tokens, chunk.tables[group]
            assert table is not None
            first = -(-rules.need_begin(chunk.start) // block) if rules.kind == "span" else 0
            last = chunk.start // block
            found = self._classes[size_class][table[first:last]]
            wanted = tokens[(first + 1) * block - 1 : last * block : block]
            wrong = np.flatnonzero((found != wanted) & (wanted != 0))
            if len(wrong):
                at = int(wrong[0])
                raise InvariantError(
                    f"group {self._geometry.groups[group].name!r}: page {int(table[first + at])}, read as"
                    f" block {first + at}, holds prefix {int(found[at])} and not {int(wanted[at])}"
                )
            self.compared += len(found)

    def _write(self, chunk: Chunk) -> None:
        tokens, start, end = chunk.tokens.base, chunk.start, chunk.end
        assert tokens is not None
        for group, rules, size_class in self._spans:
            block, table = rules.block_tokens, chunk.tables[group]
            assert table is not None
            first, last = start // block, end // block
            stamps = self._classes[size_class]
            stamps[table[first:last]] = tokens[(first + 1) * block - 1 : last * block : block]
            if end % block:
                stamps[table[last]] = 0

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
