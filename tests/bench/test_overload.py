"""`kvcache bench engine --part overload`: everything ends, nothing leaks, and what is wrong is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kvcache.bench import overload
from kvcache.bench.overload import failed_overload, measure_overload
from kvcache.cli import main
from kvcache.core.manager import Manager
from kvcache.engine.tiny import build_model

torch.set_num_threads(1)


def test_all_end_over_a_pool_of_a_twentieth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "ABORTS", 0.3)
    model = build_model()
    found = measure_overload(model, 1, lambda _: None)
    assert sum(found["ended"].values()) == found["requests"] == 64
    assert set(found["ended"]) == {"length", "abort"}
    assert found["held_pages"] == 0
    assert found["preemptions"] > 0
    assert 64 * 36 <= found["need_tokens"] <= 64 * 108
    assert 0 < found["scheduler_and_manager_share"] < 1
    assert failed_overload(found) == []
    again = measure_overload(model, 1, lambda _: None)
    assert (again["ended"], again["steps"]) == (found["ended"], found["steps"])


def test_what_must_not_be_fails() -> None:
    found: dict[str, Any] = {
        "requests": 64,
        "ended": {"length": 60, "abort": 2, "stalled": 1},
        "held_pages": 3,
    }
    assert failed_overload(found) == [
        f"overload: 2 requests came to no proper end: {found['ended']}",
        "overload: 3 pages stayed held",
    ]


def test_the_command_says_the_share_and_a_leak_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "engine", "--model", "tiny", "--part", "overload", "--threads", "1"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["overload_share"] == report["overload"]["scheduler_and_manager_share"]
    stats = Manager.arena_stats

    def leaking(self: Manager) -> Any:
        found = stats(self)
        return found._replace(classes=tuple(c._replace(held=c.held + 1) for c in found.classes))

    monkeypatch.setattr(Manager, "arena_stats", leaking)
    assert main(command) == 1
    assert "failed: overload: " in capsys.readouterr().out
