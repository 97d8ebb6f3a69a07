"""A pytest plugin, `-p slow_copies`: of ten batches that a tier copies three take longer, up to 50 ms.

As many begin later than they could. What a test says must not depend on how fast copies are.
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
    made, takes = CopyThread.__init__, CopyThread._next
    chance = random.Random(0)

    def now_and_then() -> None:
        if chance.random() < SHARE:
            time.sleep(chance.random() * MOST_SECONDS)

    def late(self: CopyThread[Any]) -> Any:
        now_and_then()
        return takes(self)

    def init(self: CopyThread[Any], move: Callable[[Any], Any], **settings: Any) -> None:
        def slow(batch: Any) -> Any:
            now_and_then()
            return move(batch)

        made(self, slow, **settings)

    patch.setattr(CopyThread, "__init__", init)
    patch.setattr(CopyThread, "_next", late)
