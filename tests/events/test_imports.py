"""What loads what: events cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("import kvcache", ["msgpack", "zmq", "numpy", "kvcache.core.events"]),
        ("import kvcache.core.manager", ["zmq", "torch"]),
        ("import kvcache.core.events", ["zmq", "torch"]),
    ],
)
def test_an_import_loads_only_what_it_needs(line: str, absent: list[str]) -> None:
    code = f"{line}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["publisher", "subscriber", "settings"])
def test_without_pyzmq_the_error_names_the_extra(module: str) -> None:
    """To who writes `except ImportError` it is one."""
    code = f"""
import sys
sys.modules["zmq"] = None
try:
    import kvcache.core.events.{module}
except ImportError as error:
    print(type(error).__name__, error.name, error)
import kvcache
assert issubclass(kvcache.MissingPackageError, (kvcache.KVCacheError, ModuleNotFoundError))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("MissingPackageError zmq pyzmq is not installed")
    assert "pip install 'kvcache[events]'" in done.stdout
