"""Drives a runner as a scheduler does: block tables, state pages, chunk plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.bench.paged import hand_out
from kvcache.core.records import StatePlan
from kvcache.engine.chunk import Chunk
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner


class Runner(TorchRunner):
    """A runner whose groups have slabs of their own, so that each counts its pages from 0."""

    def __init__(self, model: Model, pages: Sequence[int]) -> None:
        slabs, numbers = hand_out(model.geometry, pages)
        super().__init__(model, slabs)
        self.first = [int(n[0]) for n in numbers]
        """Number of each group's page 0 in the arena."""
        self.counts = list(pages)

    def pages(self, group: int, rank: int = 0) -> torch.Tensor:
        """`[pages, page_bytes]`: those that the group was given."""
        first = self.first[group]
        return self.storages[rank].raw[group][first : first + self.counts[group]]


class Request:
    """One request: which pages it has, and how far it is. Of each group they count from 0."""

    def __init__(self, runner: Runner, tables: Sequence[Sequence[int]], state: int = 0) -> None:
        self.runner = runner
        self.tables = [np.array(t, np.int32) for t in tables]
        self.state = state
        """Page of its running state."""
        self.source = -1
        self.done = 0

    def chunk(self, tokens: NDArray[np.int32], snapshots: dict[int, int] | None = None) -> Chunk:
        """The next chunk; `snapshots`: position -> page that takes the state there."""
        start, end = self.done, self.done + len(tokens)
        stops = {p: page for p, page in (snapshots or {}).items() if start < p <= end}
        stops.setdefault(end, self.state)
        positions = sorted(stops)
        targets = np.array([stops[p] for p in positions], np.int32)
        tables: list[NDArray[np.int32] | None] = []
        states: list[StatePlan | None] = []
        attention = iter(self.tables)
        for rules, first in zip(self.runner.geometry.rules, self.runner.first, strict=True):
            state = rules.kind == "state"
            tables.append(None if state else next(attention) + np.int32(first))
            source = self.source + first if self.source >= 0 else -1
            plan = StatePlan(source, np.array(positions, np.int64), targets + np.int32(first))
            states.append(plan if state else None)
        self.done, self.source = end, stops[end]
        return Chunk(tokens, start, tables, states)


def pages_for(model: Model, tokens: int, requests: int = 1, states: int = 16) -> list[int]:
    """Pool sizes with room to spare."""
    return [
        states if r.kind == "state" else requests * (-(-tokens // r.block_tokens) + 1)
        for r in model.geometry.rules
    ]


def new_sequence(model: Model, tokens: int, seed: int | None = None, fill: float = 0.0) -> Request:
    """A request alone on a runner of its own; `seed` shuffles its pages, `fill` was in them."""
    pages = pages_for(model, tokens)
    runner = Runner(model, pages)
    for storage in runner.storages:
        storage.arena.view(torch.float32).fill_(fill)
    rng = np.random.default_rng(seed)
    orders = [np.arange(count) if seed is None else rng.permutation(count) for count in pages]
    kinds = [rules.kind for rules in model.geometry.rules]
    tables = [order.tolist() for order, kind in zip(orders, kinds, strict=True) if kind != "state"]
    return Request(runner, tables, state=int(orders[0][0]) % 16)


def run(
    sequence: Request, tokens: NDArray[np.int32], cuts: Iterable[int] = (),
    snapshots: dict[int, int] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Logits after each chunk of `tokens`, which follow what the request has; cut at positions."""
    first = sequence.done
    edges = [*(c for c in cuts if first < c < first + len(tokens)), first + len(tokens)]
    out = []
    for end in edges:
        part = tokens[sequence.done - first : end - first]
        sequence.runner.run([sequence.chunk(part, snapshots)])
        out.append(sequence.runner.last_logits[0].clone())
    return out


def random_tokens(model: Model, count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, model.vocab_size, count).astype(np.int32)


def assert_close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Logits that differ by rounding at most, and choose the same token."""
    assert left.isfinite().all()
    assert float((left - right).abs().max()) < tolerance
    assert torch.equal(left.argmax(-1), right.argmax(-1))
