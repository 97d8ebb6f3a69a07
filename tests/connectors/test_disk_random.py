"""A disk tier through stores, loads, damage and restarts at random, beside a naive model of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiers.disk_pieces import disk, page_paths, temporaries

from kvcache.connectors.testing import Key, OracleTier, Rig, Setup, chain, digest
from kvcache.core.hashing import NATIVE_NAMESPACE

FOREIGN = b"\x09" * 32
CHAINS = [
    chain(name, 7, group, space)
    for name in "ab"
    for group in (0, 1)
    for space in (NATIVE_NAMESPACE, FOREIGN)
]


class DiskMachine(RuleBasedStateMachine):
    """One request at a time. A key is in the tier, its file is whole or not, and of some time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="disk-machine-"))
        self.clock = 0
        self.times: dict[Key, int] = {}
        """Of the files that there are: when they were stored or loaded."""
        self.cut: set[Key] = set()
        self.changed: set[Key] = set()
        self.lost: set[Key] = set()
        """Files that somebody removed."""

    @initialize(direct=st.booleans(), threads=st.sampled_from((1, 2)))
    def start(self, direct: bool, threads: int) -> None:
        self.options: dict[str, Any] = {"direct": direct, "threads": threads}
        self.open((8, 6))

    def open(self, pages: tuple[int, int]) -> None:
        setup = Setup(pages=pages)
        self.rig = Rig(lambda s: disk(s, self.folder, **self.options), setup)
        self.oracle: OracleTier[Key] = OracleTier(pages)
        for key in self.cut | self.lost:
            self.forget(key)
        for group, most in enumerate(pages):
            keys = sorted((k for k in self.times if k.group == group), key=self.times.__getitem__)
            for key in keys[: max(len(keys) - most, 0)]:
                self.forget(key)
            for key in keys[-most:]:
                self.oracle.cached[group][key] = None

    def forget(self, key: Key) -> None:
        """There is no file of it any more."""
        self.times.pop(key, None)
        for marked in (self.cut, self.changed, self.lost):
            marked.discard(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Of one transfer the first is the youngest."""
        self.clock += len(keys)
        for i, key in enumerate(keys):
            self.times[key] = self.clock - i

    def by_group(self, keys: Sequence[Key]) -> list[list[Key]]:
        return [[key for key in keys if key.group == group] for group in (0, 1)]

    @rule(which=st.sampled_from(CHAINS), first=st.integers(0, 6), count=st.integers(0, 7))
    def store(self, which: list[Key], first: int, count: int) -> None:
        keys = which[first : first + count]
        there = [set(row) for row in self.oracle.cached]
        wanted = self.oracle.plan_store(self.by_group(keys))
        for group, row in enumerate(there):
            for key in row - set(self.oracle.cached[group]):
                self.forget(key)
        stored = self.rig.store(keys)
        assert self.by_group(stored) == wanted
        self.oracle.end_store(wanted, wanted)
        self.touch(stored)

    @rule(which=st.sampled_from(CHAINS), count=st.integers(1, 7), part=st.integers(1, 3))
    def load(self, which: list[Key], count: int, part: int) -> None:
        keys = which[:count]
        there = self.rig.lookup(1, keys)
        expected = self.oracle.lookup(1, self.by_group(keys))
        assert there == [flag for row in expected for flag in row]
        keys = [key for key, here in zip(keys, there, strict=True) if here][::part]
        self.oracle.plan_load(1, self.by_group(keys))
        bad = self.cut | self.changed | self.lost
        assert self.rig.load(1, keys) == [int(key not in bad) for key in keys]
        self.oracle.end_load(self.by_group(keys))
        self.touch([key for key in keys if key not in bad])
        for key in set(keys) & bad:
            del self.oracle.cached[key.group][key]
            self.forget(key)

    @rule(pages=st.sampled_from(((8, 6), (8, 6), (5, 6), (20, 2))))
    def restart(self, pages: tuple[int, int]) -> None:
        assert self.rig.worker.close()
        self.open(pages)

    def whole(self) -> list[Key]:
        bad = self.cut | self.changed | self.lost
        return sorted((k for k in self.times if k not in bad), key=self.times.__getitem__)

    @precondition(lambda self: self.whole())
    @rule(
        chance=st.floats(0, 0.999),
        how=st.sampled_from(("cut", "changed", "lost")),
        place=st.floats(0, 0.999),
    )
    def damage(self, chance: float, how: str, place: float) -> None:
        keys = self.whole()
        key = keys[int(chance * len(keys))]
        path = self.path(key)
        getattr(self, how).add(key)
        length, times = path.stat().st_size, path.stat()
        if how == "lost":
            path.unlink()
        elif how == "cut":
            os.truncate(path, int(place * length))
        else:
            raw = bytearray(path.read_bytes())
            raw[int(place * length)] ^= 0x10
            path.write_bytes(raw)
        if how != "lost":  # as a disk that decays does
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def path(self, key: Key) -> Path:
        name = digest(key).hex()
        if key.namespace != NATIVE_NAMESPACE:
            name += "-" + key.namespace.hex()
        (path,) = self.folder.glob(f"*/{key.group}/{name[:2]}/{name}")
        return path

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.scheduler.check()
        assert self.rig.pinned() == sum(map(len, self.oracle.held))
        assert temporaries(self.folder) == []
        keys = [key for row in CHAINS for key in row]
        for row in CHAINS:
            held = self.rig.scheduler.holds(self.rig.request_keys(2, row))
            assert held is not None
            flags = [int(self.oracle.visible(row[0].group, key)) for key in row]
            assert held[row[0].group].tolist() == flags
        # Files to be removed may still be there, no more than the last restart left over.
        files = {path.name for path in page_paths(self.folder)}
        assert {self.path(k).name for k in keys if k in self.times and k not in self.lost} <= files

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.worker.close()
            assert len(page_paths(self.folder)) == len(self.times) - len(self.lost)
        shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=30)
