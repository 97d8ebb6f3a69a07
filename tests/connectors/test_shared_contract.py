"""The contract, kept by a tier of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiers.shared_pieces import shared

from kvcache.connectors.testing import CONTRACT, Factory


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(rule: Callable[[Factory], None], tmp_path: Path) -> None:
    folder = tmp_path / "regions"
    rule(lambda setup: shared(setup, folder))
    assert [path.name for path in folder.iterdir()] == ["lock"]
