"""What workers counted is summed before it is judged."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from laws import session as plugin
from laws.cases import GEOMETRIES, SCALE
from laws.counting import ANYWHERE, CALLS, EVERYWHERE, OPERATIONS, WHERE

Seen = list[tuple[str, str, int]]
EACH = OPERATIONS * SCALE // len(CALLS) + 1


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The process that started workers, asked for everything; it ran no test itself."""
    monkeypatch.setattr(plugin, "operations", Counter())
    monkeypatch.setattr(plugin, "seen", Counter())
    monkeypatch.setattr(plugin, "ONLY", [])
    return SimpleNamespace(
        args=["tests"], option=SimpleNamespace(collectonly=False), stash=pytest.Stash()
    )


def worker(config: Any, calls: tuple[str, ...], seen: Seen, *, everything: bool = True) -> Any:
    counted = {"everything": everything, "operations": dict.fromkeys(calls, EACH), "seen": seen}
    return SimpleNamespace(config=config, workeroutput={plugin.NAME: counted})


def two_workers(config: Any, *, lost: int = 0, everything: bool = True) -> list[Any]:
    """Together they did just enough, less the last `lost` calls; neither did alone."""
    seen = [(what, "other", 1) for what in ANYWHERE]
    seen += [(what, name, 1) for what in (*EVERYWHERE, *WHERE) for name in GEOMETRIES]
    return [
        worker(config, CALLS[:5], seen[::2]),
        worker(config, CALLS[5 : len(CALLS) - lost], seen[1::2], everything=everything),
    ]


def judged(config: Any, nodes: list[Any]) -> tuple[int, list[str] | None]:
    """Exit status and what lacked; None: it was not judged."""
    for node in nodes:
        plugin.pytest_testnodedown(node)
    session: Any = SimpleNamespace(config=config, items=[], exitstatus=pytest.ExitCode.OK)
    plugin.pytest_sessionfinish(session, session.exitstatus)
    return int(session.exitstatus), config.stash.get(plugin.LACKS, None)


def test_workers_that_did_enough_together_did_enough(controller: Any) -> None:
    assert judged(controller, two_workers(controller)) == (0, [])
    assert plugin.operations == dict.fromkeys(CALLS, EACH)


def test_what_none_of_the_workers_did_fails_the_session(controller: Any) -> None:
    status, lacks = judged(controller, two_workers(controller, lost=1))
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lacks is not None
    assert lacks[-1] == f"no call of {CALLS[-1]}"


def test_one_of_two_workers_alone_did_too_little(controller: Any) -> None:
    status, lacks = judged(controller, two_workers(controller)[:1])
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lacks is not None
    assert len(lacks) > len(CALLS) - 5


def test_where_a_worker_left_tests_out_or_was_lost_nothing_is_judged(controller: Any) -> None:
    assert judged(controller, two_workers(controller, lost=1, everything=False)) == (0, None)
    controller.stash = pytest.Stash()
    lost = SimpleNamespace(config=controller)  # crashed: it sent nothing
    assert judged(controller, [*two_workers(controller, lost=1), lost]) == (0, None)
