"""Two hundred requests against a pool of a twentieth of their need: everything ends, nothing leaks."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine.rig import DRAIN_SECONDS, rig, tokens
from engine.stamp_guesser import DRAFT_TOKENS, StampGuesser
from engine.stamp_runner import expected_output, stamp_geometry

from kvcache import Manager, Sparse
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.queues import Counters
from kvcache.engine.request import Reason, Token
from kvcache.engine.runner import TorchRunner
from kvcache.engine.smollm2 import load_model
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)

LOG = logging.getLogger(__name__)

REQUESTS = 200
SHARE = 20
ABORTED = 0.1


def drive(
    engine: Engine, rng: random.Random, prompts: list[list[int]], counts: list[int]
) -> tuple[dict[int, int], dict[int, list[int]], dict[int, Reason]]:
    """All arrive over some steps, one in ten is aborted at some moment: (index, tokens, reason)."""
    index: dict[int, int] = {}
    got: dict[int, list[int]] = {}
    reasons: dict[int, Reason] = {}
    pending = list(range(len(prompts)))
    steps = 0
    while pending or engine.busy:
        for i in pending[:5]:
            request = engine.add_request(
                prompts[i], max_new_tokens=counts[i], priority=rng.randrange(4)
            )
            index[request], got[request] = i, []
        del pending[:5]
        if rng.random() < ABORTED and (open_ := [r for r in index if r not in reasons]):
            victim = rng.choice(open_)
            if victim in engine._requests:
                engine.abort(victim)
        for event in engine.step():
            if isinstance(event, Token):
                got[event.request].append(event.token)
            else:
                reasons[event.request] = event.reason
        steps += 1
        assert steps < 20_000
    return index, got, reasons


@pytest.mark.parametrize(("states", "tier"), [(0, False), (1, True)])
def test_stamped_requests_all_end_right(states: int, tier: bool) -> None:
    rng = random.Random(states)
    shared = [tokens(60, i) for i in range(6)]
    prompts = [
        [*rng.choice(shared)[: rng.randrange(60)], *tokens(rng.randrange(1, 50), 100 + i)]
        for i in range(REQUESTS)
    ]
    counts = [rng.randrange(1, 40) for _ in prompts]
    geometry = stamp_geometry(16, states=states)
    need = sum(geometry.slabs_needed(len(p) + c) for p, c in zip(prompts, counts, strict=True))
    with rig(
        need // SHARE, states=states, tier_pages=[600, 60][: 1 + states] if tier else None,
        max_requests=16, token_budget=64, debug=False, stall_seconds=60.0,
    ) as r:  # fmt: skip
        index, got, reasons = drive(r.engine, rng, prompts, counts)
        assert len(reasons) == REQUESTS
        assert set(reasons.values()) == {Reason.LENGTH, Reason.ABORT}
        for request, i in index.items():
            wanted = expected_output(prompts[i], counts[i])
            assert got[request] == wanted[: len(got[request])]
            assert (got[request] == wanted) >= (reasons[request] is Reason.LENGTH)
        counters = r.engine.counters
        assert counters.preemptions > 0
        assert (counters.kept_preemptions > 0) == tier
        assert counters.finished_requests == REQUESTS
        assert r.held == 0
        assert r.manager.stats()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("movable", [False, True])
@pytest.mark.parametrize("spread", [1, 4])
@pytest.mark.parametrize(
    ("blocks", "states", "spare", "lazy_bytes"),
    [((16,), 0, 0, None), ((16,), 0, 12, 3000), ((4, 8), 1, 4, None), ((8,), 1, 4, 30_000)],
)
def test_long_answers_with_wrong_guesses_all_end(
    blocks: tuple[int, ...], states: int, spare: int, lazy_bytes: int | None, spread: int,
    movable: bool,
) -> None:  # fmt: skip
    """Nobody is given up: what was granted for a wrong guess keeps nobody from making room."""
    geometry = stamp_geometry(*blocks, states=states, drafts=DRAFT_TOKENS)
    for seed in range(2):
        rng = random.Random(seed)
        with rig(
            geometry.slabs_needed(40 + 80 + 2 * DRAFT_TOKENS) + spare, *blocks, states=states,
            drafts=DRAFT_TOKENS, movable=movable, lazy_bytes=lazy_bytes, max_requests=6,
            tier_pages=[400] * len(geometry.groups) if lazy_bytes else None,
            runner_type=StampGuesser,
        ) as r:  # fmt: skip
            wanted = {}
            for i in range(8):
                prompt = tokens(rng.randrange(20, 40), 1000 * seed + i)
                request = r.engine.add_request(
                    prompt, max_new_tokens=80, priority=rng.randrange(spread)
                )
                wanted[request] = expected_output(prompt, 80)
            got: dict[int, list[int]] = {request: [] for request in wanted}
            idle = 0
            while r.engine.busy:
                steps = r.engine.counters.steps
                for event in r.engine.step():
                    if isinstance(event, Token):
                        got[event.request].append(event.token)
                idle = idle + 1 if r.engine.counters.steps == steps else 0
                assert idle < 5000, "nobody gets on"
            assert got == wanted
            assert r.engine.counters.preemptions > 0
            assert r.engine.counters.accepted_tokens < r.engine.counters.proposed_tokens
            assert r.held == 0


def run_model(model: Model, longest: int, most: int, pages: Sequence[int]) -> Counters:
    """Requests with up to `longest` tokens of a common beginning and `most` of output."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(longest)]
    prompts = [
        [
            *shared[: rng.randrange(longest)],
            *(rng.randrange(256) for _ in range(rng.randrange(1, most))),
        ]
        for _ in range(REQUESTS)
    ]
    counts = [rng.randrange(1, most) for _ in prompts]
    geometry = model.geometry
    slabs = (
        sum(geometry.slabs_needed(len(p) + c) for p, c in zip(prompts, counts, strict=True))
        // SHARE
    )
    runner = TorchRunner(model, slabs)
    manager = Manager(geometry, slabs=slabs, retention=Sparse(), movable=True)
    offload = Offload(manager, CpuConnector(geometry, pages=pages), runner.regions())
    settings = EngineSettings(token_budget=128, max_requests=16)
    engine = Engine(runner, manager, offload, settings=settings)
    try:
        _, got, reasons = drive(engine, rng, prompts, counts)
        assert set(reasons.values()) == {Reason.LENGTH, Reason.ABORT}
        assert sum(map(len, got.values())) > 500
        assert offload.drain(DRAIN_SECONDS)
        offload.check()
        manager.check()
        assert sum(c.held for c in manager.arena_stats().classes) == 0
        return engine.counters
    finally:
        offload.close()


def test_a_real_model_ends_them_all() -> None:
    counters = run_model(build_model(1), 40, 12, [300, 100])
    assert counters.scheduler_seconds > 0
    assert counters.runner_seconds > 0
    assert counters.tier_seconds > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_ends_them_all(smollm2_path: Path) -> None:
    """Where the time of its steps went: `pytest -k smollm2_ends --log-cli-level INFO`."""
    counters = run_model(load_model(smollm2_path), 60, 14, [300])
    assert counters.preemptions > 0
    parts = counters.runner_seconds, counters.tier_seconds, counters.scheduler_seconds
    assert min(parts) > 0
    shares = [100 * part / sum(parts) for part in parts]
    LOG.info("%d steps: runner %.2f %%, tier %.2f %%, scheduler %.2f %%", counters.steps, *shares)
