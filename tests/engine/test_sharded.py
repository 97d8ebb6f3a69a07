"""A model dealt out to ranks: what each keeps, that it computes the same model, and what tiers keep of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import paged
from engine.mixes import MIXES, SHARDINGS, Course, Met, Mix, Play, World
from torch import Tensor

from kvcache.connectors.base import PageRegion
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.region_copy import native_copy
from kvcache.core.errors import ConfigError, InvariantError
from kvcache.core.records import MOVE_DTYPE
from kvcache.engine.layer_settings import (
    CompressedLayer,
    FullLayer,
    GatedDeltaLayer,
    LatentLayer,
)
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner
from kvcache.engine.shards import AllRanks, Shards
from kvcache.engine.smollm2 import load_model
from kvcache.presets import layers as layers_of
from kvcache.presets.serving import Serving

torch.set_num_threads(1)

GRIDS = [*(s for name, s in SHARDINGS.items() if name != "whole"), Shards(dcp=3)]
CUTS = [1, 2, 30, 31, 32]
TOKENS = 60


def text(model: Model, count: int = TOKENS, seed: int = 3) -> paged.NDArray[np.int32]:
    return paged.random_tokens(model, count, seed)


# ---- the same model --------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shards", GRIDS, ids=str)
def test_ranks_compute_what_one_rank_computes(shards: Shards, exact: bool) -> None:
    mix = MIXES["every"]._replace(kv_dtype="fp32")  # in a narrow format a last bit may become more
    whole, model = mix.model(1), mix.model(1, exact=exact, shards=shards)
    tokens = text(whole)
    expected = paged.run(paged.new_sequence(whole, TOKENS), tokens, CUTS)
    got = paged.run(paged.new_sequence(model, TOKENS, seed=3, fill=float("nan")), tokens, CUTS)
    for one, other in zip(expected, got, strict=True):
        paged.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("compressed", Shards(tp=2)),
        ("compressed", Shards(dcp=3)),
        ("five", Shards(dcp=2)),
        ("gdn", Shards(tp=2, dcp=2)),
    ],
    ids=str,
)
def test_no_cut_and_no_batch_mate_changes_a_bit(name: str, shards: Shards) -> None:
    model = MIXES[name].model(1, shards=shards)
    runner = paged.Runner(model, paged.pages_for(model, TOKENS, requests=3))
    rng = random.Random(name + str(shards))
    requests, expected = [], []
    for i in range(3):
        tables = [
            np.arange(TOKENS * i // r.block_tokens, TOKENS * (i + 1) // r.block_tokens + 1) + i
            for r in model.geometry.rules
            if r.kind != "state"
        ]
        requests.append(paged.Request(runner, tables, state=i))
        alone = paged.new_sequence(model, TOKENS)
        expected.append(paged.run(alone, text(model, 40, seed=i))[0])
    while any(r.done < 40 for r in requests):
        chunks, ended = [], []
        for i, request in enumerate(requests):
            if request.done < 40 and rng.random() < 0.8:
                count = min(rng.choice([1, 1, 5, 13]), 40 - request.done)
                tokens = text(model, 40, seed=i)[request.done : request.done + count]
                chunks.append(request.chunk(tokens))
                ended.append((i, request.done == 40))
        if not chunks:
            continue
        runner.run(chunks)
        for row, (i, last) in zip(runner.last_logits, ended, strict=True):
            assert not last or torch.equal(row, expected[i])


@pytest.mark.parametrize("shards", [Shards(dcp=2), Shards(tp=2, dcp=2)], ids=str)
def test_fast_decoding_side_by_side_computes_what_it_does_alone(shards: Shards) -> None:
    """Contexts of all lengths: a rank may have none of the tokens of a short one."""
    model = Mix((FullLayer(), LatentLayer())).model(1, exact=False, shards=shards)
    lengths = [1, 2, 3, 17, 40, 41]
    runner = paged.Runner(model, paged.pages_for(model, 60, requests=len(lengths)))
    chunks, expected = [], []
    for i, before in enumerate(lengths):
        tokens = text(model, before, seed=i)
        tables = [
            np.arange(60 * i // r.block_tokens, 60 * (i + 1) // r.block_tokens + 1) + i
            for r in model.geometry.rules
        ]
        request = paged.Request(runner, tables)
        if before > 1:
            paged.run(request, tokens[:-1])
        chunks.append(request.chunk(tokens[-1:]))
        expected.append(paged.run(paged.new_sequence(model, 60), tokens)[0])
    runner.run(chunks)
    paged.assert_close(runner.last_logits, torch.stack(expected))


def test_ranks_of_a_real_model_compute_it(smollm2_path: Path) -> None:
    """Nine heads over three KV heads, to three ranks, which take turns in pairs."""
    whole = load_model(smollm2_path)
    model = Model(whole.weights, shards=Shards(tp=3, dcp=2))
    tokens = text(whole, 24)
    expected = paged.run(paged.new_sequence(whole, 24), tokens, [20])
    for one, other in zip(
        expected, paged.run(paged.new_sequence(model, 24, seed=2), tokens, [20]), strict=True
    ):
        paged.assert_close(one, other)


# ---- what each rank keeps --------------------------------------------------------------------------


def kept(model: Model, group: int, rank: int, runner: paged.Runner) -> Tensor:
    """Layer 0 of a group of K and V: `[2, tokens of the rank, kv_heads, head_dim]` of pages in order."""
    spec = model.geometry.groups[group]
    pages = runner.pages(group, rank).view(torch.float32)
    shape = (len(pages), spec.layers, 2, -1, spec.kv_heads, spec.head_dim)  # type: ignore[attr-defined]
    return pages.view(shape)[:, 0].transpose(0, 1).flatten(1, 2)


def test_heads_are_split_and_tokens_taken_in_turns() -> None:
    mix = Mix((FullLayer(heads=4, kv_heads=2), FullLayer(heads=4, kv_heads=1, window=9)))
    whole, model = mix.model(1), mix.model(1, shards=Shards(tp=2, dcp=2))
    alone, ranks = (paged.new_sequence(m, TOKENS) for m in (whole, model))
    tokens = text(whole, 40)
    paged.run(alone, tokens)
    paged.run(ranks, tokens)
    for rank in range(4):
        t, c = divmod(rank, 2)
        everything = kept(whole, 0, 0, alone.runner)[:, :40]
        share = kept(model, 0, rank, ranks.runner)[:, :20]
        assert share.shape == (2, 20, 1, 16)
        assert torch.allclose(share[:, :, 0], everything[:, c::2, t], atol=1e-6)
        window = kept(whole, 1, 0, alone.runner)[:, :40]
        assert torch.allclose(kept(model, 1, rank, ranks.runner)[:, :40], window, atol=1e-5)


@pytest.mark.parametrize("shards", [Shards(tp=2), Shards(tp=2, dcp=2), Shards(dcp=3)], ids=str)
def test_copies_are_equal_bytes_and_parts_are_not(shards: Shards) -> None:
    model = MIXES["every"].model(2, shards=shards)
    sequence = paged.new_sequence(model, TOKENS)
    paged.run(sequence, text(model, 45), [20, 21])
    for group, region in enumerate(sequence.runner.regions()):
        starts = [s.raw[group].data_ptr() for s in sequence.runner.storages]
        assert sorted(a for copies in region.parts for a in copies) == sorted(starts)
        contents = [
            {bytes(sequence.runner.pages(group, starts.index(a)).numpy()) for a in copies}
            for copies in region.parts
        ]
        assert [len(same) for same in contents] == [1] * len(region.parts)
        assert len(set.union(*contents)) == len(region.parts)


def test_only_what_keeps_every_token_is_taken_in_turns() -> None:
    """DCP scaling equals block size times d, of the groups that are dealt out and of no other."""
    mix = MIXES["every"]
    plain, twice = mix.model(1), mix._replace(block_tokens=16).model(1)
    turns = mix.model(1, shards=Shards(dcp=2))
    for one, other, large in zip(
        turns.geometry.groups, plain.geometry.groups, twice.geometry.groups, strict=True
    ):
        assert one.page_bytes == other.page_bytes
        expected = large if one.rules.kind == "full" else other
        assert one.rules == expected.rules


@pytest.mark.parametrize("shards", [Shards(tp=2), Shards(dcp=2), Shards(tp=4, dcp=3)], ids=str)
def test_a_rank_keeps_what_presets_say_of_such_layers(shards: Shards) -> None:
    model = Mix(
        (
            FullLayer(heads=8, kv_heads=2, head_dim=16),
            LatentLayer(heads=4, rank=24, rope_dim=8),
            FullLayer(heads=4, kv_heads=4, head_dim=8, window=20),
        ),
        block_tokens=8,
        kv_dtype="bf16",
    ).model(1, shards=shards)
    serving = Serving(block_tokens=8, tp=shards.tp, dcp=shards.dcp, kv_dtype="bf16")
    layers = (
        layers_of.Full(layers=1, kv_heads=2, head_dim=16),
        layers_of.Latent(layers=1, rank=24, rope_dim=8),
        layers_of.Window(layers=1, kv_heads=4, head_dim=8, window=20),
    )
    specs = [spec for each in layers for spec in each.groups(serving)]
    assert [(g.page_bytes, g.rules) for g in model.geometry.groups] == [
        (spec.page_bytes, spec.rules) for spec in specs
    ]


def test_a_tier_keeps_once_what_ranks_have_alike() -> None:
    model = MIXES["every"].model(1, shards=Shards(tp=2, dcp=2))
    parts = {
        group.name: group.parts
        for group in model.tier_geometry.groups
        if isinstance(group, AllRanks)
    }
    assert parts == {
        "entries": 2, "attention": 4, "entries-2": 2, "latent": 2, "window": 1,
        "rows": 1, "pool": 1, "pool-2": 1, "gdn": 2, "kda": 2,
    }  # fmt: skip
    for joint, group in zip(model.tier_geometry.groups, model.geometry.groups, strict=True):
        assert joint.page_bytes == group.page_bytes * parts[group.name]
        assert joint.rules == group.rules
    assert model.tier_geometry.grid_tokens == model.geometry.grid_tokens
    whole = MIXES["every"].model(1)
    assert whole.tier_geometry is whole.geometry


def test_pages_move_on_every_rank() -> None:
    runner = TorchRunner(MIXES["full"].model(1, shards=Shards(tp=2, dcp=2)), 4)
    expected = []
    for rank, storage in enumerate(runner.storages):
        storage.arena.fill_(rank + 1)
        storage.raw[0][2].fill_(rank + 101)
        expected.append([rank + 101, rank + 101])
    moves = np.zeros(1, MOVE_DTYPE)
    moves["from"], moves["to"] = 2, 0
    runner.move_pages(moves)
    assert [s.raw[0][[0, 2], 0].tolist() for s in runner.storages] == expected


# ---- through tiers ---------------------------------------------------------------------------------


def test_a_slot_has_every_part_and_a_load_reaches_every_rank() -> None:
    model = MIXES["five"].model(1, shards=Shards(tp=2, dcp=2))
    sequence = paged.new_sequence(model, TOKENS)
    paged.run(sequence, text(model, 45))
    runner = sequence.runner
    for group, region in enumerate(runner.regions()):
        first, count = runner.first[group], runner.counts[group]
        slots = np.zeros((count, region.page_bytes), np.uint8)
        tier = PageRegion(slots.ctypes.data, region.page_bytes, count)
        pages = np.arange(first, first + count, dtype=np.int32)
        order = np.random.default_rng(group).permutation(count).astype(np.int32)
        native_copy(region, tier, pages, order)
        before = [runner.pages(group, rank).clone() for rank in range(4)]
        for rank in range(4):
            runner.pages(group, rank).fill_(0x55)
        native_copy(tier, region, order, pages)
        for rank, expected in enumerate(before):
            assert torch.equal(runner.pages(group, rank), expected)


def course(sharding: str, *, tier: str = "disk", **changes: object) -> Course:
    plain = Course(
        token_budget=48,
        max_requests=4,
        spare_slabs=60,
        preempting=0.0,
        movable=False,
        tier=tier,
        tier_pages=400,
        forgetting=True,
        restarting=False,
        interval_tokens=0,
        lazy_bytes=None,
        sharding=sharding,
        seed=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def turn(world: World, folder: Path, sharding: str) -> int:
    """The first turn of every session over a folder; how many tokens came from there."""
    met = Met()
    play = Play(world.on(sharding), course(sharding), met, folder)
    play.run_turn(0, random.Random(0))
    play.close()
    return met.counts["tokens from disk"]


def test_files_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    """Same model, same keys: but pages with other bytes."""
    world = World(MIXES["kda"], 0)
    first = {name: turn(world, tmp_path / name, name) for name in SHARDINGS}
    known = [turn(world, tmp_path / name, name) for name in SHARDINGS]
    assert all(count > first[name] for name, count in zip(SHARDINGS, known, strict=True))
    names = list(SHARDINGS)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        assert turn(world, tmp_path / other, name) == first[name], f"{name} read what {other} wrote"


def test_layouts_of_all_shardings_differ(tmp_path: Path) -> None:
    texts = set()
    for name, shards in SHARDINGS.items():
        model = Mix((LatentLayer(),)).model(1, shards=shards)
        tier = DiskConnector(
            model.tier_geometry,
            folder=tmp_path,
            fingerprint=model.fingerprint(),
            layout="whole",
            pages=[4],
        )
        texts |= {path.read_text() for path in tmp_path.glob("*/layout.txt")}
        assert tier.worker.close(), name
    assert len(texts) == len(SHARDINGS)


# ---- what is refused -------------------------------------------------------------------------------


def test_a_rank_whose_pages_went_wrong_is_noticed() -> None:
    model = MIXES["window"].model(1, shards=Shards(dcp=2))
    sequence = paged.new_sequence(model, TOKENS)
    tokens = text(model, 20)
    paged.run(sequence, tokens[:18])
    sequence.runner.pages(1, rank=1)[4] ^= 1
    with pytest.raises(InvariantError, match="ranks 0 and 1 computed different things"):
        paged.run(sequence, tokens[18:])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Shards(tp=0), r"Shards\.tp is 0"),
        (lambda: Shards(dcp=-1), r"Shards\.dcp is -1"),
        (
            lambda: Mix((FullLayer(heads=6, kv_heads=3),)).model(1, shards=Shards(tp=2)),
            "tp is 2: 3 KV heads are neither a multiple nor a divisor of it",
        ),
        (
            lambda: Mix((FullLayer(heads=2, kv_heads=1),)).model(1, shards=Shards(tp=4)),
            "tp is 4: it must divide the heads of every layer, and one has 2",
        ),
        (
            lambda: Mix((LatentLayer(heads=3),)).model(1, shards=Shards(tp=2)),
            "tp is 2: it must divide the heads of every layer, and one has 3",
        ),
        (
            lambda: Mix((GatedDeltaLayer(key_heads=3, value_heads=6),)).model(
                1, shards=Shards(tp=2)
            ),
            "tp is 2: 3 key heads are neither",
        ),
        (
            lambda: Mix((CompressedLayer(heads=6, out_parts=3),)).model(1, shards=Shards(tp=2)),
            "a rank would have 3 heads, and 2 heads share a part of the output",
        ),
        (
            lambda: PageRegion(0, 10, 4, parts=((1,), (2,), (3,))),
            "PageRegion has 3 parts, address 0 and pages of 10 bytes",
        ),
        (
            lambda: native_copy(
                PageRegion(0, 8, 4, parts=((64,), (128,))),
                PageRegion(0, 8, 4, parts=((256,), (512,))),
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
            ),
            "both regions of a copy lie in parts",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_pages_of_a_rank_are_not_taken_for_pages_of_all(tmp_path: Path) -> None:
    model = MIXES["full"].model(1, shards=Shards(tp=2))
    make = partial(
        DiskConnector, folder=tmp_path, fingerprint=model.fingerprint(), layout="whole", pages=[4]
    )
    tier = make(model.geometry)
    with pytest.raises(ConfigError, match=r"group 'attention' has .* it needs pages of"):
        tier.worker.register(TorchRunner(model, 4).regions())
    assert tier.worker.close()
