"""On what a benchmark's files lie, and that memory is no disk unless it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache import cli
from kvcache.bench import medium as module
from kvcache.bench.medium import describe_medium, file_system, medium

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
23 22 0:21 / /data rw shared:1 - xfs /dev/vdb rw
24 22 0:22 / /data/a\\040b rw master:1 shared:2 - tmpfs tmpfs rw,size=1k
25 22 0:23 / /data/over rw - ext3 /dev/vdc rw
26 22 0:24 / /data/over rw - btrfs /dev/vdd rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/database", "ext4"),
        ("/data/c", "xfs"),
        ("/data/a b", "tmpfs"),
        ("/data/a b/c/d", "tmpfs"),
        ("/data/over/e", "btrfs"),
    ],
)
def test_the_innermost_and_latest_mount_counts(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind
    assert file_system(Path(folder), "") == "unknown"


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the system says is on tmpfs."""
    mounts = tmp_path / "mountinfo"
    place = str(tmp_path.resolve()).replace(" ", "\\040")
    mounts.write_text(f"22 1 254:1 / / rw - ext4 x rw\n30 22 0:9 / {place} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(module, "MOUNTS", mounts)
    folder = tmp_path / "bench"
    folder.mkdir()
    return folder


def test_memory_is_refused_unless_it_is_asked_for(
    in_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = medium(in_memory, allow_tmpfs=True)
    assert found["file_system"] == "tmpfs"
    cache = "past" if found["direct"] else "through"
    assert describe_medium(found).startswith(f"files: tmpfs, {cache} the kernel's cache")
    folder = ["--folder", str(in_memory)]
    disk = ["bench", "disk", *folder, "--pages", "2", "--page-bytes", "4KiB", "--repeats", "1"]
    offload = ["bench", "offload", *folder, "--size", "4KiB", "--count", "1", "--tokens", "64"]
    offload += ["--model", "none"]
    engine = ["bench", "engine", *folder, "--model", "tiny", "--part", "sessions", "--threads", "1"]
    for command in (disk, offload, engine):
        assert cli.main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert f"{in_memory} is on tmpfs, which is memory, no disk: give --folder a place" in err
        assert "--allow-tmpfs" in err
    assert cli.main([*disk, "--allow-tmpfs"]) == 0
    assert cli.main([*offload, "--tier", "host", "--repeats", "1"]) == 0
