"""A process of its own that stores pages in a folder, or stores and loads until it is told to stop.

python disk_process.py FOLDER ACTION SEED [ROUNDS]

store: pages of chain after chain, one line `stored NAME` for each that was reported good, for ever.
race: the same few keys as every other such process: each round looks some up, loads what is there,
compares every byte, stores the rest. Ends with `done LOADED MISSED`; exit 1 at a wrong byte.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvcache.connectors.testing import Key, Setup, chain, rig
from kvcache.core.layout import Geometry
from kvcache.core.specs import FullAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiers.disk_pieces import disk

RACE_PAGES = 12
RACE_KEYS = 30


def large() -> Geometry:
    """Pages that take a while to write."""
    return Geometry(
        (FullAttention(name="kv", layers=32, kv_heads=8, head_dim=128, block_tokens=16),)  # 2 MiB
    )


def store(folder: Path, seed: int) -> None:
    setup = Setup(geometry=large(), pages=(64,))
    with rig(lambda s: disk(s, folder, direct=False), setup, pages=8) as r:
        print("ready", flush=True)
        for i in range(10**6):
            for key in r.store(chain(f"{seed}/{i}/", 4)):
                print("stored", key.name, flush=True)


def race(folder: Path, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    keys = [Key(f"k{i}") for i in range(RACE_KEYS)]
    loaded = missed = 0
    with rig(lambda s: disk(s, folder, direct=False), Setup(pages=(RACE_PAGES, 1))) as r:
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
    else:
        race(Path(where), int(number), int(more[0]))
