"""Disk tiers for tests: one from a contract `Setup`, and the files that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiers.pieces import PATIENCE

from kvcache.connectors.base import Connector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.testing import Setup
from kvcache.core.hashing import Fingerprint
from kvcache.core.page_files import PageFiles

MODEL = Fingerprint(model="test", kv_dtype="uint8")


def disk(setup: Setup, folder: Path, **options: Any) -> Connector:
    """The real thing; `before_copy` is called where a read or write would block."""

    class Files(PageFiles):
        def write(self, *args: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
            setup.before_copy()
            return super().write(*args)

        def read(self, *args: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
            setup.before_copy()
            return super().read(*args)

    arguments: dict[str, Any] = {
        "folder": folder,
        "fingerprint": MODEL,
        "layout": "whole",
        "pages": setup.pages,
        "queue_depth": setup.queue_depth,
        "deadline_seconds": setup.deadline_seconds,
        "events": setup.events,
        "files": Files,
    }
    return DiskConnector(setup.geometry, **{**arguments, **options})


def page_paths(folder: Path, group: int | None = None) -> list[Path]:
    """Every page file under a folder."""
    pattern = f"*/{'[0-9]*' if group is None else group}/??/*"
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def temporaries(folder: Path) -> list[Path]:
    """Every file on its way."""
    return sorted(folder.glob("*/tmp/*/*"))


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Until it is so: what another process, or a thread, does in its own time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.001)
