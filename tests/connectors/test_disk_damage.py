"""Files that are cut, changed, replaced or gone: a counted miss, and out of the way. Never a wrong byte."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiers.disk_pieces import disk, page_paths

from kvcache.connectors import disk_format
from kvcache.connectors.testing import Rig, chain, digest, rig
from kvcache.core.errors import ConfigError
from kvcache.core.page_files import checksum

KEYS = chain("a", 4)
HEAD = disk_format.HEAD_DTYPE.itemsize


def path_of(folder: Path, index: int) -> Path:
    """The file of a key."""
    name = digest(KEYS[index]).hex()
    (path,) = folder.glob(f"*/0/{name[:2]}/{name}")
    return path


def load_around(r: Rig, damaged: int, kind: str) -> None:
    """All but the damaged one are good; it is counted, gone, and may be stored again."""
    before = r.scheduler.stats()
    request = before.failed_pages + 10
    assert all(r.lookup(request, KEYS))
    ok = r.load(request, KEYS)  # compares the bytes of what is good
    assert ok == [int(i != damaged) for i in range(len(KEYS))]
    stats = r.scheduler.stats()
    assert stats.gone_pages == before.gone_pages + 1
    assert stats.failed_pages == before.failed_pages + 1
    assert stats.errors.get(kind, 0) == before.errors.get(kind, 0) + 1
    assert r.visible(KEYS) == ok
    assert r.store(KEYS) == [KEYS[damaged]]
    assert all(r.lookup(request, KEYS))
    assert all(r.load(request, KEYS))


def test_each_byte_of_the_head_and_the_checksum_counts(tmp_path: Path) -> None:
    """One bit of each, so that no field is left out."""
    chance = random.Random(0)
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        for at in range(HEAD + 16):
            which = chance.randrange(len(KEYS))
            flip(path_of(tmp_path, which), at, 1 << chance.randrange(8))
            load_around(r, which, "OtherPage" if at < HEAD else "Damaged")
        assert len(page_paths(tmp_path)) == len(KEYS)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, seed: int) -> None:
    """Of the page, and of the zeros before and after it."""
    chance = random.Random(seed)
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        which = chance.randrange(len(KEYS))
        path = path_of(tmp_path, which)
        page = r.setup.geometry.groups[0].page_bytes
        parts = [(HEAD + 16, 4096), (4096, 4096 + page), (4096 + page, path.stat().st_size)]
        begin, end = parts[seed % 3]
        flip(path, chance.randrange(begin, end), 1 << chance.randrange(8))
        load_around(r, which, "Damaged")


def flip(path: Path, at: int, bits: int) -> None:
    """Change some bits of a byte, past all caches of ours."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


@pytest.mark.parametrize("length", [0, 1, 119, 136, 4095, 4096, 4097, 8191, 8193, 20_000])
def test_a_file_of_another_length_is_no_page(tmp_path: Path, length: int) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        os.truncate(path_of(tmp_path, 2), length)
        load_around(r, 2, "Truncated")
        os.truncate(path_of(tmp_path, 1), length)
    # And is noticed at the next start, by its length alone.
    with rig(lambda s: disk(s, tmp_path)) as r:
        assert r.visible(KEYS) == [1, 0, 1, 1]
        assert r.scheduler.stats().gone_pages == 1
        assert len(page_paths(tmp_path)) == 3


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link_to_another_page(path: Path) -> None:
    other = next(p for p in page_paths(path.parents[3]) if p != path)
    path.unlink()
    path.symlink_to(other)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nothing(path: Path) -> None:
    path.unlink()


def another_page(path: Path) -> None:
    shutil.copy(next(p for p in page_paths(path.parents[3]) if p != path), path)


def another_version(path: Path) -> None:
    """Whole, with a checksum that is right: only its version is not ours."""
    raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
    head = raw[:HEAD].view(disk_format.HEAD_DTYPE)
    head["version"] = disk_format.VERSION + 1
    raw[HEAD : HEAD + 16] = 0
    raw[HEAD : HEAD + 16] = np.frombuffer(checksum(raw), np.uint8)
    path.write_bytes(raw.tobytes())


@pytest.mark.parametrize(
    ("replace", "kind"),
    [
        (nothing, "Missing"),
        (another_page, "OtherPage"),
        (another_version, "OtherPage"),
        (a_pipe, "Truncated"),
        (a_link_to_another_page, "ELOOP"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_something_else_in_a_files_place_is_a_miss(
    tmp_path: Path, replace: Callable[[Path], None], kind: str
) -> None:
    # Not past the cache: a pipe would be refused at once.
    with rig(lambda s: disk(s, tmp_path, direct=False)) as r:
        r.store(KEYS)
        replace(path_of(tmp_path, 3))
        load_around(r, 3, kind)


def test_what_cannot_be_removed_or_replaced_stays_a_miss(tmp_path: Path) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        a_folder(path_of(tmp_path, 3))
        assert all(r.lookup(1, KEYS))
        assert r.load(1, KEYS) == [1, 1, 1, 0]
        planned = r.planned([KEYS[3]])
        result = r.run(planned)
        assert not result.ok.any()
        assert result.error.startswith("EISDIR: 1 of 1 files failed (Is a directory)")
        assert r.visible(KEYS) == [1, 1, 1, 0]
        assert not list(tmp_path.glob("*/tmp/*/*"))


def test_the_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    """As docs/tiers.md describes it: anybody can check a file."""
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        page = r.setup.geometry.groups[0].page_bytes
    raw = np.frombuffer(path_of(tmp_path, 0).read_bytes(), np.uint8).copy()
    stored = raw[HEAD : HEAD + 16].tobytes()
    raw[HEAD : HEAD + 16] = 0
    assert checksum(raw) == stored
    head = raw[:HEAD].view(disk_format.HEAD_DTYPE)[0]
    assert (head["magic"], head["version"], head["group"]) == (b"kvcpage\n", 1, 0)
    assert head["page_bytes"] == page
    assert head["name"].tobytes() == bytes(32) + digest(KEYS[0])
    assert not raw[HEAD + 16 : 4096].any()


def test_a_folder_that_is_removed_under_a_tier_is_a_miss(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with rig(lambda s: disk(s, folder)) as r:
        r.store(KEYS)
        shutil.rmtree(folder)
        assert all(r.lookup(1, KEYS))
        assert r.load(1, KEYS) == [0, 0, 0, 0]
        result = r.run(r.planned(KEYS))
        assert not result.ok.any()
        assert result.error.startswith("ENOENT")
        assert not any(r.visible(KEYS))


def test_a_board_that_is_damaged_harms_nobody(tmp_path: Path) -> None:
    with (
        rig(lambda s: disk(s, tmp_path)) as one,
        rig(lambda s: disk(s, tmp_path)) as other,
    ):
        (board,) = tmp_path.glob("*/board")
        for damage in (b"", b"junk" * 7, bytes(200), os.urandom(3000)):
            board.write_bytes(damage)
            one.store(KEYS)
            assert all(one.lookup(1, KEYS))
            assert all(one.load(1, KEYS))
            for key in other.visible(KEYS):
                assert key in {0, 1}
            other.scheduler.check()


def test_a_folder_that_is_being_opened_for_ever_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.connectors.disk_folder.OPEN_SECONDS", 0.05)
    with rig(lambda s: disk(s, tmp_path)):
        lock = os.open(tmp_path / "lock", os.O_RDWR)

        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"lock is locked for more than 0 s: another process"):
            disk_again(tmp_path)
        os.close(lock)
        disk_again(tmp_path)


def disk_again(folder: Path) -> None:
    """Open and close."""
    with rig(lambda s: disk(s, folder)):
        pass
