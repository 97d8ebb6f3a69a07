"""Who is a user of a shared region: whatever happens to names, at a fork, or at a limit of the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tiers import shared_process
from tiers.pieces import PATIENCE
from tiers.shared_others import at, held, kill, nothing_left, process, wait_for
from tiers.shared_pieces import shared

from kvcache.connectors.shared_users import UserLocks, is_used
from kvcache.connectors.testing import Setup, chain, rig
from kvcache.core.errors import ConfigError

Require = Callable[[str, str], NoReturn]
HELD = chain("h", 4)


def test_who_leaves_a_region_that_was_removed_takes_nothing_from_its_successor(
    tmp_path: Path,
) -> None:
    """Neither its users' numbers, and with these their pins, nor its files."""
    with rig(at(tmp_path)) as old:
        shutil.rmtree(tmp_path / "region")
        with process(tmp_path, "hold"):
            old.worker.close(PATIENCE)
            with rig(at(tmp_path)) as r:
                assert held(r) == 6
                r.store(chain("a", 8))
                assert r.visible(HELD) == [1] * 4


def test_users_of_a_region_that_was_removed_know_each_others_lives(tmp_path: Path) -> None:
    """By the file that they share, whatever has its name now."""
    with rig(at(tmp_path)) as r, process(tmp_path, "hold") as living:
        region = r.scheduler._region  # type: ignore[attr-defined]
        shutil.rmtree(tmp_path / "region")
        with process(tmp_path, "hold"), process(tmp_path, "hold") as other:
            kill(other)  # the number that `living` has in the old region is a dead one's in the new
            region.bury()
            assert held(r) == 6
        kill(living)
        wait_for("the burial", lambda: held(r) == 0)


def test_where_it_cannot_be_told_whether_a_region_is_used_it_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "region" / "region"
    assert not is_used(file)
    with rig(at(tmp_path)) as r:
        with process(tmp_path, "crowd") as crowded:
            assert crowded.stdout.readline() == "used\n"
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="cannot be used"):
            shared(Setup(), tmp_path)
        assert file.is_symlink()
        r.store(HELD)
        assert r.visible(HELD) == [1] * 4


def test_numbers_are_those_of_an_open_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    one, other = UserLocks(file), UserLocks(file)
    assert one.take(3)
    assert not other.take(3)
    assert other.take(4)
    assert one.others()
    one.close()
    assert other.take(3)
    assert not other.others()
    assert is_used(file)
    other.give_back(3)
    assert is_used(file)
    assert other.lead_from(file)
    file.rename(tmp_path / "moved")
    file.touch()
    assert not other.lead_from(file)
    other.close()
    assert not is_used(tmp_path / "moved")


def test_a_forked_child_keeps_nothing_of_its_dead_parent(tmp_path: Path) -> None:
    """And has no tier: it finds nothing, and its close is nothing to its parent."""
    with rig(at(tmp_path)) as r, process(tmp_path, "fork") as parent:
        _, child, found = parent.stdout.readline().split()
        assert found == "0"
        assert held(r) == 4
        parent.kill()
        parent.wait(PATIENCE)
        wait_for("the burial", lambda: held(r) == 0)
        os.kill(int(child), 0)  # it lives
        parent.communicate()
        assert r.visible(HELD) == [1] * 4
    assert nothing_left(tmp_path)


def test_another_pid_namespace_is_refused(tmp_path: Path, require: Require) -> None:
    """The lock knows its owner by a number that somebody else may have there."""
    under = ["unshare", "--pid", "--fork"]
    if subprocess.run([*under, "true"], check=False, capture_output=True).returncode:
        require("unshare", "this process may not make a pid namespace")
    with rig(at(tmp_path)):
        command = [*under, sys.executable, shared_process.__file__, str(tmp_path), "hold", "0"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "its users are in another pid namespace" in done.stderr
