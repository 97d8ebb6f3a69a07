"""One scheduler, two runners: a model that computes and a clock give the same steps."""

from __future__ import annotations

import random

import pytest
import torch
from engine.simulations import HARDWARE, Recorder, counts

from kvcache import Manager, Sparse
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Finished
from kvcache.engine.runner import TorchRunner
from kvcache.engine.simulated import SimulatedClock, SimulatedRunner
from kvcache.engine.simulated_roofline import Roofline
from kvcache.engine.tiny import build_model
from kvcache.presets.weights import Weights

torch.set_num_threads(1)

WEIGHTS = Weights(parameters=1e6, query_heads=4)


def real(model: Model, slabs: int) -> tuple[Recorder, Engine, Manager]:
    manager = Manager(model.geometry, slabs=slabs, retention=Sparse(), movable=True)
    recorder = Recorder(TorchRunner(model, slabs))
    settings = EngineSettings(token_budget=48, max_requests=4)
    return recorder, Engine(recorder, manager, settings=settings), manager


def simulated(model: Model, slabs: int) -> tuple[Recorder, Engine, Manager]:
    clock = SimulatedClock()
    manager = Manager(model.geometry, slabs=slabs, retention=Sparse(), movable=True)
    runner = SimulatedRunner(
        Roofline(model.geometry, WEIGHTS, HARDWARE), clock, vocab_size=model.vocab_size
    )
    recorder = Recorder(runner)
    settings = EngineSettings(token_budget=48, max_requests=4)
    return recorder, Engine(recorder, manager, settings=settings, clock=clock), manager


def play(seed: int, engine: Engine) -> list[tuple[object, ...]]:
    """Requests that share prefixes come while others run; what each of them reused."""
    draw = random.Random(seed)
    texts = [[draw.randrange(256) for _ in range(draw.randint(20, 90))] for _ in range(4)]
    left = 10
    told: dict[int, tuple[object, ...]] = {}
    names: dict[int, int] = {}
    while left or engine.busy:
        if left and draw.random() < 0.3:
            text = draw.choice(texts)
            cut = text[: draw.randint(1, len(text))]
            prompt = [*cut, *(draw.randrange(256) for _ in range(draw.randint(0, 20)))]
            request = engine.add_request(prompt, max_new_tokens=draw.choice((1, 5, 25)))
            names[request] = len(names)
            left -= 1
        for event in engine.step():
            if isinstance(event, Finished):
                told[names[event.request]] = (event.reason, event.usage)
    return sorted(told.items())


@pytest.mark.parametrize("window", [None, 24])
def test_both_runners_are_given_the_same_steps(window: int | None) -> None:
    model = build_model(3, window=window)
    preemptions = hits = 0
    for seed in range(2):
        slabs = model.geometry.slabs_needed(180)
        one, engine, manager = real(model, slabs)
        two, other, other_manager = simulated(model, slabs)
        assert play(seed, engine) == play(seed, other)
        assert one.steps == two.steps
        assert counts(engine) == counts(other)
        assert manager.arena_stats() == other_manager.arena_stats()
        preemptions += engine.counters.preemptions
        hits += engine.counters.device_tokens
    assert preemptions > 0
    assert hits > 0
