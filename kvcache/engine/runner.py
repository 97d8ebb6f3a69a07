"""The runner that computes with torch: one rank, or all ranks of a sharded model in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.connectors.base import PageRegion
from kvcache.core.errors import ConfigError, InputError, MisuseError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.records import StatePlan
from kvcache.engine.batch import NOWHERE, first_block, make_batch
from kvcache.engine.chunk import Chunk
from kvcache.engine.model import Model
from kvcache.engine.shards import tier_regions
from kvcache.engine.storage import PagedStorage


class TorchRunner:
    """Runs a model of `kvcache.engine.model` with torch.

    Each rank of a sharded model has an arena of its own; the page numbers of one manager, made with
    `geometry`, are good on all of them.

    Args:
        model: weights and geometry.
        slabs: size of the arena of each rank, as the manager has it.
        geometry: the model's groups, and maybe more behind them; None: the model's own.

    Attributes:
        storages: the page memory of each rank, owned.
        last_logits: `[chunks, vocabulary]` of the last run.
    """

    def __init__(self, model: Model, slabs: int, *, geometry: Geometry | None = None) -> None:
        self.model = model
        self.geometry = geometry or model.geometry
        self.vocab_size = model.vocab_size
        self.context_tokens = model.context_tokens
        self.storages = [PagedStorage(self.geometry, slabs) for _ in range(model.shards.ranks)]
        self.last_logits = torch.empty((0, model.vocab_size))
        self._caches = self._caches_of(model)

    def _caches_of(self, model: Model) -> list[list[object]]:
        return [model.caches(storage, r) for r, storage in enumerate(self.storages)]

    @property
    def storage(self) -> PagedStorage:
        """The page memory of the first rank."""
        return self.storages[0]

    def fingerprint(self) -> Fingerprint:
        """What a manager for this runner hashes into every key."""
        return self.model.fingerprint()

    def regions(self) -> list[PageRegion]:
        """The page memory of all ranks, as connectors made with `model.tier_geometry` take it."""
        of_ranks = [storage.regions() for storage in self.storages]
        model = self.model
        return tier_regions(of_ranks, model.tier_geometry, model.shards, model.parts)

    def move_pages(self, moves: NDArray[np.void]) -> None:
        """See `chunk.Runner`."""
        for storage in self.storages:
            storage.move(moves)

    def release_memory(self) -> None:
        """Give the page memory back to the system: all of it is lost, and used again as before."""
        for storage in self.storages:
            storage.release()

    def set_model(self, model: Model) -> None:
        """Compute with other weights from now on, in pages of the same kind.

        Raises:
            ConfigError: another geometry, or another vocabulary.
        """
        ours = (self.model.geometry, self.model.shards, self.vocab_size)
        if (model.geometry, model.shards, model.vocab_size) != ours:
            raise ConfigError(
                f"model {model.name} has other groups or another vocabulary than {self.model.name},"
                " or is dealt out to other ranks: make a runner and a manager for it"
            )
        self.model = model
        self.context_tokens = model.context_tokens
        self._caches = self._caches_of(model)

    @property
    def last_gaps(self) -> NDArray[np.float32]:
        """For each chunk of the last run, by how much the best logit beats the second best."""
        best = self.last_logits.topk(2, dim=-1).values
        gaps: NDArray[np.float32] = (best[:, 0] - best[:, 1]).numpy()
        return gaps

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        """See `chunk.Runner`. `MisuseError` for page numbers or state plans that cannot be."""
        if not chunks:
            return np.empty(0, np.int32)
        for chunk in chunks:
            self._require_valid(chunk)
        for chunk in chunks:
            self._clear_open_blocks(chunk)
        model = self.model
        batch = make_batch(chunks, model.geometry, model.readings, by_request=model.ops.exact)
        self.last_logits = model.forward(batch, self._caches)
        best: NDArray[np.int32] = self.last_logits.argmax(-1).to(torch.int32).numpy()
        return best

    def _clear_open_blocks(self, chunk: Chunk) -> None:
        """Zero the page of a last block that this chunk begins and does not fill.

        Attention reads whole pages: what an earlier owner left, or a failed load, may be NaN. Of
        a transient group only rows are read that were written.
        """
        for g, (table, rules) in enumerate(zip(chunk.tables, self.geometry.rules, strict=True)):
            if table is None or rules.transient:
                continue
            last = chunk.end // rules.block_tokens
            if chunk.end % rules.block_tokens and last * rules.block_tokens >= chunk.start:
                for storage in self.storages:
                    storage.zero(g, [int(table[last])])

    # ---- what a chunk may be ---------------------------------------------------------------------

    def _require_valid(self, chunk: Chunk) -> None:
        tokens, groups = chunk.tokens, self.geometry.groups
        if chunk.start < 0 or len(tokens) == 0:
            raise MisuseError(f"a chunk of {len(tokens)} tokens from {chunk.start} on: no work")
        if chunk.end > self.context_tokens:
            raise InputError(
                f"a context of {chunk.end} tokens is longer than the model's"
                f" {self.context_tokens}: shorten the prompt or the output"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise InputError(
                f"token id {low if low < 0 else high} is out of range: the model has"
                f" {self.vocab_size} tokens"
            )
        if len(chunk.tables) != len(groups) or len(chunk.states) != len(groups):
            raise MisuseError(
                f"a chunk has {len(chunk.tables)} tables and {len(chunk.states)} states for"
                f" {len(groups)} groups: give one each"
            )
        for g, rules in enumerate(self.geometry.rules):
            if rules.kind == "state":
                self._require_plan(g, chunk)
            else:
                self._require_table(g, chunk)

    def _require_table(self, group: int, chunk: Chunk) -> None:
        table, rules = chunk.tables[group], self.geometry.rules[group]
        block = rules.block_tokens
        blocks = -(-chunk.end // block)
        if table is None or len(table) < blocks:
            raise MisuseError(
                f"group {group}: {0 if table is None else len(table)} pages for a context of"
                f" {chunk.end} tokens, which needs {blocks}"
            )
        pages = table[first_block(rules, chunk.start) : blocks]
        if rules.transient:  # what is written may go nowhere, what is read may not
            written = np.arange(blocks - len(pages), blocks) * block >= chunk.start
            pages = pages[~written | (pages != NOWHERE)]
        if len(pages):
            self._require_pages(group, pages)

    def _require_plan(self, group: int, chunk: Chunk) -> None:
        plan = chunk.states[group]
        if not isinstance(plan, StatePlan) or not len(plan.positions) == len(plan.pages) > 0:
            raise MisuseError(f"group {group}: a chunk to {chunk.end} has no state plan")
        edges = np.concatenate(([chunk.start], plan.positions))
        if (np.diff(edges) < 1).any() or edges[-1] != chunk.end:
            raise MisuseError(
                f"group {group}: states after {plan.positions.tolist()} tokens do not cut the chunk"
                f" [{chunk.start}, {chunk.end}) up to its end"
            )
        if plan.source < 0 < chunk.start:
            raise MisuseError(f"group {group}: a chunk from {chunk.start} on has no source state")
        self._require_pages(group, np.append(plan.pages, max(plan.source, 0)))

    def _require_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        low, high, have = int(pages.min()), int(pages.max()), len(self.storage.raw[group])
        if low < 0 or high >= have:
            raise MisuseError(
                f"group {group}: page {low if low < 0 else high} is not one of the {have} that the"
                " arena has room for"
            )
