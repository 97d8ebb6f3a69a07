"""Fails a session of all law tests that did too little, and says at the end what they did.

Not where some were left out: then the numbers mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from laws.cases import GEOMETRIES, ONLY, SCALE, kinds
from laws.counting import operations, seen, shortfalls

HERE = Path(__file__).resolve().parent
LACKS = pytest.StashKey[list[str]]()
LEFT_OUT = pytest.StashKey[bool]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.session.stash[LEFT_OUT] = True


def everything_ran(session: pytest.Session) -> bool:
    """Were all tests of this folder collected and run, in this process?"""
    named = [arg.split("::")[0] for arg in session.config.args if "::" in arg]
    if any(
        HERE in (session.config.invocation_params.dir / name).resolve().parents for name in named
    ):
        return False
    modules = {item.path for item in session.items}
    return (
        not session.stash.get(LEFT_OUT, False)
        and not ONLY
        and not hasattr(session.config, "workerinput")
        and not session.config.option.collectonly
        and set(HERE.glob("test_*.py")) <= modules
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus != pytest.ExitCode.OK or not everything_ran(session):
        return
    lacks = shortfalls(
        operations, seen, {name: kinds(g) for name, g in GEOMETRIES.items()}, scale=SCALE
    )
    session.config.stash[LACKS] = lacks
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
