"""Shared tiers for tests: one from a contract `Setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.connectors.base import Connector
from kvcache.connectors.shared import SharedConnector
from kvcache.connectors.testing import Setup
from kvcache.core.hashing import Fingerprint

MODEL = Fingerprint(model="test", kv_dtype="uint8")


def shared(setup: Setup, folder: Path, **options: Any) -> Connector:
    """The real thing, in a folder of the test's own."""
    arguments: dict[str, Any] = {
        "folder": folder,
        "name": "region",
        "fingerprint": MODEL,
        "layout": "whole",
        "pages": setup.pages,
        "queue_depth": setup.queue_depth,
        "deadline_seconds": setup.deadline_seconds,
        "before_copy": setup.before_copy,
    }
    return SharedConnector(setup.geometry, **{**arguments, **options})
