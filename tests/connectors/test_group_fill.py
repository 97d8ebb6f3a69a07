"""What a tier tells of the slots of each group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiers.disk_pieces import disk
from tiers.pieces import cpu
from tiers.shared_pieces import shared

from kvcache.connectors.base import Connector
from kvcache.connectors.testing import Setup, chain, rig


@pytest.mark.parametrize(
    "made",
    [lambda s, _: cpu(s), disk, shared],
    ids=["host", "disk", "shared"],
)
def test_each_group_has_its_slots_its_use_and_its_evictions(
    made: Callable[[Setup, Path], Connector], tmp_path: Path
) -> None:
    with rig(lambda s: made(s, tmp_path)) as r:
        first, second = r.setup.pages
        r.store(chain("a", first))
        r.store(chain("b", 3) + chain("b", 2, 1))
        groups = [(g.slots, g.used_slots, g.evicted_pages) for g in r.scheduler.stats().groups]
        assert groups == [(first, first, 3), (second, 2, 0)]
