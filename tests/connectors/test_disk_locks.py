"""Locks of files that have names: a lock counts where its file has the name still."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache.connectors import disk_locks
from kvcache.connectors.disk_locks import leads_to, lock_now, locked


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def test_a_lock_whose_file_was_replaced_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that hold locks of one name would both think to be alone."""
    path, tries = tmp_path / "lock", []

    def lock_within(descriptor: int, _: float) -> bool:
        tries.append(lock_now(descriptor))
        if len(tries) == 1:
            path.unlink()
        elif len(tries) == 2:
            path.rename(tmp_path / "moved")
            os.close(opened(path))
        return tries[-1]

    monkeypatch.setattr(disk_locks, "lock_within", lock_within)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with locked(path, 5):
        other = opened(path)
        assert not lock_now(other)
    assert tries == [True] * 3
    assert lock_now(other)
    os.close(other)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_path_leads_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = opened(path)
    assert leads_to(path, descriptor)
    path.rename(tmp_path / "moved")
    assert not leads_to(path, descriptor)
    path.symlink_to(tmp_path / "moved")
    assert not leads_to(path, descriptor)
    os.close(descriptor)
