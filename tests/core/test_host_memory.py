"""Limits on host memory, read from a made-up system."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.connectors.host_pool import HostPool
from kvcache.core import host_memory
from kvcache.core.errors import ConfigError
from kvcache.core.host_memory import available, group_limits, machine


def fake_system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "3000000\n",
            "sys/fs/cgroup/a/memory.current": "2500000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 700000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "100\n",
        },
    )
    room, limit = available(root)
    assert room == 3_000_000 - (2_500_000 - 700_000) - 3_000_000 // 32
    assert limit.endswith("sys/fs/cgroup/a")


def test_a_pool_leaves_a_reserve_of_each_limit(tmp_path: Path) -> None:
    """Who fills a control group to its last page is killed by what comes next."""
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000000000 kB\nMemAvailable: 90000000 kB\n",
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": f"{64 << 30}\n",
            "sys/fs/cgroup/a/memory.current": f"{62 << 30}\n",
        },
    )
    assert available(root)[0] == (2 << 30) - (1 << 30)
    (root / "sys/fs/cgroup/a/memory.current").write_text(f"{(63 << 30) + 1}\n")
    assert available(root)[0] == 0
    (root / "sys/fs/cgroup/a/memory.max").write_text("max\n")
    assert available(root) == (90_000_000 * 1024 - (1 << 30), "the machine's available memory")


def test_an_old_style_control_group_is_read_too(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable:    4000 kB\n",
            "proc/self/cgroup": "5:cpu,memory:/job\n4:cpuset:/x\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500\n",
        },
    )
    assert available(root) == (
        0,
        f"the memory limit of control group {root}/sys/fs/cgroup/memory/job",
    )


def test_without_limits_only_the_machine_counts(tmp_path: Path) -> None:
    root = fake_system(tmp_path, {"proc/meminfo": "MemAvailable: 7 kB\n"})
    assert available(root) == (7 * 1024 - 7 * 32, "the machine's available memory")
    assert available()[0] > 0


def test_a_number_near_2_63_is_no_limit(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/box\n5:memory:/box\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "8192\n",
        },
    )
    folder = root / "sys/fs/cgroup/memory/box"
    assert group_limits(root) == [(folder, 8192, 8192)]


def test_a_group_outside_the_view_leaves_the_root_of_the_view(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path, {"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/memory.max": "4096\n"}
    )
    assert [limit.limit_bytes for limit in group_limits(root)] == [4096]


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: x kB\nMemAvailable\nHugePages_Total: 5\nMemFree: 2 kB\n",
            "proc/self/cgroup": "nonsense\n\n5\n",
        },
    )
    assert machine(root) == {"MemFree": 2048}
    assert group_limits(root) == []


def test_a_pool_is_refused_by_these_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: (100, "somebody"))
    with pytest.raises(ConfigError, match="somebody leaves 100 bytes"):
        HostPool([64], [2], setting="x")
