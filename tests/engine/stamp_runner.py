"""An oracle for soundness: a runner whose KV says for which prefix it was written.

Each token's KV is a stamp (hash of the prefix up to and with it, position, token), each state the
stamp (hash of its prefix, position). A chunk reads the stamps of everything before it (of a window
those inside it) and checks that they are one unbroken chain of positions and tokens, equal in every
group; its next token is a pure function of the whole prefix, so that `expected_output` knows the
answer without any cache.

All chunks of a batch read before any of them writes: a hit on what the same step writes is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.arena_regions import arena_regions
from kvcache.connectors.base import PageRegion
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState, SlidingWindow
from kvcache.engine.chunk import Chunk

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
SEED = 0x243F6A8885A308D3
VOCAB = 1 << 20


def extend_hash(value: int, token: int) -> int:
    return (value * STEP + int(token) + 1) & MASK


def sample(value: int) -> int:
    return (value ^ value >> 31) * STEP >> 40 & (VOCAB - 1)


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    value, out = SEED, []
    for token in prompt:
        value = extend_hash(value, token)
    for _ in range(count):
        out.append(sample(value))
        value = extend_hash(value, out[-1])
    return out


STATE_BYTES = 768
"""Two pages of 16 tokens: slabs change hands between groups."""


def stamp_geometry(*blocks: int, states: int = 0, window: int = 0, drafts: int = 0) -> Geometry:
    """Attention groups of the given block sizes, a window if any, then `states` recurrent ones.

    `drafts`: so many guessed tokens at a time, and a draft group behind the others.
    """
    attention = [
        FullAttention(
            name=f"attention{i}", layers=1, kv_heads=1, head_dim=3, block_tokens=b, element_bytes=4
        )
        for i, b in enumerate(blocks)
    ]
    windows = [
        SlidingWindow(
            name=f"window{w}", layers=1, kv_heads=1, head_dim=3, window=w,
            block_tokens=min(blocks), element_bytes=4,
        )
        for w in ([window] if window else [])
    ]  # fmt: skip
    recurrent = [
        RecurrentState(
            name=f"state{i}", layers=1, state_bytes_per_layer=STATE_BYTES, speculative_tokens=drafts
        )
        for i in range(states)
    ]
    draft = [
        FullAttention(
            name="draft", layers=1, kv_heads=1, head_dim=3, block_tokens=min(blocks),
            element_bytes=4, lookahead_tokens=1,
        )
        for _ in range(drafts > 0)
    ]  # fmt: skip
    return Geometry((*attention, *windows, *recurrent, *draft))


def slabs_for(geometry: Geometry, pages: Sequence[int]) -> int:
    """An arena with room for so many pages of each group, whichever slabs they lie in."""
    of_class = [0] * len(geometry.pages_per_slab)
    for count, c in zip(pages, geometry.class_of_group, strict=True):
        of_class[c] += count
    return sum(-(-n // k) for n, k in zip(of_class, geometry.pages_per_slab, strict=True))


class StampRunner:
    def __init__(self, geometry: Geometry, slabs: int, context: int = 100_000) -> None:
        self.geometry = geometry
        self.vocab_size = VOCAB
        self.context_tokens = context
        self.steps: list[list[tuple[int, int]]] = []
        """[start, end) of each chunk of each step."""
        self.moved_pages = 0
        self.arena = np.zeros(slabs * geometry.slab_bytes // 8, np.uint64)
        self.classes = [self.arena.reshape(-1, s // 8) for s in geometry.stride_bytes]
        self.memory = [
            self.classes[c][:, : spec.page_bytes // 8]
            for spec, c in zip(geometry.groups, geometry.class_of_group, strict=True)
        ]

    @property
    def step_tokens(self) -> list[int]:
        """Tokens computed in each step."""
        return [sum(end - start for start, end in step) for step in self.steps]

    def regions(self) -> list[PageRegion]:
        slabs = self.arena.nbytes // self.geometry.slab_bytes
        return arena_regions(self.geometry, address=self.arena.ctypes.data, slabs=slabs)

    def move_pages(self, moves: NDArray[np.void]) -> None:
        self.moved_pages += len(moves)
        for size_class, source, target in moves.tolist():
            self.classes[size_class][target] = self.classes[size_class][source]

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        self.steps.append([(c.start, c.end) for c in chunks])
        before = [self._read(c) for c in chunks]
        written: set[tuple[int, int, int]] = set()
        last = [self._write(c, value, written) for c, value in zip(chunks, before, strict=True)]
        return np.array([sample(value) for value in last], np.int32)

    def _slots(self, group: int) -> NDArray[np.uint64]:
        pages = self.memory[group]
        return np.lib.stride_tricks.as_strided(
            pages, (len(pages), self.geometry.block_tokens[group], 3), (pages.strides[0], 24, 8)
        )

    def _read(self, chunk: Chunk) -> int:
        assert len(chunk.tokens) > 0
        if chunk.start == 0:
            for plan in chunk.states:
                assert plan is None or plan.source == -1, "a state before the first token"
            return SEED
        seen: set[int] = set()
        for g, rules in enumerate(self.geometry.rules):
            if rules.lookahead_tokens:
                continue
            if rules.kind != "state":
                seen.update(self._read_attention(g, chunk))
            else:
                plan = chunk.states[g]
                assert plan is not None
                assert plan.source >= 0, f"no state at {chunk.start}"
                value, position = (int(v) for v in self.memory[g][plan.source][:2])
                assert position == chunk.start, f"state of {position}, wanted {chunk.start}"
                seen.add(value)
        assert len(seen) == 1, f"groups disagree on the prefix of {chunk.start} tokens"
        return seen.pop()

    def _read_attention(self, group: int, chunk: Chunk) -> list[int]:
        """The last stamp; none of a window that sees its own token only."""
        block, rules = self.geometry.block_tokens[group], self.geometry.rules[group]
        begin = rules.need_begin(chunk.start) if rules.kind == "span" else 0
        positions = np.arange(begin, chunk.start)
        table = chunk.tables[group]
        assert table is not None
        stamps = self._slots(group)[table[positions // block], positions % block]
        hashes, where, tokens = stamps.T
        assert np.array_equal(where, positions.astype(np.uint64)), "KV of other positions"
        before = np.concatenate(([np.uint64(SEED)], hashes[:-1]))
        chain = before * np.uint64(STEP) + tokens + np.uint64(1)
        assert np.array_equal(chain[begin > 0 :], hashes[begin > 0 :]), "KV of another prefix"
        return [int(h) for h in hashes[-1:]]

    def _write(self, chunk: Chunk, value: int, written: set[tuple[int, int, int]]) -> int:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for g, plan in enumerate(chunk.states):
            for position, page in zip(plan.positions, plan.pages, strict=True) if plan else ():
                wanted.setdefault(int(position), []).append((g, int(page)))
        for offset, token in enumerate(chunk.tokens):
            position = chunk.start + offset
            value = extend_hash(value, token)
            for g, (rules, table) in enumerate(zip(self.geometry.rules, chunk.tables, strict=True)):
                if rules.kind != "state" and table is not None and not rules.lookahead_tokens:
                    page, slot = (
                        int(table[position // rules.block_tokens]),
                        position % (rules.block_tokens),
                    )
                    assert (g, page, slot) not in written, "two requests write one slot"
                    written.add((g, page, slot))
                    self._slots(g)[page, slot] = (value, position, int(token))
            for g, page in wanted.pop(position + 1, ()):
                self.memory[g][page][:2] = (value, position + 1)
        assert not wanted, f"states at {sorted(wanted)} lie outside the chunk"
        return value
