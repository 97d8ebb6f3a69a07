"""One region, several real processes: they share, race, stop, and are killed at any time."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tiers import shared_process
from tiers.pieces import PATIENCE
from tiers.shared_others import at, held, kill, nothing_left, process, wait_for
from tiers.shared_pieces import shared

from kvcache.connectors.testing import Key, Setup, chain, rig

SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
LARGE = Setup(geometry=shared_process.large(), pages=(16,))


@pytest.mark.parametrize("seed", range(2 * SCALE))
def test_a_process_killed_in_the_middle_of_a_store_leaves_whole_pages_only(
    tmp_path: Path, seed: int
) -> None:
    """Right bytes for every key that is found; what it reported is found; its slots are free again."""
    chance = random.Random(seed)
    with rig(at(tmp_path), LARGE, pages=16) as r:
        with process(tmp_path, "store", seed) as victim:
            for _ in range(chance.randint(1, 3) * 4):
                victim.stdout.readline()
            time.sleep(chance.random() * 0.02)
            out = kill(victim)
        reported = [Key(line.split()[1]) for line in out.splitlines()[-1:] if line.count(" ") == 1]
        wait_for("the burial", lambda: held(r) == 0)
        keys = [Key(f"{seed}/{i}/{j}") for i in range(100) for j in range(4)]
        found = [key for key, here in zip(keys, r.visible(keys), strict=True) if here]
        assert set(reported) <= set(found)
        assert 4 <= len(found) <= 16
        for request, key in enumerate(found):
            assert r.lookup(request, [key]) == [1]
            assert r.load(request, [key]) == [1]
        assert len(r.store(chain("mine", 16))) == 16  # every slot may be used
    assert nothing_left(tmp_path)


def test_what_a_dead_process_held_is_let_go(tmp_path: Path) -> None:
    """Its pins, the load that it had begun, and slots that it never filled."""
    with rig(at(tmp_path)) as r:
        with process(tmp_path, "hold") as victim:
            keys = chain("h", 4)
            assert r.visible(keys) == [1] * 4
            for name in "abc":
                r.store(chain(name, 2))
            assert r.visible(keys) == [1] * 4, "another process's pins did not count"
            assert held(r) == 6
            kill(victim)
        wait_for("the burial", lambda: held(r) == 0)
        assert r.visible(chain("never", 2)) == [0, 0]
        r.store(chain("x", 8))
        assert r.visible(keys) == [0] * 4
        assert r.visible(chain("x", 8)) == [1] * 8
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("seed", range(SCALE))
def test_processes_that_race_for_the_same_keys_read_no_wrong_byte(
    tmp_path: Path, seed: int
) -> None:
    """Each evicts what the others stored."""
    with (
        rig(at(tmp_path), Setup(pages=(shared_process.RACE_PAGES, 1))) as r,
        process(tmp_path, "race", 10 * seed, "80") as one,
        process(tmp_path, "race", 10 * seed + 1, "80") as other,
    ):
        loaded = 0
        for racer in (one, other):
            out, _ = racer.communicate(timeout=PATIENCE)
            assert racer.returncode == 0, out
            _, ok, missed = out.split()
            assert int(missed) == 0  # what was looked up is there, whoever stores meanwhile
            loaded += int(ok)
        assert loaded > 25
        keys = [Key(f"k{i}") for i in range(shared_process.RACE_KEYS)]
        found = [key for key, here in zip(keys, r.visible(keys), strict=True) if here]
        assert len(found) == shared_process.RACE_PAGES
        r.lookup(1, found)
        assert all(r.load(1, found))
        assert held(r) == 0
    assert nothing_left(tmp_path)


def test_a_region_whose_last_user_was_killed_is_removed_by_the_next_that_comes(
    tmp_path: Path,
) -> None:
    with process(tmp_path, "hold") as victim:
        kill(victim)
    assert (tmp_path / "region" / "region").exists()
    with rig(lambda s: shared(s, tmp_path, name="other")) as r:
        assert not (tmp_path / "region").exists()
        r.store(chain("a", 2))
    with rig(at(tmp_path), Setup(pages=(3, 3))) as r:  # of another size: nobody is there to mind
        assert r.visible(chain("h", 4)) == [0] * 4
    assert nothing_left(tmp_path)
