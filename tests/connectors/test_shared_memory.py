"""What the memory of a shared tier is made of: huge pages, a NUMA node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiers.file_systems import mounted
from tiers.memory_maps import flags_of, policy_of
from tiers.pieces import PATIENCE, one_group
from tiers.shared_pieces import shared

from kvcache.connectors.testing import Rig, Setup, chain, rig
from kvcache.core.errors import ConfigError
from kvcache.core.host_limits import file_huge_pages, numa_nodes

SETUP = Setup(geometry=one_group(1 << 16), pages=(64,))
Require = Callable[[str, str], NoReturn]


def prepared(r: Rig) -> int:
    """Where its slots lie, all of them in memory."""
    assert r.worker.chunks.wait(PATIENCE)  # type: ignore[attr-defined]
    assert r.worker.chunks.error == ""  # type: ignore[attr-defined]
    keys = chain("a", 3)
    r.store(keys)
    r.lookup(1, keys)
    assert all(r.load(1, keys))
    return int(r.worker._slots[0].address)  # type: ignore[attr-defined]


@pytest.mark.parametrize("huge_pages", [True, None])
def test_huge_pages_are_used_where_the_file_system_has_them(
    tmp_path: Path, require: Require, huge_pages: bool | None
) -> None:
    options = "size=32m,mode=700,huge=within_size"
    with mounted(tmp_path / "shm", "tmpfs", options, require) as folder:
        assert file_huge_pages(folder) == "within_size"
        with rig(lambda s: shared(s, folder, huge_pages=huge_pages), SETUP) as r:
            assert "hg" in flags_of(prepared(r))


def test_huge_pages_that_the_file_system_does_not_have_are_refused_with_the_mount_option(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"huge_pages is True, .*'never'.*huge=within_size"):
        shared(SETUP, tmp_path / "regions", huge_pages=True)
    with rig(lambda s: shared(s, tmp_path / "regions", huge_pages=False), SETUP) as r:
        assert "nh" in flags_of(prepared(r))


def test_memory_prefers_the_node_that_was_given(tmp_path: Path, require: Require) -> None:
    node = numa_nodes()[0]
    with (
        mounted(tmp_path / "shm", "tmpfs", "size=32m,mode=700", require) as folder,
        rig(lambda s: shared(s, folder, numa_node=node), SETUP) as r,
    ):
        line = policy_of(prepared(r))
        assert f"prefer:{node}" in line or "prefer (many):0" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numa_node": 77}, "SharedConnector.numa_node is 77: this machine has the NUMA nodes 0"),
        ({"numa_node": -1}, "SharedConnector.numa_node is -1"),
        ({"huge_pages": 1}, "SharedConnector.huge_pages is 1"),
        ({"threads": 0}, "SharedConnector.threads is 0"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shared(SETUP, tmp_path / "regions", **options)
    assert not list(tmp_path.glob("regions/*/*"))
