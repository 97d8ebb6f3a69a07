"""A chain of two tiers keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tiers.chain_pieces import host_over_disk

from kvcache.connectors.base import Connector
from kvcache.connectors.testing import CONTRACT, POOL_RULES, Factory, Setup


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_a_chain_that_writes_nothing_down_is_its_upper_tier(
    rule: Callable[[Factory], None], tmp_path: Path
) -> None:
    folders = count()

    def factory(setup: Setup) -> Connector:
        return host_over_disk(setup, tmp_path / str(next(folders)), behind=False)

    rule(factory)


@pytest.mark.parametrize(
    "rule", [rule for rule in CONTRACT if rule not in POOL_RULES], ids=lambda rule: rule.__name__
)
def test_a_chain_keeps_the_contract(rule: Callable[[Factory], None], tmp_path: Path) -> None:
    folders = count()

    def factory(setup: Setup) -> Connector:
        return host_over_disk(setup, tmp_path / str(next(folders)))

    rule(factory)
