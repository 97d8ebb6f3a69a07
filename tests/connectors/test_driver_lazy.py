"""Lazy stores: nothing while the device has room; what it evicts is in the tier by then."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers.random_play import play_at_random
from tiers.stamp_engine import GEOMETRY, PATIENCE, Engine, Request, engine, text

from kvcache.connectors import offload_stores
from kvcache.connectors.testing import Faults
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.specs import FullAttention
from kvcache.retention import Dense

AHEAD = 2 * GEOMETRY.slab_bytes


def cached(e: Engine) -> int:
    """Keys on the device that nobody holds."""
    return sum(e.manager.group_stats(g).keyed for g in range(2)) - sum(
        c.held for c in e.manager.arena_stats().classes
    )


def serve(e: Engine, seed: int) -> Request:
    """One prompt to its end, as an engine does: without a drain."""
    handle = e.open(text(seed, 41))
    request = e.requests[handle]
    for _ in range(300):
        if handle not in e.requests:
            return request
        e.step()
        if request.state == "loading":
            assert e.offload.wait(PATIENCE)
        e.poll()
        e.check()
    raise AssertionError(f"{request} does not end")


def settle(e: Engine) -> None:
    """Until the stores in flight have ended."""
    while len(e.offload._stores):
        assert e.offload._worker.wait(PATIENCE)
        e.poll()


def test_nothing_is_stored_while_the_device_has_room() -> None:
    with engine(slabs=32, tier=(256, 256), lazy_bytes=AHEAD) as e:
        for seed in range(3):
            serve(e, seed)
        assert e.offload.stats().stored_pages == 0
        assert serve(e, 0).hits[-1].hit_tokens == 40
        e.assert_idle()
        assert e.offload.drain(PATIENCE)  # ... all of it is stored
        assert e.offload.stats().stored_pages == cached(e) > 3 * 10
        stored = e.offload.stats().stored_pages
        assert e.offload.drain(PATIENCE)
        assert e.offload.stats().stored_pages == stored


def test_a_drain_ends_where_the_tier_holds_less_than_lazy_stores_look_ahead() -> None:
    """What the tier evicts to make room is not stored again."""
    with engine(slabs=32, tier=(3, 2), lazy_bytes=16 * GEOMETRY.slab_bytes) as e:
        for seed in range(2):
            serve(e, seed)
        settle(e)
        assert cached(e) > 10
        assert e.offload.drain(PATIENCE)
        serve(e, 3)  # ... and later ones are looked for again
        settle(e)
        assert e.offload._stores.waiting == 0
        before = e.offload.stats().stored_pages
        serve(e, 4)
        settle(e)
        assert e.offload.stats().stored_pages > before
        e.assert_idle()


def test_what_the_device_evicts_is_in_the_tier_by_then() -> None:
    """Each prompt comes back whole, though the device holds less than two of them.

    A load takes space for all of a prompt at once: so far ahead it must be stored.
    """
    reach = 8 * GEOMETRY.slab_bytes
    with engine(slabs=12, tier=(256, 256), lazy_bytes=reach) as e:
        for seed in range(6):
            serve(e, seed)
            settle(e)
        assert e.manager.arena_stats().evictions > 40
        before = e.offload.stats().loaded_pages
        for seed in range(6):
            assert serve(e, seed).hits[0].hit_tokens == 40, seed
            settle(e)
        assert e.offload.stats().loaded_pages > before
        e.assert_idle()


def test_eager_stores_the_same_earlier() -> None:
    counts = []
    for lazy in (None, AHEAD):
        with engine(slabs=14, tier=(256, 256), lazy_bytes=lazy) as e:
            for seed in range(2):
                serve(e, seed)
            settle(e)
            counts.append(e.offload.stats().stored_pages)
    assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("seed", range(3))
def test_random_courses_read_no_wrong_byte_and_leak_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_stores, "MAX_STORES", 2)
    monkeypatch.setattr(offload_stores, "STORE_BYTES", 300)
    faults = Faults(fail_item=0.05, late=0.1, duplicate=0.1, refuse=0.1)
    with engine(lazy_bytes=AHEAD, faults=faults, seed=seed, tier=(24, 12)) as e:
        play_at_random(e, random.Random(seed), 120)
        for handle in list(e.requests):
            e.close(handle, "abort")
        e.settle()
        e.assert_idle()
        assert e.offload.stats().stored_pages > 0


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    again=st.lists(st.integers(0, 5), max_size=4),
    wanted=st.integers(1, 8),
)
def test_the_next_to_go_are_told_in_order(
    lengths: list[int], again: list[int], wanted: int
) -> None:
    """One size of pages: exactly those that the next allocation evicts, the first of them first."""
    group = FullAttention(name="a", layers=1, kv_heads=1, head_dim=1, block_tokens=4)
    geometry = Geometry((group,))
    manager = Manager(geometry, slabs=16, retention=Dense())

    def compute(seed: int, blocks: int) -> None:
        handle = manager.open(text(seed, 4 * blocks + 1))
        step = manager.begin_step()
        hit = manager.lookup(handle)
        grant = manager.allocate(handle, 4 * blocks + 1 - hit.hit_tokens)
        assert grant is not None
        manager.commit(handle, grant.end)
        manager.end_step(step)
        manager.finish(handle)

    for seed, blocks in enumerate(lengths):
        compute(seed, blocks)
    for seed in again:
        if seed < len(lengths):
            compute(seed, lengths[seed])
    told = manager.next_evicted(None)
    assert len(told) == manager.group_stats(0).keyed
    assert not told["handle"].any()
    free = 16 - len(told)
    ahead = manager.next_evicted(wanted * geometry.slab_bytes)
    assert np.array_equal(ahead, told[: max(0, min(wanted - free, len(told)))])
    compute(99, wanted)
    left = {row["digest"].tobytes() for row in manager.next_evicted(None)}
    gone = [row["digest"].tobytes() not in left for row in told]
    count = sum(gone)
    assert gone == [True] * count + [False] * (len(told) - count)
    assert count >= len(ahead)


def test_a_reach_is_a_number_of_bytes() -> None:
    for wrong in (0, -1, 1.5, "much"):
        with pytest.raises(ConfigError, match=r"Offload.lazy_bytes"):
            Engine(lazy_bytes=wrong)  # type: ignore[arg-type]
