"""The folder of a disk tier in a world that moves: removed, renamed, replaced, left half done, shared by ranks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers.disk_pieces import disk, page_paths, temporaries, wait_for
from tiers.pieces import PATIENCE, one_group

from kvcache.connectors import disk_entry, disk_locks, disk_worker
from kvcache.connectors.disk_entry import FolderEntry
from kvcache.connectors.testing import Key, Rig, Setup, chain, digest, rig
from kvcache.core.errors import ConfigError
from kvcache.core.hashing import Fingerprint

KEYS = chain("a", 3)


def layouts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def has(r: Rig, keys: list[Key]) -> bool:
    return r.lookup(1, keys) == [1] * len(keys) and all(r.load(1, keys))


# ---- ranks ---------------------------------------------------------------------------------------


def test_each_rank_of_a_model_finds_its_pages_after_a_restart(tmp_path: Path) -> None:
    """Whoever starts first must not take the others' for remains of an old model."""
    for _ in range(2):
        for rank in range(3):
            with rig(lambda s, k=rank: disk(s, tmp_path, layout=f"rank {k}")) as r:  # type: ignore[misc]
                r.store([*KEYS, Key(f"of {rank}")])
                assert has(r, KEYS)
                assert has(r, [Key(f"of {rank}")])
                assert r.visible([Key(f"of {rank - 1}")]) == [0]
    assert len(page_paths(tmp_path)) == 3 * 4


def test_models_that_take_turns_keep_their_pages(tmp_path: Path) -> None:
    for turn in range(2):
        for model in ("one", "other"):
            name = Fingerprint(model=model)
            with rig(lambda s, name=name: disk(s, tmp_path, fingerprint=name)) as r:  # type: ignore[misc]
                assert r.visible(KEYS) == [turn] * len(KEYS)
                r.store(KEYS)
    assert len(layouts(tmp_path)) == 2


def test_a_rank_replaces_its_own_old_geometry_and_no_others(tmp_path: Path) -> None:
    for size in (64, 128):
        setup = Setup(geometry=one_group(size), pages=(8,))
        with rig(lambda s: disk(s, tmp_path, layout="rank 0"), setup) as r:
            r.store(KEYS)
    assert len(layouts(tmp_path)) == 1
    with rig(lambda s: disk(s, tmp_path, layout="rank 1")):
        assert len(layouts(tmp_path)) == 2


# ---- what is left over ---------------------------------------------------------------------------


def test_a_process_killed_while_it_removes_a_layout_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
    other = Setup(geometry=one_group(128), pages=(8,))
    with monkeypatch.context() as patch:

        def killed(path: Path, **_: object) -> None:
            next(path.rglob("??/*")).unlink()  # some are gone
            raise KeyboardInterrupt

        patch.setattr(disk_entry.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            Rig(lambda s: disk(s, tmp_path), other)
    assert len([p for p in layouts(tmp_path) if p.name.startswith("gone-")]) == 1
    with rig(lambda s: disk(s, tmp_path)) as r:
        assert not any(r.visible(KEYS))  # not half of it
    assert [p.name for p in layouts(tmp_path) if p.name.startswith("gone-")] == []
    assert page_paths(tmp_path) == []


def disk_once(folder: Path, fingerprint: Fingerprint) -> None:
    with rig(lambda s: disk(s, folder, fingerprint=fingerprint)):
        pass


def test_a_file_that_was_moved_elsewhere_is_no_page(tmp_path: Path) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
    path = page_paths(tmp_path)[0]
    elsewhere = path.parent.with_name("zz")
    elsewhere.mkdir()
    path.rename(elsewhere / path.name)
    with rig(lambda s: disk(s, tmp_path)) as r:
        assert sum(r.visible(KEYS)) == 2
        assert r.scheduler.stats().gone_pages == 1
    assert len(page_paths(tmp_path)) == 2


# ---- removed, renamed ----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "*", "*/tmp", "*/tmp/*", "*/0", "*/board"])
def test_what_somebody_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As a cleaner of old files does, or an administrator with `rm -r`: the tier serves on."""
    monkeypatch.setattr(disk_worker, "CHECK_SECONDS", 0.0)
    folder = tmp_path / "cache"
    with rig(lambda s: disk(s, folder)) as r:
        r.store(KEYS)
        for path in list(folder.glob(part)) if part else [folder]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        new = chain("b", 3)
        assert r.store(new) == new
        assert has(r, new)
        assert r.lookup(1, KEYS) == [1, 1, 1]
        ok = r.load(1, KEYS)
        assert ok == [int(part not in {"", "*", "*/0"})] * 3
        assert r.visible(KEYS) == ok
        with rig(lambda s: disk(s, folder)) as other:
            assert has(other, new)
            later = chain("c", 2)
            other.store(later)
            wait_for("the news", lambda: all(r.visible(later)))
        assert len(list(folder.glob("*/tmp/*"))) == 1
    assert list(folder.glob("*/tmp/*")) == []


def test_a_file_system_that_tells_no_links_has_not_lost_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_worker, "CHECK_SECONDS", 0.0)
    real = os.fstat

    def without_links(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[stat.ST_NLINK] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(disk_entry.os, "fstat", without_links)
    with rig(lambda s: disk(s, tmp_path)) as r:
        (own,) = tmp_path.glob("*/tmp/*")
        r.store(KEYS)
        assert has(r, KEYS)
        assert list(tmp_path.glob("*/tmp/*")) == [own]


def test_a_removed_folder_that_cannot_be_made_again_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_worker, "CHECK_SECONDS", 0.0)
    folder = tmp_path / "cache"
    with rig(lambda s: disk(s, folder)) as r:
        r.store(KEYS)
        shutil.rmtree(folder)
        folder.write_text("in its place")
        assert not r.run(r.planned(chain("b", 2))).ok.any()
        assert r.lookup(1, KEYS) == [1, 1, 1]
        assert r.load(1, KEYS) == [0, 0, 0]
        folder.unlink()
        assert r.store(KEYS) == KEYS
        assert has(r, KEYS)


def test_a_renamed_folder_is_used_on_and_left_clean(tmp_path: Path) -> None:
    with rig(lambda s: disk(s, tmp_path / "a")) as r:
        r.store(KEYS)
        (tmp_path / "a").rename(tmp_path / "b")
        assert has(r, KEYS)
        assert r.store([Key("later")])
    assert not (tmp_path / "a").exists()
    assert list((tmp_path / "b").glob("*/tmp/*")) == []
    with rig(lambda s: disk(s, tmp_path / "b")) as r:
        assert has(r, [*KEYS, Key("later")])


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with rig(lambda s: disk(s, Path("of/this"))) as r:
        r.store(KEYS)
        monkeypatch.chdir("/")
        assert has(r, KEYS)
    assert len(page_paths(tmp_path / "of/this")) == 3
    assert list(tmp_path.glob("of/this/*/tmp/*")) == []


@pytest.mark.parametrize("name", ["кэш 缓存 ⚡", "a b\n'\"*?[x]", "x" * 255, "\udcff"])
def test_any_name_of_a_folder_will_do(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        with rig(lambda s: disk(s, tmp_path / name)) as r:
            r.store(KEYS)
            assert has(r, KEYS)
    assert len(layouts(tmp_path / name)) == 1


# ---- something else in a place -------------------------------------------------------------------


def a_link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def a_pipe(path: Path, _: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_file(path: Path, _: Path) -> None:
    path.write_text("in its place")


def a_folder(path: Path, _: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("replace", [a_link, a_pipe, a_folder])
@pytest.mark.parametrize("name", ["layout.txt", "board"])
def test_something_else_in_place_of_a_small_file_harms_nobody(
    tmp_path: Path, name: str, replace: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "cache"
    with rig(lambda s: disk(s, folder)) as r:
        r.store(KEYS)
    (path,) = folder.glob(f"*/{name}")
    replace(path, victim)
    if name == "board" and replace is a_folder:
        with pytest.raises(ConfigError, match=r"cannot be used \(.*Is a directory"):
            disk_once(folder, Fingerprint(model="test", kv_dtype="uint8"))
    else:
        with rig(lambda s: disk(s, folder)) as r:
            assert has(r, KEYS)
    assert victim.read_text() == "precious"


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(ConfigError, match="cannot be used"):
        disk_once(tmp_path, Fingerprint(model="m"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("replace", [a_link, a_file])
def test_what_is_in_place_of_a_folder_of_pages_makes_way(
    tmp_path: Path, replace: Callable[[Path, Path], object]
) -> None:
    """What a link leads to is neither read, written nor removed."""
    theirs = tmp_path / "theirs"
    with rig(lambda s: disk(s, tmp_path / "tier")) as r:
        r.store(KEYS[:1])
        (path,) = page_paths(tmp_path / "tier")
        path.parent.rename(theirs)
        (theirs / path.name).write_text("precious")
        replace(path.parent, theirs)
        assert r.lookup(1, KEYS[:1]) == [1]
        assert r.load(1, KEYS[:1]) == [0]
        assert r.store(KEYS[:1]) == KEYS[:1]
        assert has(r, KEYS[:1])
        assert stat.S_ISDIR(path.parent.lstat().st_mode)
    assert [(path.name, path.read_text()) for path in theirs.iterdir()] == [(path.name, "precious")]


# ---- systems that cannot -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOLCK, "this one has no locks"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.ENOSPC, "make room there"),
        (errno.EACCES, "that this process may write"),
    ],
)
def test_why_a_folder_cannot_be_used_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(disk_locks.fcntl, "flock", refuse)
        with pytest.raises(ConfigError, match=f"cannot be used .*: .*{advice}"):
            disk_once(tmp_path, Fingerprint(model="m"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_limit_of_open_files_fails_transfers_and_loses_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        r.lookup(1, KEYS)
        load, store = r.plan_load(1, KEYS), r.planned(chain("b", 2))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            failed = [r.run(load), r.run(store)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [result.error.partition(":")[0] for result in failed] == ["EMFILE", "EMFILE"]
        assert not failed[0].ok.any()
        assert not failed[1].ok.any()
        assert has(r, KEYS), "an error that says nothing of the files removed them"
        assert temporaries(tmp_path) == []
        assert r.pinned() == 0


def test_a_clock_that_was_set_back_does_not_change_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2_000_000_000 * 10**9]
    monkeypatch.setattr(disk_worker.time, "time_ns", lambda: now[0])
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store([Key("first")])
    now[0] -= 86_400 * 10**9
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store([Key("second")])
        now[0] -= 86_400 * 10**9
        r.store([Key("third")])
    order = sorted(page_paths(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in order] == [
        digest(Key(name)).hex() for name in ("first", "second", "third")
    ]


@pytest.mark.parametrize("year", [-1, 2**63 // 10**9 + 10, 0])
def test_files_of_impossible_times_are_pages_like_others(tmp_path: Path, year: int) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
    for path in page_paths(tmp_path):
        os.utime(path, (year, year))
    for _ in range(2):
        with rig(lambda s: disk(s, tmp_path)) as r:
            assert has(r, KEYS)
            assert r.store([Key("new")]) or r.visible([Key("new")])


def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    """It lives on when its parent is dead, whose remains are swept up all the same."""
    name = f"{0:08x}-{0:032x}"
    entry = FolderEntry(tmp_path, name, text="", groups=1, durable=False, seconds=PATIENCE)
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"1")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"1"
        kept = [path.resolve() for path in Path(f"/proc/{child}/fd").iterdir()]
        assert not [path for path in kept if path.is_relative_to(tmp_path)]
        assert entry.is_whole()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
    entry.close()
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("name", ["tmp", "0", "1", ""])
def test_a_folder_of_somebody_else_behind_a_link_is_left_alone(name: str, tmp_path: Path) -> None:
    """In place of a part of the tier's folder, or of a layout's."""
    root, theirs = tmp_path / "tier", tmp_path / "theirs"
    with rig(lambda s: disk(s, root)) as r:
        r.store(KEYS)
    (layout,) = layouts(root)
    shutil.rmtree(layout / name)
    for folder in ("mine/deep", "ab", "tmp/them", "0/ab"):
        (theirs / folder).mkdir(parents=True)
        (theirs / folder / ("ab" * 32)).write_text("x")
    (layout / name).symlink_to(theirs)
    before = sorted(theirs.rglob("*"))
    with (
        pytest.raises(ConfigError, match=r"cannot be used.*links are not followed"),
        rig(lambda s: disk(s, root)),
    ):
        pass
    assert sorted(theirs.rglob("*")) == before


def test_what_is_named_as_on_its_way_out_and_is_no_folder_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    root = tmp_path / "tier"
    (root / "gone-2" / "deep").mkdir(parents=True)
    os.mkfifo(root / "gone-1")
    os.mkfifo(root / "gone-2" / "deep" / "pipe")
    (root / "gone-3").symlink_to(theirs)
    with rig(lambda s: disk(s, root)) as r:
        r.store(KEYS)
        assert has(r, KEYS)
    assert sorted(path.name for path in root.glob("gone-*")) == ["gone-1", "gone-3"]
    assert theirs.is_dir()
