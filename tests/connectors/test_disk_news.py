"""What processes of one folder tell each other: missed, stale, damaged, from a process that stands still."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiers.disk_pieces import disk, page_paths, wait_for

from kvcache.connectors import disk_board, disk_news, disk_scan, disk_worker
from kvcache.connectors.base import Direction, PageRegion, TransferResult
from kvcache.connectors.disk_board import RECORD_DTYPE, Board, Change
from kvcache.connectors.disk_folder import DiskFolder
from kvcache.connectors.disk_news import DiskNews
from kvcache.connectors.disk_scan import FoundPages
from kvcache.connectors.disk_scheduler import DiskScheduler
from kvcache.connectors.testing import Key, Rig, Setup, chain, digest, rig
from kvcache.connectors.testing.harness import keyed_pages

KEYS = chain("a", 3)


def names_of(keys: list[Key]) -> NDArray[np.uint8]:
    raw = b"".join(key.namespace + digest(key) for key in keys)
    return np.frombuffer(raw, np.uint8).reshape(-1, 64)


def board_of(folder: Path, writer: int) -> Board:
    """As another process has it; to be closed."""
    (path,) = folder.glob("*/board")
    return Board(path, writer, fresh=False)


# ---- stale -----------------------------------------------------------------------------------------


def test_a_file_that_is_there_was_not_removed(tmp_path: Path) -> None:
    """Told late: another process removed an older file of that name. This one would have no owner."""
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(KEYS)
        other = board_of(tmp_path, 7)
        page_paths(tmp_path)[0].unlink()
        gone = [key for key in KEYS if page_paths(tmp_path, 0) and not file_of(tmp_path, key)]
        assert other.post(Change.REMOVED, 0, names_of(KEYS))
        os.close(other.file)
        wait_for("the news", lambda: not all(r.visible(KEYS)))
        assert [key for key, here in zip(KEYS, r.visible(KEYS), strict=True) if not here] == gone
        assert len(gone) == 1


def file_of(folder: Path, key: Key) -> list[Path]:
    return list(folder.glob(f"*/{key.group}/??/{digest(key).hex()}"))


def test_what_was_told_before_a_store_ended_is_older_than_it() -> None:
    news = DiskNews()
    nothing = FoundPages(np.zeros((0, 64), np.uint8), 0)
    scheduler = DiskScheduler([64], [4], found=[nothing], news=news, deadline_seconds=1.0)
    plan = scheduler.plan_store(keyed_pages(KEYS, [0, 1, 2]))
    assert plan is not None
    records = np.zeros(len(KEYS), RECORD_DTYPE)
    records["kind"], records["name"] = Change.REMOVED, names_of(KEYS)
    news.tell(records)  # and then the files were written
    scheduler.complete(TransferResult(plan[0].id, Direction.STORE, np.ones(3, np.uint8)))
    scheduler.check()
    assert scheduler.stats().used_bytes == 3 * 64
    assert scheduler.plan_store(keyed_pages(KEYS, [0, 1, 2])) is None


def test_who_tells_something_still_hears_what_others_told_before(tmp_path: Path) -> None:
    boards = [Board(tmp_path / "board", writer, fresh=writer == 1) for writer in (1, 2)]
    try:
        names = names_of(KEYS)
        boards[0].post(Change.STORED, 0, names[:1])
        boards[1].post(Change.STORED, 0, names[1:2])
        for board, told in zip(boards, (names[1:2], names[:1]), strict=True):
            seen = board.look()
            assert not seen.missed
            assert seen.records["name"].tolist() == told.tolist()
            assert len(board.look().records) == 0
    finally:
        for board in boards:
            os.close(board.file)


# ---- missed ----------------------------------------------------------------------------------------


def test_who_missed_news_looks_into_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would store as much again as the bound allows."""
    monkeypatch.setattr(disk_board, "RECORDS", 4)
    with rig(lambda s: disk(s, tmp_path)) as idle, rig(lambda s: disk(s, tmp_path)) as busy:
        monkeypatch.setattr(disk_news, "MAX_HEARD", 0)  # its scheduler has asked nothing for long
        for i in range(8):
            busy.store([Key(f"k{i}")])
        monkeypatch.setattr(disk_news, "MAX_HEARD", 256)
        keys = [Key(f"k{i}") for i in range(8)]
        wait_for("the listing", lambda: all(idle.visible(keys)))
        idle.store(chain("new", 8))
        assert len(page_paths(tmp_path, 0)) == 8
        idle.scheduler.check()


def test_a_listing_of_more_than_there_is_room_for_makes_room() -> None:
    news = DiskNews()
    nothing = FoundPages(np.zeros((0, 64), np.uint8), 0)
    scheduler = DiskScheduler([64], [2], found=[nothing], news=news, deadline_seconds=1.0)
    news.list(0, names_of(KEYS))
    assert scheduler.plan_store(keyed_pages(KEYS[1:], [0, 1])) is None  # the youngest two
    assert [names.tolist() for _, names in news.discarded()] == [names_of(KEYS[:1]).tolist()]
    scheduler.check()


# ---- damaged, or in the way --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**62, 2**62 - 1, 9000, 1])
def test_a_board_that_counts_wrong_harms_nobody(tmp_path: Path, count: int) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r, rig(lambda s: disk(s, tmp_path)) as other:
        (path,) = tmp_path.glob("*/board")
        with path.open("r+b") as file:
            file.write(struct.pack("<8sQQ", b"kvcboard", 1, count))
        for round_ in range(3):
            keys = chain(f"{round_}-", 2)
            assert r.store(keys) == keys
            assert r.lookup(1, keys) == [1, 1]
            assert r.load(1, keys) == [1, 1]
        wait_for("news or a listing", lambda: all(other.visible(chain("2-", 2))))
        other.scheduler.check()


def test_a_file_system_that_loses_its_locks_loses_news_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with rig(lambda s: disk(s, tmp_path)) as r:
        with monkeypatch.context() as patch:
            patch.setattr(disk_board, "lock_within", refuse)
            assert r.store(KEYS) == KEYS
            assert r.lookup(1, KEYS) == [1, 1, 1]
            assert r.load(1, KEYS) == [1, 1, 1]
            assert r.scheduler.stats().errors == {}
        assert r.store(chain("b", 3))


def test_a_process_that_stands_still_with_the_board_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    real = disk_board.lock_within

    def lock(descriptor: int, seconds: float, *, shared: bool = False) -> bool:
        if not shared:
            waited.append(seconds)
        return real(descriptor, seconds, shared=shared)

    monkeypatch.setattr(disk_board, "lock_within", lock)
    with rig(lambda s: disk(s, tmp_path), Setup(pages=(64, 2))) as r:
        with standing_still(tmp_path):
            for i in range(4):
                r.store([Key(f"k{i}")])
        assert waited[0] == disk_board.LOCK_SECONDS
        assert not any(waited[1:])
        r.store([Key("later")])
        assert r.visible([Key("later")]) == [1]


@contextmanager
def standing_still(folder: Path) -> Iterator[None]:
    """A process that was stopped in the middle of a record."""
    (path,) = folder.glob("*/board")
    still = os.open(path, os.O_RDWR)
    fcntl.flock(still, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(still)


def test_what_could_not_be_told_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps what it stored to itself as long as the board is held, and no longer."""
    monkeypatch.setattr(disk_board, "HURRY_SECONDS", 0.0)
    with rig(lambda s: disk(s, tmp_path)) as one, rig(lambda s: disk(s, tmp_path)) as other:
        with standing_still(tmp_path):
            one.store(chain("a", 6))
            other.store(chain("b", 6))
            assert len(page_paths(tmp_path, 0)) == 12

        def heard() -> bool:
            for r in (one, other):
                r.visible(chain("a", 6))
            return len(page_paths(tmp_path, 0)) <= 8

        wait_for("the news", heard)
        for r in (one, other):
            r.scheduler.check()


def test_as_long_as_nobody_can_be_told_little_is_stored(tmp_path: Path) -> None:
    """The others do not know of it, and the bound is for all together."""
    keys = [Key(f"k{i}") for i in range(12)]
    with rig(lambda s: disk(s, tmp_path), Setup(pages=(30, 2))) as r:
        with standing_still(tmp_path):
            results = [r.run(r.planned([key])) for key in keys]
        assert [int(result.ok[0]) for result in results] == [1, 1, 1] + 9 * [0]
        assert results[-1].error == "Untold: others do not know of 3 files yet"
        assert r.scheduler.stats().errors == {"Untold": 9}
        assert r.store(keys) == keys[3:]


KILLED = """
import sys
from pathlib import Path
from kvcache.connectors.disk_board import Board
from kvcache.connectors.testing import chain, rig
from tiers.disk_pieces import disk
Board.tell = lambda self: False
with rig(lambda s: disk(s, Path(sys.argv[1]))) as r:
    r.store(chain("dead", 6))
    print("ready", flush=True)
    sys.stdin.read()
"""
"""Stores, and tells nobody: as if killed between the rename and the board, or while that was held."""


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_dead_process_told_nobody_is_found_by_the_living(tmp_path: Path, how: str) -> None:
    with rig(lambda s: disk(s, tmp_path)) as r:
        r.store(chain("a", 6))
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            assert not any(r.visible(chain("dead", 6)))
            if how == "killed":
                process.kill()
            process.stdin.close()
        wait_for("a look into the folder", lambda: all(r.visible(chain("dead", 6))))
        wait_for("room", lambda: len(page_paths(tmp_path, 0)) == 8)
        assert len(list(tmp_path.glob("*/tmp/*"))) == 1  # its own
        r.scheduler.check()


def test_all_look_into_the_folder_where_one_found_a_dead_process(tmp_path: Path) -> None:
    """Who comes finds all that is there; the others did not come later than it was stored."""
    with rig(lambda s: disk(s, tmp_path), Setup(pages=(64, 2))) as r:
        (layout,) = tmp_path.glob("*-*")
        r.store(chain("a", 1))
        (known,) = page_paths(tmp_path, 0)
        hidden = tmp_path / "hidden"
        r.store(chain("b", 1))
        (new,) = set(page_paths(tmp_path, 0)) - {known}
        new.rename(hidden)
        assert r.lookup(1, chain("b", 1)) == [1]
        assert r.load(1, chain("b", 1)) == [0]
        hidden.rename(new)
        assert r.visible(chain("b", 1)) == [0]
        (layout / "tmp" / "0123456789abcdef").mkdir()
        with rig(lambda s: disk(s, tmp_path), Setup(pages=(64, 2))) as late:
            assert late.visible(chain("b", 1)) == [1]
            wait_for("a look into the folder", lambda: all(r.visible(chain("b", 1))))


def test_files_are_listed_in_steps_beside_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million files take ten seconds to look at: a load does not wait for them."""
    monkeypatch.setattr(disk_scan, "STEP_FILES", 1)
    monkeypatch.setattr(disk_worker, "LISTED_FILES", 1)
    news = DiskNews()
    folder = DiskFolder(tmp_path, text="x", page_bytes=[64], direct=False, durable=False, threads=1)
    mover = disk_worker._Mover(folder, news, [64], 0)
    memory = np.arange(64, dtype=np.uint8)[None].repeat(2, axis=0)
    names, none = names_of(chain("a", 5)), np.zeros(1, np.int64)
    where = np.full(5, memory.ctypes.data, np.uint64)
    assert not folder.write(0, names, where, np.arange(5)).any()
    mover._missed = True
    told: list[int] = []
    for _ in range(5 + 5):
        region = PageRegion(memory.ctypes.data, 64, 2)
        batch = disk_worker._Batch(
            Direction.LOAD, 0, region, names[:1], np.ones(1, np.int32), none, np.zeros(1, np.intp)
        )
        monkeypatch.setattr(disk_worker, "BUSY_SECONDS", 0.0)
        moved = mover.move(batch)
        assert moved.ok is not None
        assert moved.ok.all()
        told.append(sum(len(piece.names) for piece in news.heard()))
    assert told == 5 * [0] + 5 * [1]
    mover.close()


# ---- two bounds --------------------------------------------------------------------------------------


def test_processes_with_two_bounds_keep_to_the_smaller_and_read_no_wrong_byte(
    tmp_path: Path,
) -> None:
    """A mistake of the settings; the files of a smaller tier are what there is."""

    def tier(pages: int) -> Rig:
        return Rig(lambda s: disk(s, tmp_path), Setup(pages=(pages, 2)))

    large, small = tier(20), tier(3)
    for i in range(12):
        large.store([Key(f"l{i}")])
    wait_for("the news", lambda: all(small.visible([Key("l11")])))
    wait_for("room", lambda: len(page_paths(tmp_path, 0)) == 3)
    keys = [Key(f"l{i}") for i in range(12)]
    wait_for("the news", lambda: sum(large.visible(keys)) == 3)
    small.store(chain("s", 3))
    for r in (large, small):
        found = [key for key, here in zip(keys, r.lookup(1, keys), strict=True) if here]
        r.load(1, found)
        r.scheduler.check()
        assert r.pinned() == 0
        assert r.worker.close()
