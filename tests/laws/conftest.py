"""Says at the end how many operations the laws drove managers through."""

from __future__ import annotations

import pytest
from laws.counting import operations, seen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if operations:
        parts = ", ".join(f"{n} {name}" for name, n in operations.most_common())
        terminalreporter.write_line(f"laws: {operations.total()} operations ({parts})")
        parts = ", ".join(f"{name} {n}" for name, n in seen.most_common())
        terminalreporter.write_line(f"came about: {parts}")
