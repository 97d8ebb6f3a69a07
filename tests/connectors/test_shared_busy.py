"""A region whose lock another process has: for a moment, or for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiers.shared_others import at, held, kill, process, wait_for
from tiers.shared_pieces import shared

from kvcache.connectors.testing import Key, Rig, chain, rig
from kvcache.core.shared_pool import SharedTables


def say(other: Any, answer: str) -> None:
    """The other process lets the lock go, or takes it again."""
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == f"{answer}\n"


def found(r: Rig, request: int, keys: list[Key]) -> list[int] | None:
    flags = r.scheduler.lookup(r.request_keys(request, keys))
    return None if flags is None else flags[0].tolist()


def test_one_that_stopped_in_the_middle_of_a_change_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing is known, then nothing is found; when it dies, all is repaired and what was owed is done."""
    with rig(at(tmp_path)) as r:
        keys = chain("a", 3)
        r.store(keys)
        assert r.lookup(1, keys) == [1] * 3
        with process(tmp_path, "lock") as victim:
            assert found(r, 2, keys) is None
            assert found(r, 2, keys) is None
            assert found(r, 2, keys) == [0] * 3  # the third time in a row: there is a pause now
            assert r.lookup(1, keys) == [1] * 3
            assert r.plan_store(chain("b", 2)) is None
            assert r.scheduler.stats().dropped_store_pages == 2
            r.scheduler.release(1)
            assert r.scheduler.busy_calls >= 5  # type: ignore[attr-defined]
            kill(victim)
        wait_for("the end of the pause", lambda: found(r, 2, keys) == [1] * 3)
        assert held(r) == 3
        r.scheduler.release(2)
        assert held(r) == 0
        assert r.scheduler.stats().unknown_ids == 0
        assert r.scheduler.repairs == 1  # type: ignore[attr-defined]
        assert r.store(chain("b", 2)) == chain("b", 2)
        r.scheduler.check()


def test_a_lookup_that_was_not_answered_is_asked_anew(tmp_path: Path) -> None:
    """And is known, so that it can be let go; what another of the request had promised stands."""
    with rig(at(tmp_path)) as r, process(tmp_path, "lock") as other:
        say(other, "free")
        keys = chain("a", 3)
        r.store(keys)
        assert r.lookup(1, keys[:2]) == [1] * 2
        say(other, "locked")
        assert found(r, 2, keys) is None
        assert found(r, 1, keys) is None
        say(other, "free")
        assert held(r) == 2
        assert found(r, 2, keys) == [1] * 3
        assert found(r, 1, keys) == [1] * 3
        say(other, "locked")
        assert found(r, 3, keys) is None
        assert r.scheduler.holds(r.request_keys(4, keys)) is None
        for request in (1, 2, 3):
            r.scheduler.release(request)
        say(other, "free")
        wait_for("the end of the pause", lambda: held(r) == 0)
        assert r.scheduler.stats().unknown_ids == 0
        r.scheduler.check()


def test_what_was_not_found_in_a_pause_is_found_after_it(tmp_path: Path) -> None:
    """Though nothing was stored or evicted since."""
    with rig(at(tmp_path)) as r, process(tmp_path, "lock") as other:
        say(other, "free")
        keys = chain("a", 3)
        r.store(keys)
        say(other, "locked")
        wait_for("the pause", lambda: found(r, 1, keys) == [0] * 3)
        say(other, "free")
        wait_for("the end of the pause", lambda: found(r, 1, keys) == [1] * 3)


def test_a_page_that_was_stored_meanwhile_is_found(tmp_path: Path) -> None:
    """Its key is owed, then its slot is let go: in this order."""
    with rig(at(tmp_path)) as r, process(tmp_path, "lock") as other:
        say(other, "free")
        keys = chain("a", 3)
        plan = r.planned(keys)
        r.submit(plan)
        result = r.results(plan.id)[plan.id][-1]
        say(other, "locked")
        r.scheduler.complete(result)
        assert r.scheduler.stats().stored_pages == 3
        say(other, "free")
        wait_for("the end of the pause", lambda: r.visible(keys) == [1] * 3)
        assert held(r) == 0
        r.scheduler.check()


def test_what_was_promised_is_loaded_without_the_lock(tmp_path: Path) -> None:
    with rig(at(tmp_path)) as r, process(tmp_path, "lock") as other:
        say(other, "free")
        keys = chain("a", 4)
        r.store(keys)
        assert r.lookup(1, keys) == [1] * 4
        say(other, "locked")
        wanted = [keys[1], keys[3]]
        transfer = r.plan_load(1, wanted)
        assert (transfer.slots >= 0).all()
        say(other, "free")
        assert held(r) == 2
        assert r.run(transfer).ok.tolist() == [1, 1]
        assert held(r) == 0
        r.scheduler.check()


def test_who_attaches_waits_for_those_who_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(at(tmp_path)), process(tmp_path, "lock") as other:
        tries: list[bool] = []

        def forget(tables: SharedTables, user: int, real: Any = SharedTables.forget) -> bool:
            tries.append(real(tables, user))
            if len(tries) == 2:
                say(other, "free")
            return tries[-1]

        monkeypatch.setattr(SharedTables, "forget", forget)
        with rig(lambda s: shared(s, tmp_path)) as r:
            assert tries[:3] == [False, False, True]
            monkeypatch.undo()
            r.store(chain("a", 2))
            assert r.visible(chain("a", 2)) == [1, 1]
