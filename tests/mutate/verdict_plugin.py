"""A pytest plugin for runs on a copy of the tree: loads the copy, and writes down what failed how.

The report goes to `$MUTATE_REPORT`: a list of `[node id, exception names, text]`, most derived
exception first. It is written after each failure, so that a crash later loses nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = os.environ["MUTATE_ROOT"]
FAILURES: list[tuple[str, list[str], str]] = []


def _leads_elsewhere(finder: Any) -> bool:
    """An editable install of the package answers before the search path does."""
    find_spec = getattr(finder, "find_spec", None)
    spec = find_spec("kvcache", None) if find_spec else None
    return spec is not None and not str(spec.origin).startswith(ROOT)


sys.meta_path[:] = [finder for finder in sys.meta_path if not _leads_elsewhere(finder)]


def _write() -> None:
    Path(os.environ["MUTATE_REPORT"]).write_text(json.dumps(FAILURES))


def pytest_configure(config: pytest.Config) -> None:
    """No shrinking: a failure is all that is wanted, the smallest one costs minutes."""
    import kvcache  # noqa: PLC0415  the copy, now that its finders are in order

    if not str(kvcache.__file__).startswith(ROOT):
        pytest.exit(f"{kvcache.__file__} is tested instead of the copy in {ROOT}", returncode=3)
    hypothesis.settings.register_profile(
        "mutate",
        parent=hypothesis.settings.get_profile("kvcache"),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        derandomize=True,
        report_multiple_bugs=False,
        database=None,
    )
    hypothesis.settings.load_profile("mutate")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        names = [cls.__name__ for cls in call.excinfo.type.__mro__]
        FAILURES.append((item.nodeid, names, str(call.excinfo.value)[:500]))
        _write()
    return report


def pytest_sessionfinish() -> None:
    _write()
