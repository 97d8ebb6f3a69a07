"""A chain at random: bytes that come back are right, what has sunk stays, nothing stays pinned."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiers.chain_pieces import host_over_disk
from tiers.disk_pieces import disk, page_paths, temporaries
from tiers.pieces import PATIENCE
from tiers.random_play import play_at_random
from tiers.stamp_engine import GEOMETRY, engine

from kvcache.connectors.chain_scheduler import ChainScheduler
from kvcache.connectors.testing import Faults, Key, Rig, Setup, chain
from kvcache.core.hashing import NATIVE_NAMESPACE
from kvcache.retention import Dense, Sparse

CHAINS = [
    chain(name, 7, group, space)
    for name in "ab"
    for group in (0, 1)
    for space in (NATIVE_NAMESPACE, b"\x09" * 32)
]


class ChainMachine(RuleBasedStateMachine):
    """A small host tier over a disk that holds all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="chain-machine-"))
        self.stored: set[Key] = set()
        """Those that a store was good for, ever."""
        self.sunk: set[Key] = set()
        """Those that must be on the disk."""

    @initialize(host=st.sampled_from(((3, 2), (8, 8), (1, 1))))
    def start(self, host: tuple[int, int]) -> None:
        self.host = host
        self.open()

    def open(self) -> None:
        self.rig = Rig(
            lambda s: host_over_disk(s, self.folder, host_pages=self.host),
            Setup(pages=(40, 40)),
        )

    def visible(self, which: int | None = None) -> set[Key]:
        """In one tier, or in the chain."""
        assert isinstance(self.rig.scheduler, ChainScheduler)
        tiers = [tier.scheduler for tier in self.rig.scheduler.tiers]
        asked = self.rig.scheduler if which is None else tiers[which]
        found = set()
        for row in CHAINS:
            held = asked.holds(self.rig.request_keys(9, row))
            assert held is not None
            found |= {
                key for key, here in zip(row, held[row[0].group].tolist(), strict=True) if here
            }
        return found

    @rule(which=st.sampled_from(CHAINS), first=st.integers(0, 6), count=st.integers(1, 7))
    def store(self, which: list[Key], first: int, count: int) -> None:
        self.stored.update(self.rig.store(which[first : first + count]))

    @rule(which=st.sampled_from(CHAINS), count=st.integers(1, 7), part=st.integers(1, 3))
    def load(self, which: list[Key], count: int, part: int) -> None:
        keys = which[:count]
        there = self.rig.lookup(1, keys)
        assert set(keys) & self.sunk <= {key for key, ok in zip(keys, there, strict=True) if ok}
        keys = [key for key, here in zip(keys, there, strict=True) if here][::part]
        assert isinstance(self.rig.scheduler, ChainScheduler)
        idle = not len(self.rig.scheduler.descents)
        ok = self.rig.load(1, keys)  # compares the bytes
        # What rises needs a slot above; where nothing sinks, only this load holds any.
        if idle and len(keys) <= self.host[which[0].group]:
            assert all(ok)

    @rule()
    def look_twice_and_leave(self) -> None:
        for row in CHAINS[:2]:
            assert self.rig.lookup(3, row) == self.rig.lookup(3, row)
        self.rig.scheduler.release(3)

    @rule()
    def flush(self) -> None:
        assert self.rig.worker.flush(PATIENCE)
        above = self.visible(0)
        assert above <= self.visible(1), "what is in host memory has not sunk"
        self.sunk |= above

    @rule()
    def restart(self) -> None:
        assert self.rig.worker.close(PATIENCE)
        self.open()

    @rule(chance=st.floats(0, 0.999))
    def lose_a_file(self, chance: float) -> None:
        if (
            not self.sunk
        ):  # no precondition: that is not the same each time, the background has a part
            return
        assert self.rig.worker.flush(PATIENCE)  # the background moves files
        paths = page_paths(self.folder)
        path = paths[int(chance * len(paths))]
        path.write_bytes(path.read_bytes()[:-1])
        self.restart()
        self.sunk = self.visible(1)

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.scheduler.check()
        assert self.rig.pinned() == 0
        found = self.visible()
        assert self.sunk <= found <= self.stored
        assert found == self.visible(0) | self.visible(1)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.worker.close(PATIENCE)
            assert temporaries(self.folder) == []
        shutil.rmtree(self.folder)


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("kind", ["disk", "chain"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_at_random_over_a_disk_read_no_wrong_byte_and_leak_nothing(
    tmp_path: Path, seed: int, kind: str
) -> None:
    """A manager's own pages, results spoiled and delayed, several lives of one folder."""
    chance = random.Random(seed)
    loaded = 0
    for life in range(3):
        faults = Faults(
            fail_item=chance.choice((0, 0.05)),
            late=chance.choice((0, 0.2)),
            duplicate=0.1,
            drop=chance.choice((0, 0.1)),
            refuse=0.1,
            refuse_by_raising=chance.choice((0, 0.1)),
        )
        setup = Setup(geometry=GEOMETRY, pages=chance.choice(((64, 24), (20, 9))))
        options: dict[str, Any] = {"direct": False, "batch_bytes": 1}
        connector = (
            disk(setup, tmp_path, **options)
            if kind == "disk"
            else host_over_disk(
                setup, tmp_path, host_pages=chance.choice(((9, 4), (30, 12))), **options
            )
        )
        with engine(
            slabs=chance.choice((6, 8, 12)),
            retention=chance.choice((Dense(), Sparse(0), Sparse(8))),
            faults=faults,
            seed=10 * seed + life,
            connector=connector,
        ) as e:
            play_at_random(e, chance, 150)
            for handle in list(e.requests):
                e.close(handle, "abort")
            e.settle()
            e.assert_idle()
            loaded += e.offload.stats().loaded_pages
    assert loaded > 0
    assert temporaries(tmp_path) == []
