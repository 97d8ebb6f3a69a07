"""A process of its own that uses a shared region until it is told to stop, or killed.

python shared_process.py FOLDER ACTION SEED [ROUNDS]

store: pages of chain after chain, one line `stored NAME` for each that was reported good, for ever.
hold: stores a chain, looks it up (`held`), begins to load it, and never ends.
lock: takes the region's lock, as one would that was stopped in the middle of a change; lets it go at
each line (`free`), and takes it again at the next (`locked`).
fork: stores and looks up as `hold` does; then a child says what it finds (`child PID FOUND`) and lives on.
crowd: opens files up to the limit, and says whether the region is used (`used`).
race: the same few keys as every other such process: each round looks some up, loads what is there,
compares every byte, stores the rest. Ends with `done LOADED MISSED`; exit 1 at a wrong byte.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from kvcache.connectors.shared_users import is_used
from kvcache.connectors.testing import Gate, Key, Setup, chain, rig
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiers.pieces import PATIENCE
from tiers.shared_pieces import shared

RACE_PAGES = 12
RACE_KEYS = 30
MUTEX_AT = 112
"""Of `SharedHead`: what stands before the lock."""


def large() -> Geometry:
    """Pages that take a while to copy."""
    return Geometry(
        (FullAttention(name="kv", layers=32, kv_heads=8, head_dim=128, block_tokens=16),)  # 2 MiB
    )


def store(folder: Path, seed: int) -> None:
    with rig(lambda s: shared(s, folder), Setup(geometry=large(), pages=(16,)), pages=8) as r:
        print("ready", flush=True)
        for i in range(10**6):
            for key in r.store(chain(f"{seed}/{i}/", 4)):
                print("stored", key.name, flush=True)


def hold(folder: Path) -> None:
    gate = Gate()
    with rig(lambda s: shared(s, folder), Setup(before_copy=gate)) as r:
        keys = chain("h", 4)
        r.store(keys)
        r.lookup(1, keys)
        gate.shut()
        r.lookup(2, keys[:2])
        r.submit(r.plan_load(2, keys[:2]))
        gate.wait_reached()
        r.submit(r.planned(chain("never", 2)))
        print("ready", flush=True)
        sys.stdin.read()


def lock(folder: Path) -> None:
    with rig(lambda s: shared(s, folder)):
        system, mutex = ctypes.CDLL(None), ctypes.c_void_p(_base(folder) + MUTEX_AT)
        system.pthread_mutex_lock(mutex)
        print("ready", flush=True)
        for turn, _ in enumerate(sys.stdin):
            (system.pthread_mutex_lock if turn % 2 else system.pthread_mutex_unlock)(mutex)
            print("locked" if turn % 2 else "free", flush=True)


def fork(folder: Path) -> None:
    with rig(lambda s: shared(s, folder)) as r:
        keys = chain("h", 4)
        r.store(keys)
        r.lookup(1, keys)
        print("ready", flush=True)
        if os.fork() == 0:
            found = sum(r.lookup(2, keys))
            r.scheduler.release(1)
            r.worker.close(PATIENCE)
            print("child", os.getpid(), found, flush=True)
            os.close(1)
            sys.stdin.read()
            os._exit(0)
        signal.pause()


def crowd(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print("ready", flush=True)
    with suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)
    print("used" if is_used(folder / "region" / "region") else "unused", flush=True)


def _base(folder: Path) -> int:
    """Where this process has mapped the region."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(folder / "region" / "region")):
            return int(line.split("-")[0], 16)
    raise LookupError("the region is not mapped")


def race(folder: Path, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    keys = [Key(f"k{i}") for i in range(RACE_KEYS)]
    loaded = missed = 0
    with rig(lambda s: shared(s, folder), Setup(pages=(RACE_PAGES, 1))) as r:
        print("ready", flush=True)
        for request in range(rounds):
            asked = chance.sample(keys, chance.randint(1, 6))
            there = [key for key, here in zip(asked, r.lookup(request, asked), strict=True) if here]
            ok = r.load(request, there)  # ContractError at a wrong byte
            loaded, missed = loaded + sum(ok), missed + len(ok) - sum(ok)
            r.store([key for key in asked if chance.random() < 0.8])
            r.scheduler.check()
    print("done", loaded, missed, flush=True)


if __name__ == "__main__":
    where, action, number, *more = sys.argv[1:]
    if action == "store":
        store(Path(where), int(number))
    elif action == "hold":
        hold(Path(where))
    elif action in {"lock", "fork", "crowd"}:
        {"lock": lock, "fork": fork, "crowd": crowd}[action](Path(where))
    else:
        race(Path(where), int(number), int(more[0]))
