"""Fills an arena page by page, and looks at what goes when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laws.engine import Engine
from laws.grants import allocate
from laws.oracle import Key

MOST_FILLERS = 400
Snapshot = list[set[Key]]
"""What is resident, group by group."""


def squeeze(engine: Engine, first: int = 1000) -> Iterator[Snapshot]:
    """Requests of one token come and stay, until there is no space; what is resident after each."""
    for i in range(MOST_FILLERS):
        filler = engine.open([first + i])
        assert filler
        engine.lookup(filler)
        if allocate(engine, filler, 1) is None:
            return
        yield engine.resident()


def release(engine: Engine) -> None:
    """All requests and steps end."""
    while engine.steps:
        engine.end_step()
    for request in list(engine.requests):
        engine.abort(request)


class Chain:
    """One text, and what of it is resident in a snapshot. Positions are on the grid."""

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        self.oracle, self.text = engine.oracle, tuple(text)

    def _key(self, group: int, end: int) -> Key | None:
        return self.oracle.key(group, ("native", ""), self.text, end)

    def full_ends(self, group: int, there: Snapshot) -> list[int]:
        block = self.oracle.blocks[group]
        ends = range(block, len(self.text) + 1, block)
        return [end for end in ends if self._key(group, end) in there[group]]

    def prefix(self, there: Snapshot) -> int:
        """How far every full group reaches without a gap."""
        reach = len(self.text)
        for g in self.oracle.full:
            ends, block = set(self.full_ends(g, there)), self.oracle.blocks[g]
            at = 0
            while at + block in ends:
                at += block
            reach = min(reach, at)
        return reach

    def tail(self, there: Snapshot) -> int:
        """Where the last resident full block ends, gaps or not."""
        return max((max(self.full_ends(g, there), default=0) for g in self.oracle.full), default=0)

    def has(self, group: int, end: int, there: Snapshot) -> bool:
        return self._key(group, end) in there[group]

    def complete(self, position: int, there: Snapshot) -> bool:
        """Does every sparse group have what a hit at a grid point reads?"""
        return all(
            self.has(g, end, there)
            for g in self.oracle.sparse
            for end in self.oracle.needs(g, position)
        )

    def shares(self, other: Chain) -> int:
        """Tokens that both begin with."""
        pairs = zip(self.text, other.text, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.text), len(other.text))
        )

    def points(self) -> range:
        return range(self.oracle.grid, len(self.text) + 1, self.oracle.grid)
