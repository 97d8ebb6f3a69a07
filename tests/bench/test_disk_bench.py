"""`kvcache bench disk`: what is measured, what is refused, the command line. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache import cli
from kvcache.bench.disk import DiskBench, describe, run_disk_bench
from kvcache.core.errors import ConfigError

WAYS = {
    f"{cache}{synced}_{threads}"
    for cache in ("direct", "cached")
    for synced in ("", "_synced")
    for threads in (1, 2)
}


def test_each_way_is_measured_beside_plain_files_and_nothing_is_left(tmp_path: Path) -> None:
    """`run_disk_bench` compares what came back, byte for byte."""
    said: list[str] = []
    report = run_disk_bench(
        DiskBench(folder=str(tmp_path), allow_tmpfs=True, page_bytes=5000, pages=5, repeats=2),
        said.append,
    )
    assert said == ["round 1 of 2", "round 2 of 2"]
    assert json.loads(json.dumps(report)) == report
    rates = report["bytes_per_second"]
    assert {"plain", *(way for way in WAYS if way.startswith("cached"))} <= set(rates)
    assert set(rates) <= {"plain", *WAYS}
    for name, row in rates.items():
        assert set(row) == {"write", "read_cold"} | (set() if "direct" in name else {"read_warm"})
        assert min(row.values()) > 0
    lines = describe(report)
    assert len(lines) == 2 + len(rates)
    assert lines[0].startswith("5 pages of 5000 bytes, GB/s, best of 2; files: ")
    direct = any(way.startswith("direct") for way in rates)
    assert report["medium"]["direct"] is direct
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pages": 0}, "--pages is 0: at least 1"),
        ({"page_bytes": 0}, "--page-bytes is 0: at least 1"),
        ({"repeats": 0}, "--repeats is 0: at least 1"),
        ({"page_bytes": 1 << 30, "pages": 100}, "--pages 100 of --page-bytes .* give fewer"),
    ],
)
def test_sizes_that_cannot_be_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiskBench(**settings)


def test_the_command_prints_one_object_and_names_a_bad_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--pages", "2", "--page-bytes", "4KiB", "--repeats", "1", "--allow-tmpfs"]
    assert cli.main(["bench", "disk", "--folder", str(tmp_path), *small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bench"], report["pages"], report["page_bytes"]) == ("disk", 2, 4096)
    assert cli.main(["bench", "disk", "--folder", str(tmp_path / "none"), *small]) == 2
    assert "none cannot be used" in capsys.readouterr().err
    assert cli.main(["bench", "disk", "--tokens", "7"]) == 2
    assert "not of `bench disk`" in capsys.readouterr().err
