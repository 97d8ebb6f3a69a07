"""Speculative decoding: a small model guesses tokens, the model checks them all in one step.

The draft model reads one token ahead: its row t has token t + 1 as its input, so that it can run up
to the model's last row as soon as that row's token is sampled. Its K and V lie in draft groups
(`GroupRules.lookahead_tokens` 1), in pages of the same arena and under keys of the same manager:

    position            0     1     2    ...   e - 1    e        e + 1    ...
    model's input       x0    x1    x2         x(e-1)   xe       guess 1
    draft's input       x1    x2    x3         xe       guess 1  guess 2  ...
    draft's output      x2?   x3?   x4?        guess 1  guess 2  guess 3

One step of a decoding request: the draft model goes on from guess 1, which it made in the step
before, then the model computes token e and the guesses, each of which is right if it is the model's
own choice after the one before; then the draft model computes its rows up to the last right token
again, with the token that the model put after it, and so makes the next guess 1.

A greedy token is the model's own, whatever the draft model says. What was written for wrong guesses
is never read: the manager keeps no page or state of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.hashing import Fingerprint
from kvcache.core.layout import Geometry
from kvcache.core.specs import RecurrentState
from kvcache.core.specs.base import GroupSpec, require_positive
from kvcache.engine.batch import make_batch
from kvcache.engine.chunk import Chunk, Guesses
from kvcache.engine.model import Model, Weights
from kvcache.engine.runner import TorchRunner
from kvcache.engine.storage import PagedStorage


def first_layers(weights: Weights, count: int) -> Weights:
    """A draft model made of a model's own first layers, its embedding and its head.

    Raises:
        ConfigError: not from 1 to all of them.
    """
    if not 1 <= count <= len(weights.layers):
        raise ConfigError(
            f"{count} layers of {len(weights.layers)}: give 1 at least, and no more than there are"
        )
    layers = weights.layers[:count]
    return replace(weights, name=f"{weights.name}-first-{count}", layers=layers)


def joint_geometry(model: Model, draft: Model, draft_tokens: int) -> Geometry:
    """The groups of both models in one arena; a state page more for each guess.

    Raises:
        ConfigError: the draft model keeps something else than K and V of tokens.
    """
    ours: list[GroupSpec] = [
        replace(group, speculative_tokens=draft_tokens)
        if isinstance(group, RecurrentState)
        else group
        for group in model.geometry.groups
    ]
    theirs: list[GroupSpec] = []
    for group in draft.geometry.groups:
        if "lookahead_tokens" not in [field.name for field in fields(group)]:  # type: ignore[arg-type]
            raise ConfigError(
                f"group {group.name!r} of the draft model is of kind {group.kind!r}: a draft model"
                " has full, latent or window attention alone"
            )
        theirs.append(replace(group, name=f"draft-{group.name}", lookahead_tokens=1))  # type: ignore[type-var]
    return Geometry((*ours, *theirs), state_grid_tokens=model.geometry.state_grid_tokens)


def joint_fingerprint(model: Model, draft: Model) -> Fingerprint:
    """Of pages that both models fill: the draft model's are of no use to another one."""
    ours, theirs = model.fingerprint(), draft.fingerprint()
    return replace(
        ours,
        model=f"{ours.model} guessed by {theirs.model}",
        kv_dtype=f"{ours.kv_dtype} and {theirs.kv_dtype}",
    )


class _Part:
    """The pages of one model's groups, those from `first` on."""

    def __init__(self, storage: PagedStorage, first: int) -> None:
        self._storage, self._first = storage, first

    def layers(self, group: int, dtype: torch.dtype) -> list[Tensor]:
        """See `PagedStorage.layers`."""
        return self._storage.layers(self._first + group, dtype)


class SpeculativeRunner(TorchRunner):
    """A `chunk.Guesser` of two models with one vocabulary.

    Args:
        model: says what the tokens are.
        draft: guesses them; attention layers alone, see `joint_geometry`.
        slabs: size of the arena, as the manager has it. Its geometry is this runner's.
        draft_tokens: most guesses of one step and request.

    Raises:
        ConfigError: models that do not fit together.
    """

    def __init__(self, model: Model, draft: Model, slabs: int, *, draft_tokens: int = 4) -> None:
        self.draft_tokens = draft_tokens
        require_positive(self, "draft_tokens")
        if draft.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the draft model has {draft.vocab_size} tokens, the model {model.vocab_size}: they"
                " must have one vocabulary"
            )
        if model.shards.ranks > 1 or draft.shards.ranks > 1:
            raise ConfigError(
                f"the model has {model.shards.ranks} ranks, the draft model {draft.shards.ranks}:"
                " speculative decoding runs on one rank"
            )
        super().__init__(model, slabs, geometry=joint_geometry(model, draft, draft_tokens))
        self.context_tokens = min(model.context_tokens, draft.context_tokens)
        self._draft = draft
        self._first = len(model.geometry.groups)
        part = _Part(self.storage, self._first)
        self._draft_caches = [draft.caches(part)]  # type: ignore[arg-type]

    def fingerprint(self) -> Fingerprint:
        """Of both models: pages of the draft model are under the same keys."""
        return joint_fingerprint(self.model, self._draft)

    def set_model(self, model: Model) -> None:
        """See `TorchRunner`. The draft model stays."""
        super().set_model(model)
        self.context_tokens = min(model.context_tokens, self._draft.context_tokens)

    def clear_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        """See `chunk.Guesser`."""
        self.storage.zero(group, pages.tolist())

    @torch.inference_mode()
    def run_guessing(self, chunks: Sequence[Chunk]) -> list[Guesses]:
        """See `chunk.Guesser`."""
        if not chunks:
            return []
        for chunk in chunks:
            if chunk.drafts and (len(chunk.tokens) != 1 or chunk.guess < 0):
                raise MisuseError(
                    f"a chunk of {len(chunk.tokens)} tokens with {chunk.drafts} drafts after guess"
                    f" {chunk.guess}: drafts follow one token, and a guess"
                )
        guessed = [replace(c, tokens=np.append(c.tokens, self._room(c)), drafts=0) for c in chunks]
        for chunk in guessed:
            self._require_valid(chunk)
            self._clear_open_blocks(chunk)
            self._clear_draft_blocks(chunk)
        self._guess_on(chunks, guessed)
        best = self._check(guessed, [c.drafts + 1 for c in chunks])
        right = [self._right(c, g, b) for c, g, b in zip(chunks, guessed, best, strict=True)]
        firsts = self._catch_up(chunks, guessed, right)
        return [Guesses(r, f) for r, f in zip(right, firsts, strict=True)]

    @staticmethod
    def _room(chunk: Chunk) -> NDArray[np.int32]:
        """The first guess, and places for the others."""
        return np.full(chunk.drafts, chunk.guess, np.int32)

    def _clear_draft_blocks(self, chunk: Chunk) -> None:
        """Zero the draft pages of blocks that the chunk begins: not every row of them is written."""
        for group in range(self._first, len(self.geometry.groups)):
            table, block = chunk.tables[group], self.geometry.block_tokens[group]
            assert table is not None
            begun = range(-(-chunk.start // block), -(-chunk.end // block))
            self.storage.zero(group, [int(table[b]) for b in begun])

    def _guess_on(self, chunks: Sequence[Chunk], guessed: Sequence[Chunk]) -> None:
        """Guesses 2, 3, ... of each chunk that wants them, one more of all chunks at a time."""
        for i in range(1, self.draft_tokens):
            wanted = [g for c, g in zip(chunks, guessed, strict=True) if c.drafts > i]
            if not wanted:
                return
            rows = [self._draft_rows(g, g.start + i - 1, g.tokens[i : i + 1]) for g in wanted]
            for g, token in zip(wanted, self._run_draft(rows), strict=True):
                g.tokens[i + 1] = token

    def _check(self, guessed: Sequence[Chunk], outputs: Sequence[int]) -> list[NDArray[np.int32]]:
        """The model's choice after each of the last `outputs[i]` tokens of chunk i."""
        model = self.model
        batch = make_batch(guessed, model.geometry, model.readings, by_request=model.ops.exact)
        rows = [
            torch.arange(int(last) - count + 1, int(last) + 1)
            for last, count in zip(batch.last, outputs, strict=True)
        ]
        logits = model.forward(replace(batch, last=torch.cat(rows)), self._caches)
        self.last_logits = logits[torch.tensor(np.cumsum(outputs) - 1)]
        best: NDArray[np.int32] = logits.argmax(-1).to(torch.int32).numpy()
        return np.split(best, np.cumsum(outputs)[:-1])

    @staticmethod
    def _right(chunk: Chunk, guessed: Chunk, best: NDArray[np.int32]) -> NDArray[np.int32]:
        """The model's tokens up to the first that is not what was guessed."""
        wrong = np.flatnonzero(best[:-1] != guessed.tokens[len(chunk.tokens) :])
        return best[: int(wrong[0]) + 1] if len(wrong) else best

    def _catch_up(
        self,
        chunks: Sequence[Chunk],
        guessed: Sequence[Chunk],
        right: Sequence[NDArray[np.int32]],
    ) -> list[int]:
        """The draft model's rows up to the last right token; what it guesses after the next one."""
        rows = []
        for chunk, guess, tokens in zip(chunks, guessed, right, strict=True):
            if chunk.drafts:
                # Rows with guesses as their inputs are there for all drafts but the last one.
                skip = min(len(tokens) - 1, chunk.drafts - 1)
                rows.append(self._draft_rows(guess, chunk.start + skip, tokens[skip:]))
            else:
                following = tokens if chunk.following < 0 else [chunk.following]
                inputs = np.append(chunk.tokens[1:], following).astype(np.int32)
                rows.append(self._draft_rows(chunk, chunk.start, inputs))
        return [int(token) for token in self._run_draft(rows)]

    def _draft_rows(self, chunk: Chunk, start: int, inputs: NDArray[np.int32]) -> Chunk:
        """Rows of the draft model from `start` on, with the chunk's pages."""
        tables = chunk.tables[self._first :]
        return Chunk(inputs, start, tables, [None] * len(tables))

    def _run_draft(self, rows: Sequence[Chunk]) -> NDArray[np.int32]:
        draft = self._draft
        batch = make_batch(rows, draft.geometry, draft.readings, by_request=draft.ops.exact)
        best: NDArray[np.int32] = (
            draft.forward(batch, self._draft_caches).argmax(-1).to(torch.int32).numpy()
        )
        return best
