"""Load or compute over two tiers whose speeds are far apart: neither stands for the other."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.clock import Clock
from engine.rig import FINGERPRINT, evict_all, generate, rig, tokens
from engine.stamp_runner import StampRunner, expected_output
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from tiers.chain_pieces import host_over_disk
from tiers.pieces import PATIENCE

from kvcache.connectors.base import Connector, LoadBytes
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.disk import DiskConnector
from kvcache.connectors.testing import chain, rig as tier_rig
from kvcache.core.layout import Geometry
from kvcache.core.page_files import PageFiles
from kvcache.engine.chunk import Chunk
from kvcache.engine.costs import Costs, Loads


@settings(max_examples=15, deadline=None)
@given(
    near=st.floats(1e-11, 1e-8),
    slower=st.floats(1.5, 100),
    compute=st.floats(1e-11, 1e-7),
    share=st.floats(0.02, 0.98),
    seed=st.integers(0, 99),
)
def test_the_choice_costs_at_most_a_tenth_more_whatever_the_tiers_are_asked_for(
    near: float, slower: float, compute: float, share: float, seed: int
) -> None:
    """Seconds of bytes for each way; loads come from one tier, the other, or both, side by side."""
    chance = random.Random(seed)
    costs = Costs(Loads.AUTO, 10**9)
    spent = better = first = 0.0
    seen: set[bool] = set()
    for _ in range(200):
        size = chance.randrange(10**6, 10**8)
        far = size if chance.random() < share else 0
        if chance.random() < 0.2:
            far = chance.randrange(size)
        load = LoadBytes(size - far, far)
        times = {False: load.near * near, True: load.far * near * slower}
        takes, computes = max(times.values()), size * compute
        new = {which for which, seconds in times.items() if seconds} - seen
        costs.note_step([(0, size)], computes)
        excess = costs.excess_seconds(load, 0, size)
        if not costs.affords(excess):
            costs.note_computed_instead(0, size)
            spent += computes
        else:
            if new:
                first += takes  # has to be made to know what loads take
            costs.note_load_begun(excess)
            spent += takes
            seen |= new
            for which, seconds in times.items():
                if seconds:
                    noise = 1 + 0.02 * chance.uniform(-1, 1)
                    costs.note_load(load.far if which else load.near, seconds * noise, far=which)
        better += min(takes, computes)
    assert spent - first <= 1.1 * better


def test_a_result_says_what_of_its_time_the_lower_tier_took(tmp_path: Path) -> None:
    keys = chain("a", 6)
    with tier_rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys[:3])
        assert r.worker.flush(PATIENCE)
    with tier_rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.store(keys[3:])
        r.lookup(1, keys)
        far = r.scheduler.far(1)
        assert far is not None
        assert [row.tolist() for row in far] == [[1, 1, 1, 0, 0, 0], []]
        transfer = r.plan_load(1, keys)
        assert transfer.far_rows.tolist() == [0, 1, 2]
        assert r.scheduler.far(1) is None
        mixed = r.run(transfer)
        assert 0 < mixed.far_seconds < mixed.seconds
        r.lookup(2, keys)
        assert r.scheduler.far(2) is None  # all of it is above now
        transfer = r.plan_load(2, keys)
        assert not len(transfer.far_rows)
        assert r.run(transfer).far_seconds == 0.0
    with tier_rig(lambda s: host_over_disk(s, tmp_path)) as r:
        r.lookup(1, keys[:3])
        alone = r.run(r.plan_load(1, keys[:3]))
        assert alone.far_seconds == alone.seconds > 0


class SlowFiles(PageFiles):
    """The fault: a disk that takes its time to read."""

    def read(self, *args: Any) -> NDArray[np.int32]:
        time.sleep(0.5)
        return super().read(*args)


@pytest.mark.parametrize("host_first", [False, True])
def test_a_slow_disk_is_not_waited_for_and_the_host_above_it_is_used(
    tmp_path: Path, host_first: bool
) -> None:
    """What one tier has taken says nothing of the other, whichever was measured first."""
    clock = Clock()

    class Device(StampRunner):
        """Takes longer than host memory, and not as long as that disk."""

        def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
            clock.advance(0.1)  # a prompt takes two steps
            return super().run(chunks)

    def made(geometry: Geometry) -> Connector:
        below = DiskConnector(
            geometry,
            folder=tmp_path,
            fingerprint=FINGERPRINT,
            layout="whole",
            pages=[256],
            batch_bytes=1,
            files=SlowFiles,
        )
        return ChainConnector(CpuConnector(geometry, pages=[256]), below)

    options: dict[str, Any] = {
        "connector": made,
        "loads": "auto",
        "runner_type": Device,
        "clock": clock,
    }
    prompts = [tokens(100, i) for i in range(5)]
    with rig([24], **options) as r:
        for prompt in prompts:
            generate(r.engine, prompt, 1)
        evict_all(r)  # stored, on the disk too
    with rig([24], **options) as r:
        for i in range(3):  # what computing takes; and host memory, where it is asked
            generate(r.engine, tokens(100, 99 if host_first else 99 + i), 1)
            evict_all(r)
        before = r.engine.counters.restored_tokens
        for prompt in prompts:
            assert generate(r.engine, prompt, 1).tokens == expected_output(prompt, 1)
        evict_all(r)
        counters = r.engine.counters
        # The first had to be read to know what the disk takes.
        assert counters.restored_tokens - before == 96
        assert counters.computed_instead_tokens == 4 * 96
        for prompt in prompts:
            result = generate(r.engine, prompt, 1)
            assert result.tokens == expected_output(prompt, 1)
            assert result.usage.host_tokens == 96
        assert r.held == 0
