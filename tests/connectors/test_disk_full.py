"""A disk without room: stores fail and are counted, what is there stays, new pages replace old ones."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tiers import disk_process
from tiers.disk_pieces import disk, page_paths, temporaries
from tiers.file_systems import mounted
from tiers.pieces import PATIENCE, one_group

from kvcache.connectors.disk_folder import DiskFolder
from kvcache.connectors.testing import Key, Rig, Setup, chain, rig
from kvcache.core.errors import ConfigError
from kvcache.core.page_files import PageFiles

PAGE = 1 << 16
FILE = PAGE + 4096
TAKEN = 48 * FILE
"""Of a file system that could hold all that the tier may use: so much others have taken."""

SETUP = Setup(geometry=one_group(PAGE, 16), pages=(64,))

Require = Callable[[str, str], NoReturn]


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path, require: Require) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "tmpfs", f"size={68 * FILE}", require) as folder:
        (folder / "ballast").write_bytes(bytes(TAKEN))
        yield folder


def fill(r: Rig, folder: Path) -> list[Key]:
    """Store until the disk is full; the keys that are there then."""
    kept = []
    for i in range(40):
        key = Key(f"k{i}")
        result = r.run(r.planned([key]))
        r.scheduler.check()
        if not result.ok.all():
            assert result.error.startswith("NoSpace: 1 of 1 files found no room (No space left")
            assert temporaries(folder) == [], "a file was left half written"
            return kept
        kept.append(key)
    raise AssertionError("the disk was never full")


def test_a_full_disk_fails_the_store_and_nothing_else(small_disk: Path) -> None:
    with rig(lambda s: disk(s, small_disk), SETUP) as r:
        kept = fill(r, small_disk)
        assert len(kept) >= 15
        assert r.visible(kept) == [1] * len(kept)
        assert r.visible([Key(f"k{len(kept)}")]) == [0]
        assert r.lookup(1, kept) == [1] * len(kept)
        assert all(r.load(1, kept))
        stats = r.scheduler.stats()
        assert stats.errors == {"NoSpace": 1}
        assert stats.failed_pages == 1
        assert stats.used_bytes == len(kept) * PAGE
        assert stats.pinned_pages == 0


def test_on_a_full_disk_new_pages_replace_the_oldest(small_disk: Path) -> None:
    with rig(lambda s: disk(s, small_disk), SETUP) as r:
        kept = fill(r, small_disk)
        for i in range(2 * len(kept)):
            key = Key(f"new{i}")
            assert r.store([key]) == [key]
            assert len(page_paths(small_disk)) == len(kept)
        newest = [Key(f"new{i}") for i in range(len(kept), 2 * len(kept))]
        assert r.visible(newest) == [1] * len(kept)
        assert not any(r.visible(kept))
        r.lookup(1, newest)
        assert all(r.load(1, newest))
        assert r.scheduler.stats().errors == {"NoSpace": 1}


def test_part_of_a_store_that_fits_is_kept(small_disk: Path) -> None:
    with rig(lambda s: disk(s, small_disk, threads=3), SETUP) as r:
        keys = chain("a", 40)
        result = r.run(r.planned(keys))
        good = int(result.ok.sum())
        assert 15 <= good < 40
        assert r.visible(keys) == result.ok.tolist()
        assert len(page_paths(small_disk)) == good
        assert temporaries(small_disk) == []
        kept = [key for key, ok in zip(keys, result.ok.tolist(), strict=True) if ok]
        r.lookup(1, kept)
        assert all(r.load(1, kept))


def test_when_others_made_room_the_tier_grows_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.connectors.slots_aside.RETRY_SECONDS", 0.0)
    with rig(lambda s: disk(s, small_disk), SETUP) as r:
        few = fill(r, small_disk)
        (small_disk / "ballast").unlink()
        more = chain("b", 8)
        assert r.store(more) == more
        assert r.visible(few + more) == [1] * (len(few) + 8)
        r.scheduler.check()


def test_a_tier_starts_on_a_full_disk_and_reads_what_is_there(small_disk: Path) -> None:
    with rig(lambda s: disk(s, small_disk), SETUP) as r:
        kept = fill(r, small_disk)
    with (small_disk / "more").open("wb", buffering=0) as more, suppress(OSError):
        while True:
            more.write(bytes(4096))
    with rig(lambda s: disk(s, small_disk), SETUP) as r:
        assert r.lookup(1, kept) == [1] * len(kept)
        assert all(r.load(1, kept))
        result = r.run(r.planned([Key("new")]))
        assert result.error.startswith("NoSpace")
        assert r.store([Key("new")]) == [Key("new")]  # in place of the oldest
        assert r.visible(kept[-2:]) == [1, 0]


def test_what_cannot_be_removed_now_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a while must not leave files that nobody knows of."""
    monkeypatch.setattr("kvcache.connectors.disk_worker.CHECK_SECONDS", 0.0)
    failing = True

    class Files(PageFiles):
        def remove(self, names: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
            if failing:
                return np.full(len(names), errno.EIO, np.int32)
            return super().remove(names)

    with rig(lambda s: disk(s, tmp_path, files=Files), Setup(pages=(4, 1))) as r:
        for i in range(12):
            r.store([Key(f"k{i}")])
        assert len(page_paths(tmp_path, 0)) == 12
        r.store([Key("k0")])  # anew
        failing = False
        r.store([Key("last")])
        assert len(page_paths(tmp_path, 0)) == 4
        newest = [Key("k10"), Key("k11"), Key("k0"), Key("last")]
        assert r.lookup(1, newest) == [1] * 4
        assert all(r.load(1, newest))


def test_a_bound_above_the_file_system_is_refused(small_disk: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"capacity_bytes asks for 5\.\d+ MiB of disk.* 4\.\d+ MiB in all: lower"
    ):
        disk(SETUP, small_disk, pages=None, capacity_bytes=80 * FILE)


def test_a_file_system_that_knows_no_direct_access_is_used_without(
    tmp_path: Path, require: Require
) -> None:
    def folder(root: Path, direct: Any) -> DiskFolder:
        return DiskFolder(
            root, text="x", page_bytes=[PAGE], direct=direct, durable=False, threads=1
        )

    with mounted(tmp_path / "ram", "ramfs", "mode=700", require) as ram:
        opened = folder(ram, None)
        assert not opened.direct
        opened.close()
        with pytest.raises(
            ConfigError, match=r"DiskConnector\.direct is True, and the file system"
        ):
            folder(ram, True)
        with rig(lambda s: disk(s, ram), SETUP) as r:
            keys = chain("a", 3)
            r.store(keys)
            assert all(r.lookup(1, keys))
            assert all(r.load(1, keys))


LIMITED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(disk_process.__file__).parents[1])!r})
from tiers.disk_pieces import disk, temporaries
from tiers.pieces import one_group
from kvcache.connectors.testing import Setup, chain, rig
folder = Path(sys.argv[1])
setup = Setup(geometry=one_group({PAGE}, 16), pages=(64,))
with rig(lambda s: disk(s, folder), setup) as r:
    result = r.run(r.planned(chain("a", 3)))
    print(result.ok.tolist(), result.error)
    assert temporaries(folder) == []
    assert r.pinned() == 0
"""


@pytest.mark.parametrize(
    ("beyond", "error"),
    [(0, r"EFBIG: 3 of 3 files failed \(File too large\)"), (1, r"E(FBIG|INVAL): 3 of 3 .*")],
)
def test_a_limit_of_file_sizes_is_an_error_like_any_other(
    tmp_path: Path, beyond: int, error: str
) -> None:
    """RLIMIT_FSIZE, as a shell's `ulimit -f` sets it; one that cuts a block short."""

    def limit() -> None:
        most = PAGE // 2 + beyond
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"\[0, 0, 0\] {error}\n", done.stdout)
