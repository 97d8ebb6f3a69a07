"""A pytest plugin, `-p slow_copies`: every tier's copies take longer, at random, up to 50 ms a batch.

What a test says must not depend on how fast they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.connectors.copy_thread import CopyThread

SHARE, MOST_SECONDS = 0.3, 0.05


def pytest_configure() -> None:
    """Once in each process of the run, before any tier is made."""
    patch = pytest.MonkeyPatch()  # never undone: it is for the whole process
    made = CopyThread.__init__
    chance = random.Random(0)

    def init(self: CopyThread[Any], move: Callable[[Any], Any], **settings: Any) -> None:
        def slow(batch: Any) -> Any:
            if chance.random() < SHARE:
                time.sleep(chance.random() * MOST_SECONDS)
            return move(batch)

        made(self, slow, **settings)

    patch.setattr(CopyThread, "__init__", init)
