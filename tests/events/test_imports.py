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
