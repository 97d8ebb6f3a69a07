"""Sockets of one test: a context of its own, and a short folder."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator

import pytest
import zmq
from events.streams import DEADLINE, Stage


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    end = threading.Thread(target=made.destroy, kwargs={"linger": 0}, daemon=True)
    end.start()
    end.join(DEADLINE)
    assert not end.is_alive(), "the context does not end: a socket was left open"


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
