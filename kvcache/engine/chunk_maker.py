"""From the scheduler's work to the runner's chunks: page tables, state plans, drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.core.manager import Manager
from kvcache.engine.chunk import Chunk, Guesser
from kvcache.engine.request import PageTable, Request
from kvcache.engine.scheduler import Work


class ChunkMaker:
    """Makes chunks. Keeps nothing but the tables of each request, in the request.

    Args:
        guesser: the runner, where it speculates.
    """

    def __init__(self, manager: Manager, guesser: Guesser | None) -> None:
        rules = manager.geometry.rules
        self._manager = manager
        self._guesser = guesser
        self._kinds = [each.kind for each in rules]
        self._draft_groups = [g for g, each in enumerate(rules) if each.lookahead_tokens]

    def chunk(self, work: Work) -> Chunk:
        """The chunk of some work of this step, after its grant."""
        request, manager = work.request, self._manager
        sure = work.end - work.drafts
        if request.adopted and self._draft_groups:
            self._clear_holes(request)
        request.adopted = False
        return Chunk(
            tokens=request.tokens[work.start : sure],
            start=work.start,
            tables=[
                None if kind == "state" else self._table(request, g, work.end)
                for g, kind in enumerate(self._kinds)
            ],
            states=[
                manager.state_plan(request.id, g) if kind == "state" else None
                for g, kind in enumerate(self._kinds)
            ],
            following=int(request.tokens[sure]) if sure < request.known else -1,
            drafts=work.drafts,
            guess=request.guess,
        )

    def _clear_holes(self, request: Request) -> None:
        """Blocks of draft groups inside a hit that nobody had: they hold what was there before."""
        assert self._guesser is not None
        for group in self._draft_groups:
            holes = self._manager.draft_holes(request.id, group)
            if holes:
                pages = self._manager.block_table(request.id, group)[holes]
                self._guesser.clear_pages(group, pages)

    def _table(self, request: Request, group: int, end: int) -> NDArray[np.int32]:
        """Pages up to token `end`. Copies only those that came since the last call.

        What a span group gave up in the meantime stays in the table: nobody reads it there.
        """
        block = self._manager.geometry.block_tokens[group]
        if not block:  # private pages
            return self._manager.block_table(request.id, group)
        if group not in request.tables:
            request.tables[group] = PageTable(-(-len(request.tokens) // block))
        table = request.tables[group]
        if -(-end // block) > len(table):
            table.append(self._manager.block_table(request.id, group, len(table)))
        return table.pages

    def cut_tables(self, request: Request) -> None:
        """After drafts: pages of wrong guesses are not the request's any more."""
        for group, table in request.tables.items():
            rules = self._manager.geometry.rules[group]
            blocks = -(-request.computed // rules.block_tokens)
            table.cut(0 if rules.transient else blocks)
