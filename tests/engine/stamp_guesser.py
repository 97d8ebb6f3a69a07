"""A stamp runner that guesses: right, or wrong now and then, and stamps what its draft model reads.

Row t of the draft group has the stamp (hash of the prefix up to and with token t + 1, t, token
t + 1): before a chunk is computed every row before it must have it, or be zero where a hit had
nothing for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from engine.stamp_runner import VOCAB, StampRunner, extend_hash, sample
from numpy.typing import NDArray

from kvcache.core.layout import Geometry
from kvcache.engine.chunk import Chunk, Guesses

DRAFT_TOKENS = 3


class StampGuesser(StampRunner):
    def __init__(self, geometry: Geometry, slabs: int, context: int = 100_000) -> None:
        super().__init__(geometry, slabs, context)
        self.draft_tokens = DRAFT_TOKENS
        self.rng = random.Random(0)
        self.draft = len(geometry.groups) - 1
        self.holes = 0

    def clear_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        assert group == self.draft
        self.holes += len(pages)
        for page in pages.tolist():
            self.memory[group][page] = 0

    def run_guessing(self, chunks: Sequence[Chunk]) -> list[Guesses]:
        self.steps.append([(c.start, c.end + c.drafts) for c in chunks])
        values = [self._read(c) for c in chunks]
        for chunk in chunks:
            self._read_draft(chunk)
        written: set[tuple[int, int, int]] = set()
        return [self._compute(c, v, written) for c, v in zip(chunks, values, strict=True)]

    def _compute(self, chunk: Chunk, value: int, written: set[tuple[int, int, int]]) -> Guesses:
        after = value
        for token in chunk.tokens:
            after = extend_hash(after, token)
        guesses, right, here = [], [sample(after)], after
        for i in range(chunk.drafts):
            guesses.append(chunk.guess if i == 0 else self._guess(here))
            here = extend_hash(here, guesses[-1])
            if len(right) == i + 1 and guesses[-1] == right[-1]:
                right.append(sample(here))
        tokens = np.append(chunk.tokens, guesses).astype(np.int32)
        self._write(replace(chunk, tokens=tokens), value, written)
        known = [*chunk.tokens.tolist(), *(right if chunk.following < 0 else [chunk.following])]
        self._write_draft(chunk, value, known)
        for token in known[len(chunk.tokens) :]:
            after = extend_hash(after, token)
        return Guesses(np.array(right, np.int32), self._guess(after))

    def _guess(self, value: int) -> int:
        right = sample(value)
        return right if self.rng.random() < 0.7 else (right + 1) % VOCAB

    def _write_draft(self, chunk: Chunk, value: int, known: list[int]) -> None:
        table = chunk.tables[self.draft]
        assert table is not None
        block = self.geometry.block_tokens[self.draft]
        value = extend_hash(value, known[0])
        for i, token in enumerate(known[1:]):
            value = extend_hash(value, token)
            position = chunk.start + i
            row = self._slots(self.draft)[int(table[position // block]), position % block]
            row[:] = (value, position, token)

    def _read_draft(self, chunk: Chunk) -> None:
        table, block = chunk.tables[self.draft], self.geometry.block_tokens[self.draft]
        first, first_block = chunk.tables[0], self.geometry.block_tokens[0]
        assert table is not None
        assert first is not None
        at = np.arange(chunk.start)
        rows = self._slots(self.draft)[table[at // block], at % block]
        ours = self._slots(0)[first[at // first_block], at % first_block]
        following = np.append(ours[1:, 2], chunk.tokens[:1].astype(np.uint64))[: chunk.start]
        hashes = ours[:, 0] * np.uint64(0x9E3779B97F4A7C15) + following + np.uint64(1)
        wanted = np.stack([hashes, at.astype(np.uint64), following], axis=1)
        there = rows.any(axis=1)
        assert np.array_equal(rows[there], wanted[there]), "a draft row of another prefix"
