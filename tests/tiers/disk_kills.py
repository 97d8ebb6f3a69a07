"""Processes on one folder that are killed at any moment: in the middle of an open, a store, a load, an eviction.

python disk_kills.py FOLDER SEED KILLS

Forks two users of the folder, kills one of them after a random time, forks another, and so on. Then all that is left
is read: ends with `done FILES`; exit 1 at a wrong byte, at a file that is no page, or where a user ended by itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvcache.connectors import disk_format
from kvcache.connectors.testing import Key, Setup, rig
from kvcache.core import native
from kvcache.core.page_files import checksum

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiers.disk_pieces import disk, page_paths, temporaries

PAGES = (8, 5)
FOREIGN = b"\x07" * 32
KEYS = [
    *(Key(f"k{i}") for i in range(14)),
    *(Key(f"g{i}", 1) for i in range(9)),
    *(Key(f"f{i}", 0, FOREIGN) for i in range(4)),
]
USERS = 2
HEAD = disk_format.HEAD_DTYPE.itemsize


def use(folder: Path, seed: int) -> None:
    """Store and load at random, for ever."""
    chance = random.Random(seed)
    options = {"direct": chance.choice((None, False)), "threads": chance.choice((1, 3))}
    with rig(lambda s: disk(s, folder, **options), Setup(pages=PAGES), pages=16) as r:
        for request in range(10**9):
            asked = chance.sample(KEYS, chance.randint(1, 6))
            asked = [key for key in asked if key.namespace == asked[0].namespace]
            there = [key for key, here in zip(asked, r.lookup(request, asked), strict=True) if here]
            r.load(request, there)
            r.store([key for key in asked if chance.random() < 0.8])
            r.scheduler.check()


def look(folder: Path) -> int:
    """Every file is a page, whole, and found under its key; nothing is left half done."""
    with rig(lambda s: disk(s, folder), Setup(pages=(99, 99)), pages=64) as r:
        assert temporaries(folder) == []
        assert len(list(folder.glob("*/tmp/*"))) == 1
        loaded = 0
        for namespace in {key.namespace for key in KEYS}:
            keys = [key for key in KEYS if key.namespace == namespace]
            there = [key for key, here in zip(keys, r.lookup(1, keys), strict=True) if here]
            assert all(r.load(1, there))
            loaded += len(there)
        files = page_paths(folder)
        for path in files:
            raw = np.fromfile(path, np.uint8)
            stored = raw[HEAD : HEAD + 16].tobytes()
            raw[HEAD : HEAD + 16] = 0
            assert checksum(raw) == stored, path
        assert len(files) == loaded
        return loaded


def forked(run: Callable[[], object]) -> int:
    child = os.fork()
    return child or _ended_by(run)


def _ended_by(run: Callable[[], object]) -> NoReturn:
    try:
        run()
    except BaseException:  # noqa: BLE001  (a forked child must not go on as its parent)
        traceback.print_exc()
    os._exit(9)


def main(folder: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    native.load()  # once, for all
    users: list[int] = []
    for _ in range(kills):
        while len(users) < USERS:
            own = chance.randrange(2**32)
            users.append(forked(lambda own=own: use(folder, own)))  # type: ignore[misc]
        time.sleep(chance.random() * chance.choice((0.01, 0.05, 0.2)))
        _kill(users.pop(chance.randrange(len(users))))
    for user in users:
        _kill(user)
    print("done", look(folder), flush=True)


def _kill(user: int) -> None:
    os.kill(user, signal.SIGKILL)
    _, status = os.waitpid(user, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "a user ended by itself"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
