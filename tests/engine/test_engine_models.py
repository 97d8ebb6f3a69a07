from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine.rig import DRAIN_SECONDS, generate

from kvcache import (
    Manager,
    Sparse,
)
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner
from kvcache.engine.smollm2 import load_model, load_tokenizer
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)


def torch_engine(
    model: Model, slabs: int, host_pages: Sequence[int] | None = None, **limits: Any
) -> tuple[Engine, Offload | None]:
    geometry = model.geometry
    runner = TorchRunner(model, slabs)
    manager = Manager(geometry, slabs=slabs, retention=Sparse(), movable=True)
    offload = None
    if host_pages is not None:
        offload = Offload(manager, CpuConnector(geometry, pages=host_pages), runner.regions())
    settings = EngineSettings(**({"token_budget": 64, "max_requests": 4, "debug": True} | limits))
    return Engine(runner, manager, offload, settings=settings), offload


def play_turns(
    engine: Engine, offload: Offload | None, prompts: Sequence[Sequence[int]], turns: int, new: int
) -> list[list[int]]:
    """Sessions side by side; each turn adds the output so far and some tokens of its own."""
    histories = [list(p) for p in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for turn in range(turns):
        ids = [engine.add_request(h, max_new_tokens=new) for h in histories]
        results = engine.run()
        if offload is not None:
            assert offload.drain(DRAIN_SECONDS)
        for i, history in enumerate(histories):
            outputs[i] += results[ids[i]].tokens
            history += [*results[ids[i]].tokens, *prompts[i][turn : turn + 7]]
    return outputs


def test_tiny_hybrid_says_the_same_with_any_pool_tier_and_budget() -> None:
    model = build_model(3)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(60 + 20 * i)] for i in range(4)]

    def outputs(slabs: int, host: list[int] | None, **limits: Any) -> list[list[int]]:
        engine, offload = torch_engine(model, slabs, host, **limits)
        got = play_turns(engine, offload, prompts, 3, 9)
        if host is not None:
            assert engine.counters.restored_tokens > 0
            assert offload is not None
            offload.close()
        return got

    small = model.geometry.slabs_needed(len(prompts[-1]) + 3 * 16)  # the longest just fits
    reference = outputs(80, None, token_budget=1000)
    assert outputs(small, None) == reference  # preempts and recomputes
    assert outputs(small, [100, 60]) == reference
    assert outputs(small, [100, 60], token_budget=20) == reference


def test_smollm2_says_the_same_after_a_restore(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    text = "The capital of France is Paris. The capital of Italy is Rome. " * 6
    prompt = load_tokenizer(smollm2_path).encode(text).tolist()
    engine, _ = torch_engine(model, 40, token_budget=512)
    reference = play_turns(engine, None, [prompt], 2, 6)
    engine, offload = torch_engine(model, 16, [40], token_budget=512)
    assert offload is not None
    first = play_turns(engine, offload, [prompt], 1, 6)[0]
    engine._manager.clear()
    result = generate(engine, [*prompt, *first, *prompt[:7]], 6)
    assert result.usage.host_tokens >= 80
    assert [*first, *result.tokens] == reference[0]
    offload.close()
