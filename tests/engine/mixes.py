"""Mixes of layers, what a run may have to go through, and the run that nothing interrupts.

A *world* is a model with exact operations and some sessions of two turns. Its reference is each
session alone: whole prompts in one chunk, then token by token, on pages that nobody else has. A
*course* is what an engine has to go through with all sessions of the world; whatever it is, every
logit must be the reference's, bit for bit.

A new dimension (another tier) is a field of `Course` that `draw` draws and `Play` obeys. Worlds of one
mix and seed differ in how the model is dealt out to ranks (`World.on`); a course says which one it is of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine import paged
from engine.rig import DRAIN_SECONDS, held_pages
from numpy.typing import NDArray
from torch import Tensor

from kvcache import Manager, Sparse
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.hybrid import HybridSettings, random_weights
from kvcache.engine.layer_settings import (
    CompressedLayer,
    FullLayer,
    GatedDeltaLayer,
    KimiDeltaLayer,
    LatentLayer,
    LayerSettings,
)
from kvcache.engine.model import Model
from kvcache.engine.request import Token
from kvcache.engine.runner import TorchRunner
from kvcache.engine.shards import UNSHARDED, Shards

FULL = FullLayer(head_dim=8)
WINDOW = FullLayer(window=10, heads=2, kv_heads=1, head_dim=8)
LATENT = LatentLayer(rank=12, nope_dim=8, rope_dim=4, value_dim=8)
LIGHT = CompressedLayer(head_dim=8, rope_dim=4, window=6, q_rank=12, top=3)
HEAVY = CompressedLayer(
    head_dim=8, rope_dim=4, window=6, q_rank=12, ratio=8, overlap=False, index_heads=0
)
GDN = GatedDeltaLayer(key_dim=8, value_dim=8)
KDA = KimiDeltaLayer(heads=2, head_dim=8)


class Mix(NamedTuple):
    """Layers, and what their pages are like."""

    layers: tuple[LayerSettings, ...]
    block_tokens: int = 8
    group_blocks: Mapping[str, int] = {}
    kv_dtype: str = "fp32"

    def model(self, seed: int, *, exact: bool = True, shards: Shards = UNSHARDED) -> Model:
        """The model of a seed."""
        settings = HybridSettings(layers=self.layers, width=24, hidden=24, context_tokens=256)
        return Model(
            random_weights(settings, seed),
            block_tokens=self.block_tokens,
            group_blocks=self.group_blocks,
            kv_dtype=self.kv_dtype,
            exact=exact,
            shards=shards,
        )


MIXES = {
    "full": Mix((FULL, FULL), block_tokens=4, kv_dtype="bf16"),
    "window": Mix((WINDOW, FULL, WINDOW), group_blocks={"window": 4}, kv_dtype="fp8"),
    "latent": Mix((LATENT, LatentLayer(rank=12, nope_dim=8, rope_dim=4, value_dim=6, q_rank=10))),
    "compressed": Mix((HEAVY, LIGHT, LIGHT), group_blocks={"rows": 4}, kv_dtype="bf16"),
    "gdn": Mix((GDN, GDN, FULL), block_tokens=4),
    "kda": Mix((KDA, LatentLayer(rank=12, nope_dim=8, rope_dim=0, value_dim=8), KDA)),
    "five": Mix((FULL, WINDOW, LATENT, KDA, LIGHT), kv_dtype="fp8"),
    "every": Mix((GDN, WINDOW, LIGHT, KDA, FULL, HEAVY, LATENT)),
}
"""Between them: every kind alone and together, and every format of K and V."""

SHARDINGS = {
    "whole": UNSHARDED,
    "TP 2": Shards(tp=2),
    "DCP 2": Shards(dcp=2),
    "TP 2 x DCP 2": Shards(tp=2, dcp=2),
}

SESSIONS, TURNS, NEW_TOKENS = 4, 2, 3
SHARED_TOKENS = 21
FEW_PAGES = 6
"""Slots of a tier that forgets."""


class World:
    """A model, its sessions, and what each of them computes alone."""

    def __init__(self, mix: Mix, seed: int, sharding: str = "whole") -> None:
        self.sharding = sharding
        self._all: dict[str, World] = {sharding: self}
        self._make = partial(World, mix, seed)
        self.model = mix.model(seed, shards=SHARDINGS[sharding])
        rng = random.Random(seed)

        def text(least: int, most: int) -> list[int]:
            return [rng.randrange(256) for _ in range(rng.randint(least, most))]

        shared = text(SHARED_TOKENS, SHARED_TOKENS)
        self.said = [
            [[*shared[: 7 * (i % 4)], *text(8, 26)], *(text(3, 14) for _ in range(1, TURNS))]
            for i in range(SESSIONS)
        ]
        """Of each session, by turn."""
        self.logits: dict[tuple[int, int], Tensor] = {}
        """By session and length of the context."""
        self.texts = [self._alone(i) for i in range(SESSIONS)]
        """Of each session: everything, to its last token."""

    def on(self, sharding: str) -> World:
        """The same model and sessions, dealt out in another way."""
        if sharding not in self._all:
            self._all[sharding] = self._make(sharding)
        return self._all[sharding]

    def prompts(self, turn: int) -> list[NDArray[np.int32]]:
        """What each session asks in a turn: all that was said and answered before, too."""
        lengths = [sum(map(len, said[: turn + 1])) + turn * NEW_TOKENS for said in self.said]
        return [text[:n] for text, n in zip(self.texts, lengths, strict=True)]

    def _alone(self, session: int) -> NDArray[np.int32]:
        tokens: list[int] = []
        request = paged.new_sequence(self.model, 160)
        for said in self.said[session]:
            tokens += said
            for _ in range(NEW_TOKENS):
                (best,) = request.runner.run(
                    [request.chunk(np.array(tokens[request.done :], np.int32))]
                )
                self.logits[session, len(tokens)] = request.runner.last_logits[0].clone()
                tokens.append(int(best))
        return np.array(tokens, np.int32)


def _host(model: Model, pages: int, folder: Path) -> Connector:
    del folder
    return CpuConnector(model.tier_geometry, pages=[pages] * len(model.geometry.groups))


def _disk(model: Model, pages: int, folder: Path) -> Connector:
    counts = [pages] * len(model.geometry.groups)
    return DiskConnector(
        model.tier_geometry,
        folder=folder,
        fingerprint=model.fingerprint(),
        layout="whole",
        pages=counts,
    )


def _chain(model: Model, pages: int, folder: Path) -> Connector:
    return ChainConnector(_host(model, max(pages // 4, 6), folder), _disk(model, pages, folder))


TIERS: dict[str, Callable[[Model, int, Path], Connector]] = {
    "host": _host,
    "disk": _disk,
    "chain": _chain,
}
"""What a tier is made from: a model, pages of each group, and where files go."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What one run goes through."""

    token_budget: int
    """Cuts prompts into chunks."""
    max_requests: int
    """How many share a batch."""
    spare_slabs: int
    """Beyond what the longest request needs: with few, requests push each other out."""
    preempting: float
    """Chance, after each step, that a running request loses its pages."""
    movable: bool
    tier: str
    """One of `TIERS`, or empty: none."""
    tier_pages: int
    """Slots of each group there: with few, the tier forgets too."""
    forgetting: bool
    """The device loses everything between turns: what a tier has comes from there."""
    restarting: bool
    """Nothing lives on between turns but the files of a tier."""
    interval_tokens: int
    lazy_bytes: int | None
    """The tier stores what is evicted next, far less than it holds; None: at once."""
    sharding: str
    """One of `SHARDINGS`."""
    seed: int


def draw(world: World, seed: int) -> Course:
    """The course of a seed. Of twelve seeds three are for ranks, and these have a tier."""
    rng = random.Random(seed)
    sharding = {3: "TP 2", 7: "DCP 2", 11: "TP 2 x DCP 2"}.get(seed % 12, "whole")
    grid = world.on(sharding).model.geometry.grid_tokens
    tier = rng.choice(["", *TIERS, *TIERS] if sharding == "whole" else [*TIERS])
    max_requests = rng.choice([1, 2, 4])
    tier_pages = rng.choice([FEW_PAGES, 100, 100])
    return Course(
        token_budget=max(max_requests, rng.choice([5, 9, 17, 33, 200])),
        max_requests=max_requests,
        spare_slabs=rng.choice([0, 1, 3, 8, 60]),
        preempting=rng.choice([0.0, 0.1, 0.3]),
        movable=rng.random() < 0.5,
        tier=tier,
        tier_pages=tier_pages,
        forgetting=bool(tier) and rng.random() < 0.7,
        restarting=tier in ("disk", "chain") and rng.random() < 0.5,
        interval_tokens=rng.choice([0, 0, grid, 3 * grid]),
        lazy_bytes=rng.choice([None, 1024, 4096]),
        sharding=sharding,
        seed=seed,
    )


@dataclass
class Met:
    """How often something happened, over runs."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, count: int) -> None:
        """So many more."""
        self.counts[what] = self.counts.get(what, 0) + count


class Play(Engine):
    """Sessions of a world on one course; compares every logit with the reference."""

    def __init__(self, world: World, course: Course, met: Met, folder: Path) -> None:
        geometry = world.model.geometry
        slabs = geometry.slabs_needed(max(map(len, world.texts))) + course.spare_slabs
        runner = TorchRunner(world.model, slabs)
        manager = Manager(
            geometry,
            slabs=slabs,
            retention=Sparse(course.interval_tokens),
            fingerprint=world.model.fingerprint(),
            movable=course.movable,
        )
        offload = None
        if course.tier:
            connector = TIERS[course.tier](world.model, course.tier_pages, folder)
            offload = Offload(manager, connector, runner.regions(), lazy_bytes=course.lazy_bytes)
        settings = EngineSettings(
            token_budget=course.token_budget,
            max_requests=course.max_requests,
            loads="always",  # what a tier has is to be tried, whatever it costs on this machine
            debug=True,
        )
        super().__init__(runner, manager, offload, settings=settings)
        self.world, self.course, self.met = world, course, met
        self.sessions: dict[int, int] = {}
        met.add(f"engines of {course.sharding}", 1)

    def _compute(self) -> Any:
        batch, sampled = super()._compute()
        assert isinstance(self._runner, TorchRunner)
        self.met.add("steps with batch mates", len(batch) > 1)
        for work, row in zip(batch, self._runner.last_logits, strict=False):
            session = self.sessions[work.request.id]
            expected = self.world.logits.get((session, work.end))
            self.met.add("cut prompts", expected is None)
            if expected is not None:
                self.met.add("logits", 1)
                assert torch.equal(row, expected), f"session {session} after {work.end} tokens"
        return batch, sampled

    def run_turn(self, turn: int, rng: random.Random) -> None:
        """A turn of every session, to its end; then all is in the tier."""
        prompts = list(enumerate(self.world.prompts(turn)))
        answers: dict[int, list[int]] = {session: prompt.tolist() for session, prompt in prompts}
        rng.shuffle(prompts)
        while prompts or self.busy:
            if prompts and (not self.busy or rng.random() < 0.7):
                session, prompt = prompts.pop()
                request = self.add_request(prompt, max_new_tokens=NEW_TOKENS)
                self.sessions[request] = session
            for event in self.step():
                if isinstance(event, Token):
                    answers[self.sessions[event.request]].append(event.token)
            if self.scheduler.running and rng.random() < self.course.preempting:
                self.preempt(rng.choice(self.scheduler.running).id)
        for session, text in enumerate(self.world.texts):
            said = answers[session]
            assert said == text[: len(said)].tolist()
            assert len(said) == len(self.world.prompts(turn)[session]) + NEW_TOKENS
        assert self._offload is None or self._offload.drain(DRAIN_SECONDS)
        if self.course.forgetting:
            self._manager.clear()

    def close(self) -> None:
        """Ends the tier, and tells what came about."""
        if self._offload is not None:
            assert self._offload.close()
        assert held_pages(self._manager) == 0
        counters, stats = self.counters, self._manager.arena_stats()
        self.met.add("preemptions", counters.preemptions)
        self.met.add("tokens from the device", counters.device_tokens)
        if self.course.tier:
            self.met.add(f"tokens from {self.course.tier}", counters.restored_tokens)
            if self.course.sharding != "whole":
                self.met.add("tokens restored to ranks", counters.restored_tokens)
        self.met.add("moved pages", stats.moved_pages)


def play_course(world: World, course: Course, met: Met, folder: Path) -> None:
    """Every turn of every session, in one engine or in one after the other."""
    world, rng = world.on(course.sharding), random.Random(course.seed)
    play = Play(world, course, met, folder)
    for turn in range(TURNS):
        if turn and course.restarting:
            play.close()
            play = Play(world, course, met, folder)
            met.add("restarts", 1)
        play.run_turn(turn, rng)
    play.close()
