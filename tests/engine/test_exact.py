"""Full attention, a sliding window and a recurrent state in one model, computed exactly.

With exact operations no bit of a result depends on how a prompt was cut, on what else is in the
batch, on where pages lie, or on whether they were restored. So equality is equality of bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine import paged
from engine.rig import DRAIN_SECONDS
from hypothesis import given, settings, strategies as st

from kvcache import Manager, Sparse
from kvcache.bench.dense import Dense
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)

WINDOW = 20
MODELS = [
    Model(build_model(5, window=window, context_tokens=512).weights, block_tokens=block, exact=True)
    for window, block in ((WINDOW, 4), (WINDOW, 16), (1, 8), (16, 8))
]
MODEL = MODELS[0]
"""A slab holds one state, or four pages of either attention group."""


@settings(max_examples=25)
@given(
    st.sampled_from(MODELS),
    st.integers(2, 70),
    st.lists(st.integers(1, 69), max_size=8, unique=True).map(sorted),
    st.integers(0, 2**32),
)
def test_any_chunk_plan_computes_the_same_bits(
    model: Model, count: int, cuts: list[int], seed: int
) -> None:
    tokens = paged.random_tokens(model, count, seed)
    (whole,) = paged.run(paged.new_sequence(model, count), tokens)
    *_, last = paged.run(paged.new_sequence(model, count, seed=seed), tokens, cuts)
    assert torch.equal(last, whole)
    with torch.inference_mode():
        dense = Dense(model, 1, count).prefill(torch.from_numpy(tokens))[0]
    paged.assert_close(whole, dense)


def test_a_request_computes_the_same_bits_alone_and_among_others() -> None:
    lengths = [(33, 1), (7, 20), (50, 1), (0, 12), (21, 1)]
    runner = paged.Runner(MODEL, paged.pages_for(MODEL, 80, requests=len(lengths)))
    chunks, alone = [], []
    for i, (before, now) in enumerate(lengths):
        tokens = paged.random_tokens(MODEL, before + now, seed=i)
        pages = np.arange(20 * i, 20 * i + 20)
        request = paged.Request(runner, [pages, pages], state=i)
        if before:
            paged.run(request, tokens[:before])
        chunks.append(request.chunk(tokens[before:]))
        alone += paged.run(paged.new_sequence(MODEL, 80), tokens)
    runner.run(chunks)
    assert torch.equal(runner.last_logits, torch.stack(alone))


@pytest.mark.parametrize("cuts", [[40], [40, 41, 42], [30, 60]])
@pytest.mark.parametrize("exact", [False, True])
def test_what_lies_before_the_window_is_not_read(cuts: list[int], exact: bool) -> None:
    model = Model(MODEL.weights, block_tokens=4, exact=exact)
    tokens = paged.random_tokens(model, 64, seed=1)
    expected = paged.run(paged.new_sequence(model, 64), tokens, cuts)
    request = paged.new_sequence(model, 64, seed=2)
    got = []
    for begin, end in zip([0, *cuts], [*cuts, 64], strict=True):
        given_up = max(0, begin - WINDOW + 1) // 4
        for page in request.tables[1][:given_up]:
            if page >= 0:
                request.runner.pages(1)[page].view(torch.float32).fill_(torch.nan)
        request.tables[1][:given_up] = -1000
        got += paged.run(request, tokens[begin:end])
    assert all(map(torch.equal, got, expected))


# ---- through the engine ----------------------------------------------------------------------------


class Played(NamedTuple):
    logits: dict[tuple[int, int], torch.Tensor]
    """By request, in order of arrival, and length of the prefix."""
    outputs: list[list[int]]
    counters: Any
    moved_pages: int


class Recording(Engine):
    """Keeps every logit that it computed."""

    logits: dict[tuple[int, int], torch.Tensor]

    def _compute(self) -> Any:
        batch, sampled = super()._compute()
        assert isinstance(self._runner, TorchRunner)
        for work, row in zip(batch, self._runner.last_logits, strict=False):
            self.logits[work.request.order, work.end] = row.clone()
        return batch, sampled


def play(
    model: Model,
    prompts: Sequence[Sequence[int]],
    slabs: int,
    *,
    movable: bool = False,
    host_pages: Sequence[int] | None = None,
    **limits: int,
) -> Played:
    """Three turns of some sessions side by side; each adds the output so far and what is said."""
    runner = TorchRunner(model, slabs)
    manager = Manager(model.geometry, slabs=slabs, retention=Sparse(), movable=movable)
    offload = None
    if host_pages is not None:
        connector = CpuConnector(model.geometry, pages=host_pages)
        offload = Offload(manager, connector, runner.regions())
    limits = {"token_budget": 48, "max_requests": 4} | limits
    engine = Recording(runner, manager, offload, settings=EngineSettings(debug=True, **limits))
    engine.logits = {}
    histories = [list(p) for p in prompts]
    outputs: list[list[int]] = []
    for turn in range(3):
        ids = [engine.add_request(h, max_new_tokens=6) for h in histories]
        results = engine.run()
        if offload is not None:
            assert offload.drain(DRAIN_SECONDS)
        for i, history in zip(ids, histories, strict=True):
            outputs.append(results[i].tokens)
            history += [*results[i].tokens, *prompts[0][turn : turn + 9]]
    stats = manager.arena_stats()
    assert sum(c.held for c in stats.classes) == 0
    if offload is not None:
        offload.close()
    return Played(engine.logits, outputs, engine.counters, stats.moved_pages)


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(30)]
    return [[*shared[: 15 * (i % 3)], *(rng.randrange(256) for _ in range(40))] for i in range(5)]


def assert_same(one: Played, other: Played) -> None:
    assert one.outputs == other.outputs
    common = one.logits.keys() & other.logits.keys()
    assert len(common) >= 5 * 3 * 6
    assert all(torch.equal(one.logits[key], other.logits[key]) for key in common)


NEED = MODEL.geometry.slabs_needed(120)
"""The longest of the sessions just fits."""

CASES = [
    (NEED, False, False, 48),
    (NEED, True, True, 12),
    (NEED + 6, True, False, 12),
    (NEED + 6, True, True, 48),
    (NEED + 16, False, True, 12),
    (NEED + 16, True, False, 48),
]


@pytest.fixture(scope="module")
def unlimited() -> Played:
    played = play(MODEL, prompts_of(3), 400, token_budget=400)
    assert played.counters.preemptions == played.moved_pages == 0
    return played


@pytest.mark.parametrize(("slabs", "movable", "tier", "budget"), CASES)
def test_no_arena_tier_or_budget_changes_a_bit(
    slabs: int, movable: bool, tier: bool, budget: int, unlimited: Played
) -> None:
    played = play(
        MODEL,
        prompts_of(3),
        slabs,
        movable=movable,
        host_pages=[400, 400, 40] if tier else None,
        token_budget=budget,
    )
    assert_same(unlimited, played)
    assert (played.moved_pages > 0) == movable
    assert (played.counters.restored_tokens > 0) == tier
