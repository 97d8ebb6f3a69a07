"""An engine's runner without its scheduler and manager: pages in random order, driven chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from kvcache.bench.dense import Dense
from kvcache.core.layout import Geometry
from kvcache.core.records import StatePlan
from kvcache.engine.chunk import Chunk
from kvcache.engine.kv_format import Rows
from kvcache.engine.layers.recurrence import States
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner


def hand_out(geometry: Geometry, pages: Sequence[int]) -> tuple[int, list[NDArray[np.int32]]]:
    """For a runner without a manager: how many slabs, and the page numbers of each group in them.

    `pages[g]` of group g, ascending; no two pages share a byte.
    """
    slabs, numbers = 0, [np.empty(0, np.int32)] * len(pages)
    for c, pages_per_slab in enumerate(geometry.pages_per_slab):
        page = slabs * pages_per_slab
        for group, of in enumerate(geometry.class_of_group):
            if of == c:
                numbers[group] = np.arange(page, page + pages[group], dtype=np.int32)
                page += pages[group]
        slabs = -(-page // pages_per_slab)
    return slabs, numbers


class Paged:
    """The engine's runner with pages in random order, driven as a scheduler drives it."""

    def __init__(self, model: Model, requests: int, context: int, rng: np.random.Generator) -> None:
        self.geometry = model.geometry
        need = [
            requests * (1 if rules.kind == "state" else -(-context // rules.block_tokens))
            for rules in self.geometry.rules
        ]
        slabs, numbers = hand_out(self.geometry, need)
        self.runner = TorchRunner(model, slabs)
        self._pages = [rng.permutation(pages).reshape(requests, -1) for pages in numbers]

    def chunk(self, request: int, tokens: NDArray[np.int32], start: int) -> Chunk:
        """A chunk that keeps the request's state in one page, in place."""
        end = np.array([start + len(tokens)])
        tables, states = [], []
        for group, rules in enumerate(self.geometry.rules):
            pages = self._pages[group][request]
            state = rules.kind == "state"
            tables.append(None if state else pages)
            source = -1 if start == 0 else int(pages[0])
            states.append(StatePlan(source, end, pages[:1]) if state else None)
        return Chunk(tokens, start, tables, states)

    def copy(self, dense: Dense) -> None:
        """Take over the K, V and states of the baseline."""
        model = self.runner.model
        caches = model.caches(self.runner.storage)
        for cache, memory, groups in zip(caches, dense.memory, model.groups, strict=True):
            pages = torch.from_numpy(self._pages[groups[0]]).long()
            if isinstance(cache, Rows):
                kv, block = torch.stack(memory), cache.pages.shape[2]
                padded = F.pad(kv, (0, 0, 0, pages.shape[1] * block - dense.context))
                blocks = padded.view(*padded.shape[:3], -1, block, padded.shape[4])
                cache.write((pages,), blocks.permute(1, 3, 0, 4, 2, 5).flatten(4))
            else:
                assert isinstance(cache, States)
                cache.matrix[pages[:, 0]] = memory[0]
                cache.tail[pages[:, 0]] = memory[1].transpose(1, 2)

    def prefill(self, tokens: NDArray[np.int32], budget: int) -> Tensor:
        """Logits after a prompt, computed in chunks of at most `budget` tokens."""
        for start in range(0, len(tokens), budget):
            self.runner.run([self.chunk(0, tokens[start : start + budget], start)])
        return self.runner.last_logits

    def decode(self, tokens: NDArray[np.int32], lengths: NDArray[np.int64]) -> Tensor:
        """Logits after one more token for each request."""
        steps = zip(tokens.reshape(-1, 1), lengths.tolist(), strict=True)
        self.runner.run([self.chunk(r, token, length) for r, (token, length) in enumerate(steps)])
        return self.runner.last_logits
