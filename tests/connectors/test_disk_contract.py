"""The disk connector keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tiers.disk_pieces import disk

from kvcache.connectors.base import Connector
from kvcache.connectors.testing import CONTRACT, Factory, Setup


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_the_disk_connector_keeps_the_contract(
    rule: Callable[[Factory], None], tmp_path: Path
) -> None:
    folders = count()

    def factory(setup: Setup) -> Connector:
        return disk(setup, tmp_path / str(next(folders)))

    rule(factory)
