"""Several threads copy for one transfer of a shared tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers.pieces import one_group
from tiers.shared_pieces import shared

from kvcache.connectors import settings
from kvcache.connectors.testing import Setup, chain, rig
from kvcache.core.errors import ConfigError
from kvcache.core.shared_pool import SharedTables


def test_a_shared_tier_copies_with_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 2)
    asked: list[int] = []
    for name in ("store", "load"):
        real = getattr(SharedTables, name)

        def noted(*args: Any, real: Any = real, threads: int = 1) -> Any:
            asked.append(threads)
            return real(*args, threads=threads)

        monkeypatch.setattr(SharedTables, name, noted)
    setup = Setup(geometry=one_group(1 << 20), pages=(16,))
    with rig(lambda s: shared(s, tmp_path, threads=9), setup) as r:
        keys = chain("a", 9)
        assert r.store(keys) == keys
        r.lookup(1, keys)
        assert all(r.load(1, keys))  # compares every byte
    assert asked == [2, 2]


@pytest.mark.parametrize("threads", [0, 257, -1])
def test_so_many_threads_cannot_be(tmp_path: Path, threads: int) -> None:
    with rig(lambda s: shared(s, tmp_path)) as r:
        tables = r.scheduler._region.tables  # type: ignore[attr-defined]
        nothing = np.zeros(0, np.uint64), np.zeros(0, np.int32), np.zeros((0, 64), np.uint8)
        with pytest.raises(ConfigError, match=f"threads is {threads}: from 1 to 256"):
            tables.store(0, *nothing, threads=threads)
        with pytest.raises(ConfigError, match=f"threads is {threads}"):
            tables.load(0, *nothing, threads=threads)
