"""An oracle for soundness: a runner whose KV says for which prefix it was written.

Each token's KV is a stamp (hash of the prefix up to and with it, position, token), each state the
stamp (hash of its prefix, position). A chunk reads the stamps of everything before it and checks
that they are one unbroken chain of positions and tokens, equal in every group; its next token is a
pure function of the whole prefix, so that `expected_output` knows the answer without any cache.

All chunks of a batch read before any of them writes: a hit on what the same step writes is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.base import PageRegion
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention, RecurrentState
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


def stamp_geometry(*blocks: int, states: int = 0) -> Geometry:
    """Attention groups of the given block sizes, then `states` recurrent ones."""
    attention = [
        FullAttention(
            name=f"attention{i}", layers=1, kv_heads=1, head_dim=3, block_tokens=b, element_bytes=4
        )
        for i, b in enumerate(blocks)
    ]
    recurrent = [
        RecurrentState(name=f"state{i}", layers=1, state_bytes_per_layer=16) for i in range(states)
    ]
    return Geometry((*attention, *recurrent))


class StampRunner:
    def __init__(self, geometry: Geometry, pages: Sequence[int], context: int = 100_000) -> None:
        self.geometry = geometry
        self.vocab_size = VOCAB
        self.context_tokens = context
        self.steps: list[list[tuple[int, int]]] = []
        """[start, end) of each chunk of each step."""
        self.memory: list[NDArray[np.uint64]] = [
            np.zeros((n, spec.page_bytes // 8), np.uint64)
            for n, spec in zip(pages, geometry.groups, strict=True)
        ]

    @property
    def step_tokens(self) -> list[int]:
        """Tokens computed in each step."""
        return [sum(end - start for start, end in step) for step in self.steps]

    def regions(self) -> list[PageRegion]:
        return [
            PageRegion(m.ctypes.data, spec.page_bytes, len(m))
            for m, spec in zip(self.memory, self.geometry.groups, strict=True)
        ]

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        self.steps.append([(c.start, c.end) for c in chunks])
        before = [self._read(c) for c in chunks]
        written: set[tuple[int, int, int]] = set()
        last = [self._write(c, value, written) for c, value in zip(chunks, before, strict=True)]
        return np.array([sample(value) for value in last], np.int32)

    def _slots(self, group: int, chunk: Chunk) -> NDArray[np.uint64]:
        block = self.geometry.block_tokens[group]
        return self.memory[group].reshape(len(self.memory[group]), block, 3)

    def _read(self, chunk: Chunk) -> int:
        assert len(chunk.tokens) > 0
        if chunk.start == 0:
            for plan in chunk.states:
                assert plan is None or plan.source == -1, "a state before the first token"
            return SEED
        seen: set[int] = set()
        for g, spec in enumerate(self.geometry.groups):
            if isinstance(spec, FullAttention):
                seen.add(self._read_attention(g, chunk))
            else:
                plan = chunk.states[g]
                assert plan is not None
                assert plan.source >= 0, f"no state at {chunk.start}"
                value, position = (int(v) for v in self.memory[g][plan.source])
                assert position == chunk.start, f"state of {position}, wanted {chunk.start}"
                seen.add(value)
        assert len(seen) == 1, f"groups disagree on the prefix of {chunk.start} tokens"
        return seen.pop()

    def _read_attention(self, group: int, chunk: Chunk) -> int:
        block = self.geometry.block_tokens[group]
        positions = np.arange(chunk.start)
        table = chunk.tables[group]
        assert table is not None
        stamps = self._slots(group, chunk)[table[positions // block], positions % block]
        hashes, where, tokens = stamps.T
        assert np.array_equal(where, positions.astype(np.uint64)), "KV of other positions"
        before = np.concatenate(([np.uint64(SEED)], hashes[:-1]))
        chain = before * np.uint64(STEP) + tokens + np.uint64(1)
        assert np.array_equal(chain, hashes), "KV of another prefix"
        return int(hashes[-1])

    def _write(self, chunk: Chunk, value: int, written: set[tuple[int, int, int]]) -> int:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for g, plan in enumerate(chunk.states):
            for position, page in zip(plan.positions, plan.pages, strict=True) if plan else ():
                wanted.setdefault(int(position), []).append((g, int(page)))
        for offset, token in enumerate(chunk.tokens):
            position = chunk.start + offset
            value = extend_hash(value, token)
            for g, spec in enumerate(self.geometry.groups):
                table = chunk.tables[g]
                if isinstance(spec, FullAttention) and table is not None:
                    page, slot = (
                        int(table[position // spec.block_tokens]),
                        position % (spec.block_tokens),
                    )
                    assert (g, page, slot) not in written, "two requests write one slot"
                    written.add((g, page, slot))
                    self._slots(g, chunk)[page, slot] = (value, position, int(token))
            for g, page in wanted.pop(position + 1, ()):
                self.memory[g][page] = (value, position + 1)
        assert not wanted, f"states at {sorted(wanted)} lie outside the chunk"
        return value
