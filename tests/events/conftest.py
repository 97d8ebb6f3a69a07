"""Sockets of one test: a context of its own, and a short folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import zmq
from events.streams import Stage


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def at() -> Iterator[str]:
    """A place for ipc sockets, with a short name: their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield f"ipc://{folder}"


@pytest.fixture
def stage(context: zmq.Context, at: str) -> Iterator[Stage]:
    made = Stage(context, at)
    yield made
    made.close()
