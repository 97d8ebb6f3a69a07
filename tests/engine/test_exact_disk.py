"""Bit by bit the same logits after pages went through a disk, and through several processes' lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.test_exact import DRAIN_SECONDS, MODEL, NEED, Played, Recording, play, prompts_of

from kvcache import Manager, Sparse
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.driver import Offload
from kvcache.core.hashing import Fingerprint
from kvcache.engine.engine import EngineSettings
from kvcache.engine.runner import TorchRunner

NAME = Fingerprint(model="tiny hybrid, seed 0", kv_dtype="float32")
PAGES = [400, 400, 40]
"""Of each group: all there is."""


def disk(folder: Path) -> Connector:
    return DiskConnector(MODEL.geometry, folder=folder, fingerprint=NAME, pages=PAGES)


def chain(folder: Path) -> Connector:
    return ChainConnector(CpuConnector(MODEL.geometry, pages=[30, 30, 6]), disk(folder))


def live(tier: Connector, histories: list[list[int]]) -> tuple[Played, int]:
    """One turn of all sessions, in an engine that knows nothing of the turns before."""
    runner = TorchRunner(MODEL, NEED)
    manager = Manager(MODEL.geometry, slabs=NEED, retention=Sparse(), fingerprint=NAME)
    offload = Offload(manager, tier, runner.regions())
    settings = EngineSettings(debug=True, token_budget=48, max_requests=4)
    engine = Recording(runner, manager, offload, settings=settings)
    engine.logits = {}
    ids = [engine.add_request(history, max_new_tokens=6) for history in histories]
    results = engine.run()
    assert offload.drain(DRAIN_SECONDS)
    offload.check()
    assert offload.stats().failed_pages == 0
    assert offload.close()
    outputs = [results[i].tokens for i in ids]
    played = Played(engine.logits, outputs, engine.counters, 0)
    return played, engine.counters.restored_tokens


@pytest.mark.parametrize("make", [disk, chain])
def test_no_restart_changes_a_bit(make: Callable[[Path], Connector], tmp_path: Path) -> None:
    """Three turns, each in a new engine over the same folder, beside one engine that keeps all."""
    prompts = prompts_of(3)
    expected = play(MODEL, prompts, 400, token_budget=400)
    histories = [list(prompt) for prompt in prompts]
    for turn in range(3):
        played, restored = live(make(tmp_path), histories)
        assert played.outputs == expected.outputs[turn * 5 : turn * 5 + 5]
        # Requests are numbered from 0 in each life, on and on in the other run.
        compared = 0
        for (order, end), logits in played.logits.items():
            other = expected.logits.get((order + turn * 5, end))
            if other is not None:
                assert torch.equal(logits, other)
                compared += 1
        assert compared >= 5 * 6
        known = sum(len(history) for history in histories)
        if turn:
            assert restored > known // 2, f"{restored} of {known} tokens came from the disk"
        for history, output in zip(histories, played.outputs, strict=True):
            history += [*output, *prompts[0][turn : turn + 9]]
