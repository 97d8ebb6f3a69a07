"""Real processes: killed in the middle of a store, racing for the same keys, sharing one bound."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers import disk_kills, disk_process
from tiers.disk_pieces import disk, page_paths, temporaries, wait_for
from tiers.pieces import PATIENCE

from kvcache.connectors.testing import Follower, Key, Rig, Setup, chain, rig

SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
PROGRAM = Path(disk_process.__file__)


def start(folder: Path, action: str, seed: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(folder), action, str(seed), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("seed", range(3 * SCALE))
def test_a_process_killed_in_the_middle_of_a_store_leaves_whole_pages_only(
    tmp_path: Path, seed: int
) -> None:
    """Right bytes for every key that is found; what it reported is found; nothing else is left."""
    chance = random.Random(seed)
    with killed_at_the_end(start(tmp_path, "store", seed)) as process:
        wait_for("a page", lambda: page_paths(tmp_path))
        time.sleep(chance.random() * 0.05)
        wait_for("a store", lambda: temporaries(tmp_path))  # in the middle of one
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
    reported = [Key(line.split()[1]) for line in out.splitlines() if line.startswith("stored")]
    files = len(page_paths(tmp_path))
    with rig(
        lambda s: disk(s, tmp_path), Setup(geometry=disk_process.large(), pages=(64,)), pages=64
    ) as r:
        assert temporaries(tmp_path) == []
        assert len(list(tmp_path.glob("*/tmp/*"))) == 1  # its own
        assert r.scheduler.stats().used_bytes == files * r.setup.geometry.groups[0].page_bytes
        assert files >= len(reported)
        if files < 64:  # else the oldest were evicted
            assert all(r.visible(reported))
        planned = [Key(f"{seed}/{i}/{j}") for i in range(files // 4 + 2) for j in range(4)]
        found = [key for key, here in zip(planned, r.visible(planned), strict=True) if here]
        assert len(found) == files
        for request, key in enumerate(found[-32:]):
            assert r.lookup(request, [key]) == [1]
            assert r.load(request, [key]) == [1]


def test_a_process_killed_while_another_uses_the_folder(tmp_path: Path) -> None:
    """The other goes on, and whoever comes next sweeps up after the dead one."""
    setup = Setup(geometry=disk_process.large(), pages=(64,))
    with rig(lambda s: disk(s, tmp_path), setup, pages=8) as r:
        with killed_at_the_end(start(tmp_path, "store", 1)) as process:
            wait_for("a store", lambda: temporaries(tmp_path))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        keys = chain("mine", 3)
        assert r.store(keys) == keys
        assert len(list(tmp_path.glob("*/tmp/*"))) == 2
        with rig(lambda s: disk(s, tmp_path), setup, pages=8) as late:
            assert len(list(tmp_path.glob("*/tmp/*"))) == 2  # the first one's and its own
            assert temporaries(tmp_path) == []
            assert all(late.lookup(1, keys))
            assert all(late.load(1, keys))
        assert all(r.lookup(1, keys))
        assert all(r.load(1, keys))


@pytest.mark.parametrize("seed", range(2 * SCALE))
def test_processes_killed_at_any_moment_leave_whole_pages_only(tmp_path: Path, seed: int) -> None:
    """In the middle of an open, of an eviction, of a load, too."""
    command = [sys.executable, disk_kills.__file__, str(tmp_path), str(seed), "25"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done "), done.stdout


@pytest.mark.parametrize("seed", range(2 * SCALE))
def test_processes_that_race_for_the_same_keys_read_no_wrong_byte(
    tmp_path: Path, seed: int
) -> None:
    """Each evicts what the others stored; the bound holds for all together."""
    racers = [start(tmp_path, "race", 10 * seed + i, "80") for i in range(2)]
    most, loaded = 0, 0
    while any(racer.poll() is None for racer in racers):
        most = max(most, len(page_paths(tmp_path, 0)))
        time.sleep(0.002)
    for racer in racers:
        out, _ = racer.communicate(timeout=PATIENCE)
        assert racer.returncode == 0, out
        _, ok, _ = out.split()
        loaded += int(ok)
    assert loaded > 25
    # What each stores right now the other does not know yet: one store of each, at most.
    assert most <= disk_process.RACE_PAGES + 12
    assert temporaries(tmp_path) == []
    with rig(lambda s: disk(s, tmp_path), Setup(pages=(100, 1))) as r:
        keys = [Key(f"k{i}") for i in range(disk_process.RACE_KEYS)]
        found = [key for key, here in zip(keys, r.visible(keys), strict=True) if here]
        assert len(found) == len(page_paths(tmp_path, 0))
        assert r.lookup(1, found) == [1] * len(found)
        assert all(r.load(1, found))


# ---- two tiers of one folder, told step by step ----------------------------------------------------


@contextmanager
def two(folder: Path, setup: Setup | None = None) -> Iterator[tuple[Rig, Rig]]:
    with (
        rig(lambda s: disk(s, folder), setup) as one,
        rig(lambda s: disk(s, folder), setup) as other,
    ):
        yield one, other


def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = [*chain("a", 3), *chain("a", 2, 1)]
        one.store(keys)
        wait_for("the news", lambda: all(other.visible(keys)))
        assert other.plan_store(keys) is None
        assert all(other.lookup(1, keys))
        assert all(other.load(1, keys))
        foreign = chain("f", 2, 0, b"\x05" * 32)
        other.store(foreign)
        wait_for("the news", lambda: all(one.visible(foreign)))
        one.lookup(1, foreign)
        assert all(one.load(1, foreign))


def test_what_one_evicts_the_other_does_not_promise(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = chain("a", 8)
        one.store(keys)
        wait_for("the news", lambda: all(other.visible(keys)))
        assert all(other.lookup(1, keys[:2]))  # a promise, which no other process knows of
        for key in chain("b", 8):
            one.store([key])
        wait_for("the news", lambda: not any(other.visible(keys[2:])))
        assert other.load(1, keys[:2]) == [0, 0]
        assert other.scheduler.stats().failed_pages == 2
        assert other.scheduler.stats().pinned_pages == 0
        # While it held slots for what was gone, it made room for two of the new ones.
        assert len(page_paths(tmp_path, 0)) in range(6, 9)


def test_one_bound_for_all(tmp_path: Path) -> None:
    """What the other stores takes a slot here, the oldest of both goes first."""
    with two(tmp_path) as (one, other):
        one.store(chain("a", 5))
        wait_for("the news", lambda: all(other.visible(chain("a", 5))))
        other.store(chain("b", 5))
        wait_for("the news", lambda: all(one.visible(chain("b", 5))))
        assert len(page_paths(tmp_path, 0)) == 8
        assert one.visible(chain("a", 5)) == other.visible(chain("a", 5)) == [1, 1, 1, 0, 0]
        for r in (one, other):
            assert r.scheduler.stats().used_bytes == 8 * r.setup.geometry.groups[0].page_bytes


def test_what_one_uses_is_not_old_for_the_other(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        one.store(chain("a", 1))
        one.store(chain("b", 7))
        wait_for("the news", lambda: all(other.visible(chain("b", 7))))
        one.lookup(1, chain("a", 1))
        assert all(one.load(1, chain("a", 1)))
        one.store(chain("d", 1, 1))
        wait_for("the news", lambda: all(other.visible(chain("d", 1, 1))))  # and what came before
        other.store(chain("c", 7))
        assert other.visible(chain("a", 1)) == [1]


def test_events_tell_what_others_stored_and_removed(tmp_path: Path) -> None:
    with two(tmp_path, Setup(events=True)) as (one, other):
        follower = Follower()
        one.store(chain("a", 8))
        wait_for("the news", lambda: all(other.visible(chain("a", 8))))
        follower.apply(other.scheduler.take_events())
        assert all(map(follower.knows, chain("a", 8)))
        one.store(chain("b", 3))
        wait_for("the news", lambda: all(other.visible(chain("b", 3))))
        follower.apply(other.scheduler.take_events())
        assert [follower.knows(key) for key in chain("a", 8)] == other.visible(chain("a", 8))


def test_a_store_that_both_make_at_once_is_one_file(tmp_path: Path) -> None:
    with two(tmp_path) as (one, other):
        keys = chain("a", 4)
        plans = one.planned(keys), other.planned(keys)
        for r, plan in zip((one, other), plans, strict=True):
            assert r.run(plan).ok.all()
        assert len(page_paths(tmp_path)) == 4
        for r in (one, other):
            wait_for("the news", lambda r=r: r.visible(keys) == [1] * 4)
            r.lookup(1, keys)
            assert all(r.load(1, keys))
            assert r.pinned() == 0
