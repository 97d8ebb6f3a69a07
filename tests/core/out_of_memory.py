"""Random calls under a tight limit of address space: run as `out_of_memory.py FIRST LAST` (seeds).

Prints one line for each seed after which an invariant is broken or something leaked, and a last
line `N of M ran out of memory`.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from pathlib import Path

import numpy as np

from kvcache import Dense, FullAttention, Geometry, Manager, NativeError, RecurrentState, Sparse
from kvcache.core.records import UNLIMITED

GEOMETRY = Geometry(
    (
        FullAttention(name="kv", layers=1, kv_heads=1, head_dim=1, block_tokens=1),
        RecurrentState(name="s", layers=1, state_bytes_per_layer=8),
    )
)
TOKENS = np.arange(60_000, dtype=np.int32)


def limit_memory(extra_bytes: int | None) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = resource.RLIM_INFINITY
    bound = unlimited if extra_bytes is None else used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, unlimited))


class Play:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        retention = self.r.choice([Dense(), Sparse(0)])
        self.m = Manager(GEOMETRY, slabs=UNLIMITED, retention=retention, max_open_steps=3)
        self.open: set[int] = set()
        self.steps: list[int] = []
        self.loads: list[tuple[int, int]] = []

    def turn(self) -> None:
        r, m = self.r, self.m
        handle = m.open(TOKENS[: r.randrange(1, 40_000)], max_tokens=70_000)
        self.open.add(handle)
        present = [np.ones(r.randrange(500), np.uint8)] * 2 if r.random() < 0.3 else None
        m.lookup(handle, present)
        grant = m.allocate(handle, r.randrange(1, 6000))
        assert grant is not None
        if grant.load:
            self.loads.append((grant.load, grant.load_pages))
            return
        self.steps.append(m.begin_step())
        m.commit(handle, grant.end)
        m.extend(handle, TOKENS[: r.randrange(100)])
        if r.random() < 0.7 or len(self.steps) == 3:
            m.end_step(self.steps[0])
            self.steps.pop(0)
        if r.random() < 0.4:
            victim = r.choice(sorted(self.open))
            m.finish(victim)
            self.open.remove(victim)

    def run(self) -> bool:
        """Whether memory ran out."""
        limit_memory(self.r.randrange(8 << 20))
        try:
            for _ in range(200):
                self.turn()
        except (NativeError, MemoryError):
            return True
        finally:
            limit_memory(None)
        return False

    def settle(self) -> None:
        m = self.m
        m.check()
        for load, pages in self.loads:
            m.end_load(load, np.zeros(pages, np.uint8))
        for handle in self.open:
            m.abort(handle)
        for step in self.steps:
            m.end_step(step)
        m.check()
        assert sum(c.held for c in m.arena_stats().classes) == 0
        assert m.stats()[:4] == (0, 0, 0, 0)


def main(first: int, last: int) -> None:
    ran_out = 0
    for seed in range(first, last):
        child = os.fork()  # the address space of a used-up process does not shrink
        if child == 0:
            status = 1
            try:
                play = Play(seed)
                status = 3 if play.run() else 0
                play.settle()
            except BaseException as error:  # noqa: BLE001
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                status = 1
            os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ran_out += code == 3
        if code < 0:
            print(f"seed {seed}: died of signal {-code}", flush=True)
    print(f"{ran_out} of {last - first} ran out of memory", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
