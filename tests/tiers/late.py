"""Deadlines that pass when a test says so, not when a machine is slow."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvcache.connectors import chain_worker, copy_thread

LONG_SECONDS = 1e6


def pass_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all that was submitted is overdue."""
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + LONG_SECONDS)
    for module in (copy_thread, chain_worker):
        monkeypatch.setattr(module, "time", later)
