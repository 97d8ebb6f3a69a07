"""A pytest plugin: fails a session of all law tests that did too little, and says at the end what they did.

Not where some were left out: then the numbers mean nothing. Where workers share the tests (pytest-xdist)
each one sends what it counted, and the process that started them judges the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from laws.cases import GEOMETRIES, ONLY, SCALE, kinds
from laws.counting import operations, seen, shortfalls

HERE = Path(__file__).resolve().parent
NAME = "laws"
LACKS = pytest.StashKey[list[str]]()
LEFT_OUT = pytest.StashKey[bool]()
REPORTS = pytest.StashKey[list[bool]]()
"""One a worker: did it collect all law tests?"""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.session.stash[LEFT_OUT] = True


def everything_collected(session: pytest.Session) -> bool:
    """Were all tests of this folder collected, and none left out, in this process?"""
    modules = {item.path for item in session.items}
    return not session.stash.get(LEFT_OUT, False) and set(HERE.glob("test_*.py")) <= modules


def everything_asked_for(config: pytest.Config) -> bool:
    """Do the command line and the environment leave nothing out?"""
    named = [arg.split("::")[0] for arg in config.args if "::" in arg]
    folders = [(config.invocation_params.dir / name).resolve().parents for name in named]
    return not ONLY and not config.option.collectonly and not any(HERE in f for f in folders)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker is done: add what it counted. One that crashed has sent nothing."""
    sent = getattr(node, "workeroutput", {}).get(NAME)
    reports = node.config.stash.setdefault(REPORTS, [])
    reports.append(sent is not None and sent["everything"])
    if sent is not None:
        operations.update(sent["operations"])
        seen.update({(what, where): times for what, where, times in sent["seen"]})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[NAME] = {
            "everything": everything_collected(session),
            "operations": dict(operations),
            "seen": [(*what, times) for what, times in seen.items()],
        }
        return
    if exitstatus != pytest.ExitCode.OK or not everything_asked_for(config):
        return
    reports = config.stash.get(REPORTS, None)
    if not (everything_collected(session) if reports is None else all(reports)):
        return
    lacks = shortfalls(
        operations, seen, {name: kinds(g) for name, g in GEOMETRIES.items()}, scale=SCALE
    )
    config.stash[LACKS] = lacks
    if lacks:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if operations:
        parts = ", ".join(f"{n} {name}" for name, n in operations.most_common())
        terminalreporter.write_line(f"laws: {operations.total()} operations ({parts})")
        totals: Counter[str] = Counter()
        for (what, _), times in seen.items():
            totals[what] += times
        parts = ", ".join(f"{what} {n}" for what, n in totals.most_common())
        terminalreporter.write_line(f"came about: {parts}")
    for lack in config.stash.get(LACKS, []):
        terminalreporter.write_line(f"the laws did too little: {lack}", red=True)
