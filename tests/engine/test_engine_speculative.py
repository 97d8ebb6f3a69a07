"""A draft model changes how soon tokens come, never which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import torch
from engine.rig import DRAIN_SECONDS, rig, tokens
from engine.stamp_guesser import DRAFT_TOKENS, StampGuesser
from engine.stamp_runner import stamp_geometry

from kvcache import ConfigError, Manager, MisuseError, Sparse
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.chunk import Chunk, Guesses
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.hybrid import HybridSettings, random_weights
from kvcache.engine.layer_settings import (
    CompressedLayer,
    FullLayer,
    GatedDeltaLayer,
    LatentLayer,
    LayerSettings,
)
from kvcache.engine.model import Model
from kvcache.engine.request import Reason
from kvcache.engine.runner import TorchRunner
from kvcache.engine.speculative import SpeculativeRunner, first_layers, joint_geometry

torch.set_num_threads(1)

FULL: tuple[LayerSettings, ...] = (FullLayer(), FullLayer())
MIXED: tuple[LayerSettings, ...] = (GatedDeltaLayer(), FullLayer(window=20), FullLayer())

POOLED: tuple[LayerSettings, ...] = (CompressedLayer(), FullLayer())


CONTEXTS = (256, 512, 1024)


def model_of(layers: tuple[LayerSettings, ...], seed: int = 1, context: int = 512) -> Model:
    settings = HybridSettings(layers=layers, width=32, hidden=32, context_tokens=context)
    return Model(random_weights(settings, seed), block_tokens=8, exact=True)


def outputs(
    runner: TorchRunner, slabs: int, prompts: Sequence[Sequence[int]], count: int,
    tier_pages: int = 0, stop_ids: Sequence[int] = (), token_budget: int = 24,
) -> tuple[list[list[int]], Engine]:  # fmt: skip
    """Each prompt twice, the second time as a next turn, in arrears of two requests."""
    geometry = runner.geometry
    manager = Manager(geometry, slabs=slabs, retention=Sparse(16), movable=True)
    offload = None
    if tier_pages:
        connector = CpuConnector(geometry, pages=[tier_pages] * len(geometry.groups))
        offload = Offload(manager, connector, runner.regions())
    settings = EngineSettings(token_budget=token_budget, max_requests=3, debug=True, loads="always")
    engine = Engine(runner, manager, offload, settings=settings)
    try:
        given: list[list[int]] = []
        histories = [list(p) for p in prompts]
        for _ in range(2):
            ids = [
                engine.add_request(h, max_new_tokens=count, stop_ids=stop_ids) for h in histories
            ]
            results = engine.run()
            if offload is not None:
                assert offload.drain(DRAIN_SECONDS)
                manager.clear()
            for history, i in zip(histories, ids, strict=True):
                assert results[i].reason in (Reason.LENGTH, Reason.STOP)
                given.append(results[i].tokens)
                history += [*results[i].tokens, 1, 2, 3]
        assert sum(c.held for c in manager.arena_stats().classes) == 0
        return given, engine
    finally:
        if offload is not None:
            offload.close()


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(40)]
    return [[*shared[: 13 * i], *(rng.randrange(256) for _ in range(9 + i))] for i in range(4)]


MIXES = {"full": FULL, "mixed": MIXED, "pooled": POOLED}


@pytest.mark.parametrize(
    ("mix", "draft", "draft_tokens", "tight"),
    [
        ("full", "itself", 4, True),
        ("full", "first", 1, False),
        ("full", "latent", 7, False),
        ("mixed", "other", 3, True),
        ("mixed", "latent", 7, False),
        ("mixed", "other", 1, True),
        ("pooled", "other", 4, True),
        ("pooled", "latent", 7, False),
    ],
)
def test_tokens_are_those_of_the_model_alone(
    mix: str, draft: str, draft_tokens: int, tight: bool
) -> None:
    layers = MIXES[mix]
    tier_pages = 100 if tight else 0
    model = model_of(layers)
    if draft == "latent":
        helper = model_of((LatentLayer(),), seed=9)
    elif draft == "other":
        helper = model_of((FullLayer(), FullLayer(window=12)), seed=9)
    else:
        count = 2 if draft == "itself" else 1
        helper = Model(first_layers(model.weights, count), block_tokens=8, exact=True)
    prompts = prompts_of(draft_tokens)
    wanted, _ = outputs(TorchRunner(model, 300), 300, prompts, 14)
    geometry = joint_geometry(model, helper, draft_tokens)
    slabs = geometry.slabs_needed(110) + 6 if tight else 500
    runner = SpeculativeRunner(model, helper, slabs, draft_tokens=draft_tokens)
    for _ in range(20):  # slow stores may keep requests from running beside each other
        found, engine = outputs(runner, slabs, prompts, 14, tier_pages)
        assert found == wanted
        counters = engine.counters
        if counters.preemptions or not tight or layers is not FULL:
            break
    assert counters.proposed_tokens > 0
    assert layers is not FULL or (counters.preemptions > 0) >= tight
    assert (counters.restored_tokens > 0) == (tier_pages > 0)
    if draft == "itself" and layers is FULL:
        assert counters.accepted_tokens > 0.25 * counters.proposed_tokens


def test_right_guesses_save_steps() -> None:
    model = model_of(FULL)
    helper = Model(first_layers(model.weights, 2), block_tokens=8, exact=True)
    prompt = prompts_of(0)[1:2]
    wanted, alone = outputs(TorchRunner(model, 300), 300, prompt, 40)
    found, engine = outputs(SpeculativeRunner(model, helper, 300), 300, prompt, 40)
    assert found == wanted
    assert engine.counters.steps < 0.6 * alone.counters.steps


def test_an_output_ends_at_its_stop_token_and_length_in_the_midst_of_guesses() -> None:
    model = model_of(FULL)
    helper = Model(first_layers(model.weights, 2), block_tokens=8, exact=True)
    prompt = prompts_of(0)[1:2]
    (long, _), _ = outputs(TorchRunner(model, 300), 300, prompt, 30)
    for count in range(1, 8):
        (found, _), _ = outputs(SpeculativeRunner(model, helper, 300), 300, prompt, count)
        assert found == long[:count]
    stop = long[11]
    (wanted, _), _ = outputs(TorchRunner(model, 300), 300, prompt, 30, stop_ids=[stop])
    (found, _), _ = outputs(SpeculativeRunner(model, helper, 300), 300, prompt, 30, stop_ids=[stop])
    assert found == wanted == long[: long.index(stop) + 1]


def test_guesses_take_no_budget_that_others_have_tokens_for() -> None:
    model = model_of(FULL)
    helper = Model(first_layers(model.weights, 2), block_tokens=8, exact=True)
    prompts = prompts_of(5)
    wanted, _ = outputs(TorchRunner(model, 300), 300, prompts, 12, token_budget=4)
    found, engine = outputs(SpeculativeRunner(model, helper, 300), 300, prompts, 12, token_budget=4)
    assert found == wanted
    assert engine.counters.proposed_tokens > 0


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft model has full, latent or window"):
        joint_geometry(model_of(FULL), model_of(MIXED), 2)
    with pytest.raises(ConfigError, match="draft_tokens"):
        SpeculativeRunner(model_of(FULL), model_of(FULL), 10, draft_tokens=0)
    with pytest.raises(ConfigError, match="layers"):
        first_layers(model_of(FULL).weights, 3)


def test_keys_depend_on_the_draft_model() -> None:
    model = model_of(FULL)
    drafts = [model_of(FULL, seed) for seed in (2, 3)] + [model_of(POOLED[1:], 2)]
    prints = {SpeculativeRunner(model, draft, 10).fingerprint() for draft in drafts}
    prints |= {SpeculativeRunner(model_of(FULL, 2), drafts[0], 10).fingerprint()}
    assert len(prints | {model.fingerprint(), TorchRunner(model, 10).fingerprint()}) == 5
    assert TorchRunner(model, 10).fingerprint() == model.fingerprint()
    assert SpeculativeRunner(model, model_of(FULL, 2), 10).fingerprint() in prints


def test_new_weights_have_their_own_context_as_far_as_the_draft_model_goes() -> None:
    short, model, long = (model_of(FULL, seed, context) for seed, context in enumerate(CONTEXTS))
    for runner, most in (
        (TorchRunner(model, 10), CONTEXTS[2]),
        (SpeculativeRunner(model, model, 10), CONTEXTS[1]),
    ):
        assert runner.context_tokens == CONTEXTS[1]
        runner.set_model(short)
        assert runner.context_tokens == CONTEXTS[0]
        runner.set_model(long)
        assert runner.context_tokens == most


def test_an_abort_from_inside_the_runner_leaves_nothing_of_its_guesses() -> None:
    model = model_of(FULL)
    runner = SpeculativeRunner(model, model_of(FULL), 60, draft_tokens=3)
    manager = Manager(runner.geometry, slabs=60, retention=Sparse())
    engine = Engine(runner, manager, settings=EngineSettings(debug=True))
    request = engine.add_request(prompts_of(1)[0], max_new_tokens=30)
    inner = runner.run_guessing

    def aborting(chunks: Sequence[Chunk]) -> list[Guesses]:
        if chunks[0].drafts:
            engine.abort(request)
        return inner(chunks)

    runner.run_guessing = aborting  # type: ignore[method-assign]
    with closing(engine.stream()) as events:
        reasons = [e.reason for e in events if hasattr(e, "reason")]
    assert reasons == [Reason.ABORT]
    assert sum(c.held for c in manager.arena_stats().classes) == 0


def test_an_error_of_the_runner_ends_the_requests_of_its_batch_alone() -> None:
    """Also where a request that is blocked now had wrong guesses in the step before."""
    slabs = stamp_geometry(16, drafts=DRAFT_TOKENS).slabs_needed(40 + 80 + 2 * DRAFT_TOKENS)
    rng = random.Random(0)
    with rig(
        slabs, drafts=DRAFT_TOKENS, runner_type=StampGuesser, max_requests=6, debug=False
    ) as r:
        ids = [
            r.engine.add_request(tokens(30, i), max_new_tokens=80, priority=rng.randrange(4))
            for i in range(8)
        ]
        inner, wrong, failed = r.runner.run_guessing, set[int](), set[int]()  # type: ignore[attr-defined]

        def failing(chunks: Sequence[Chunk]) -> list[Guesses]:
            running = r.engine.scheduler.running
            batch = [
                next(q.id for q in running if np.shares_memory(chunk.tokens, q.tokens))
                for chunk in chunks
            ]
            if wrong & {q.id for q in running} - set(batch):
                failed.update(batch)
                raise OSError("injected")
            guesses: list[Guesses] = inner(chunks)
            pairs = zip(chunks, guesses, strict=True)
            short = [len(each.tokens) <= chunk.drafts for chunk, each in pairs]
            wrong.clear()
            wrong.update(i for i, less in zip(batch, short, strict=True) if less)
            return guesses

        r.runner.run_guessing = failing  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="injected"):
            r.engine.run()
        wrong.clear()
        r.runner.run_guessing = inner  # type: ignore[attr-defined]
        results = r.engine.run()
        ended = {i for i in ids if i in results and results[i].reason is Reason.ERROR}
        assert ended == failed < set(ids)
        assert r.held == 0


def test_drafts_after_no_guess_are_misuse() -> None:
    model = model_of(FULL)
    runner = SpeculativeRunner(model, model_of(FULL), 60)
    table = np.arange(4, dtype=np.int32)
    chunk = Chunk(np.ones(1, np.int32), 3, [table] * 2, [None] * 2, drafts=2)
    with pytest.raises(MisuseError, match="drafts follow one token"):
        runner.run_guessing([chunk])
