"""Loads, stores and foreign keys at the manager."""

from __future__ import annotations

import numpy as np
import pytest
from core.managing import (
    FULL,
    A,
    S,
    compute,
    counts,
    full,
    granted,
    held,
    hit,
    hybrid,
    run,
    text,
)

from kvcache import FullAttention, Geometry, Manager, SlidingWindow, Sparse
from kvcache.core.errors import CapacityError, ConfigError
from kvcache.core.events.runs import StoredRun
from kvcache.core.records import UNLIMITED

# ---- tiers -----------------------------------------------------------------------------------------


def all_present(m: Manager, tokens: int) -> list[np.ndarray]:
    return [np.ones(tokens // b, np.uint8) for b in m.geometry.block_tokens]


def test_a_hit_in_a_tier_is_granted_as_a_load() -> None:
    m = hybrid()
    handle = m.open(text(14))
    found = m.lookup(handle, all_present(m, 14))
    assert (found.hit_tokens, found.device_tokens) == (12, 0)
    grant = granted(m.allocate(handle, 2))
    assert grant[:3] == (12, 12, 12)
    assert grant.load > 0
    assert grant.load_pages == 4
    assert m.info(handle)[6:] == ("loading", bytes(32), grant.load)
    items = m.load_items(grant.load)
    chain = m.digests(handle)
    assert items["group"].tolist() == [A, A, A, S]
    assert items["end"].tolist() == [4, 8, 12, 12]
    assert items["page"][:3].tolist() == m.block_table(handle, A).tolist()
    assert [bytes(d) for d in items["digest"]] == [bytes(chain[i]) for i in (0, 1, 2, 2)]
    m.end_load(grant.load, np.ones(4, np.uint8))
    assert m.info(handle)[2:] == (12, 12, 12, 3, "running", bytes(32), 0)
    assert m.state_plan(handle, S).positions.size == 0
    assert granted(m.allocate(handle, 2)) == (0, 12, 14, 0, 0)
    assert m.state_plan(handle, S).source == items["page"][3]
    assert hit(m, text(14)) == 12


def test_a_load_takes_only_what_the_device_lacks() -> None:
    m = hybrid()
    run(m, text(9))  # blocks 4, 8; state 8
    handle = m.open(text(14))
    assert m.lookup(handle, all_present(m, 14))[:2] == (12, 8)
    grant = granted(m.allocate(handle, 2))
    assert m.load_items(grant.load)["end"].tolist() == [12, 12]


def test_a_load_never_evicts_the_part_of_the_hit_that_is_on_the_device() -> None:
    m = full(3)
    compute(m, m.open(text(4, 90)), 4)  # holds one page
    run(m, text(8))
    tail = m.take_keyed()[-1:]
    m.pin(tail)
    run(m, text(4, 50))  # evicts block 4 of the first prompt, block 8 is pinned
    other = m.take_keyed()
    m.unpin(A, tail["page"])
    m.pin(other)
    m.unpin(A, other["page"])  # now block 8 is the older of the two cached pages
    handle = m.open(text(9))
    found = m.lookup(handle, [np.array([1, 0], np.uint8)])
    assert (found.hit_tokens, found.device_tokens) == (8, 0)
    grant = granted(m.allocate(handle, 0))
    assert m.load_items(grant.load)["end"].tolist() == [4]
    assert m.block_table(handle, A).tolist() == [int(other["page"][0]), int(tail["page"][0])]
    m.check()


def test_a_failed_part_of_a_load_shortens_the_prefix_exactly() -> None:
    m = full()
    handle = m.open(text(17))
    m.lookup(handle, all_present(m, 17))
    grant = granted(m.allocate(handle, 1))
    m.end_load(grant.load, np.array([1, 1, 0, 1], np.uint8))
    assert m.info(handle).state == "waiting"
    assert m.lookup(handle).hit_tokens == 8
    assert counts(m) == (1, 3, 0)  # block 16 is there too: a later load need not fetch it
    m.check()


@pytest.mark.parametrize("lost", range(3))
def test_a_window_may_lie_in_the_arena_and_in_the_tier_by_parts(lost: int) -> None:
    window = SlidingWindow(name="w", layers=1, kv_heads=1, head_dim=4, window=10, block_tokens=4)
    attention = FullAttention(name="a", layers=1, kv_heads=1, head_dim=4, block_tokens=4)
    m = Manager(Geometry((attention, window)), slabs=UNLIMITED, retention=Sparse())
    handle = m.open(text(33))
    m.lookup(handle, all_present(m, 33))
    grant = granted(m.allocate(handle, 1))
    items = m.load_items(grant.load)
    ends = items["end"][items["group"] == 1].tolist()
    assert ends == [24, 28, 32]
    there = (items["group"] == 0) | (items["end"] != ends[lost])
    m.end_load(grant.load, there.astype(np.uint8))
    assert m.lookup(handle).hit_tokens == 0
    present = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
    present[1][ends[lost] // 4 - 1] = 1
    for _ in range(2):
        found = m.lookup(handle, present)
        assert (found.hit_tokens, found.device_tokens) == (32, 0)
    m.check()


def test_a_twin_sees_a_load_in_flight_as_pending() -> None:
    m = hybrid()
    handle = m.open(text(14))
    m.lookup(handle, all_present(m, 14))
    grant = granted(m.allocate(handle, 2))
    twin = m.open(text(14))
    found = m.lookup(twin)
    assert (found.hit_tokens, found.pending_tokens, found.lost["pending"]) == (0, 12, 12)
    m.end_load(grant.load, np.ones(4, np.uint8))
    assert m.lookup(twin).hit_tokens == 12


def test_an_abandoned_load_keeps_its_pages_out_of_use_until_it_ends() -> None:
    m = full(4)
    handle = m.open(text(13))
    m.lookup(handle, all_present(m, 13))
    grant = granted(m.allocate(handle, 1))
    m.abandon_load(grant.load)
    assert m.info(handle).state == "waiting"
    found = m.lookup(handle)
    assert (found.hit_tokens, found.pending_tokens) == (0, 0)
    assert m.allocate(handle, 13) is None  # 3 of 4 pages are in quarantine
    assert held(m) == 3
    m.end_load(grant.load, np.zeros(3, np.uint8))
    assert held(m) == 0
    assert m.allocate(handle, 13)
    m.check()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_request_that_leaves_during_its_load_leaves_the_pages_to_the_load(end: str) -> None:
    m = hybrid()
    handle = m.open(text(14))
    m.lookup(handle, all_present(m, 14))
    grant = granted(m.allocate(handle, 2))
    getattr(m, end)(handle)
    assert held(m) == 4
    assert m.stats().open_loads == 1
    m.end_load(grant.load, np.zeros(4, np.uint8))
    assert held(m) == 0
    assert hit(m, text(14)) == 0
    m.check()


def test_take_keyed_gives_each_new_key_once_with_its_writer() -> None:
    m = hybrid()
    handle = m.open(text(9), max_tokens=10)
    compute(m, handle, 9)
    items = m.take_keyed()
    assert sorted(zip(items["group"].tolist(), items["end"].tolist(), strict=True)) == [
        (A, 4),
        (A, 8),
        (S, 8),
    ]
    assert items["handle"].tolist() == [handle] * 3
    for item in items:
        key = bytes(item["digest"])
        assert m.find_key(int(item["group"]), key) == item["page"]
        assert key == bytes(m.digests(handle)[int(item["end"]) // 4 - 1])
    assert len(m.take_keyed()) == 0


def test_take_keyed_is_bounded_and_counts_what_it_dropped() -> None:
    m = full(4)
    for i in range(100):
        run(m, text(16, 100 * i))
    kept = len(m.take_keyed())
    assert kept <= max(64, 2 * 4)
    assert m.stats().keyed_dropped == 400 - kept


def test_a_pinned_page_is_not_evicted_until_its_last_pin_ends() -> None:
    m = full(2)
    run(m, text(4))
    items = m.take_keyed()
    assert m.pin(items).tolist() == items["page"].tolist()
    assert m.pin(items).tolist() == items["page"].tolist()
    assert m.stats().pinned == 2
    m.unpin(A, items["page"])
    other = m.open(text(8, 50))
    m.lookup(other)
    assert m.allocate(other, 8) is None
    m.unpin(A, items["page"])
    assert m.allocate(other, 8)
    assert m.stats().pinned == 0
    m.check()


def test_a_page_that_has_another_key_by_now_is_not_pinned() -> None:
    m = full(1)
    run(m, text(4))
    items = m.take_keyed()
    run(m, text(4, 50))
    assert m.pin(items).tolist() == [-1]
    assert m.stats().pinned == 0


# ---- foreign keys ----------------------------------------------------------------------------------


def foreign(m: Manager, keys: np.ndarray, tokens: int, **options: object) -> int:
    return m.open_foreign(keys, prompt_tokens=tokens, **options)  # type: ignore[arg-type]


def numbers(n: int) -> np.ndarray:
    """Digests as regular as a trace may have: 1, 2, 3."""
    keys = np.zeros((n, 32), np.uint8)
    keys[:, 0] = np.arange(1, n + 1)
    return keys


def test_foreign_keys_hit_each_other_and_are_never_rehashed() -> None:
    m = hybrid()
    handle = foreign(m, numbers(3), 13)
    compute(m, handle, 13)
    assert np.array_equal(m.digests(handle), numbers(3))
    m.finish(handle)
    assert m.lookup(foreign(m, numbers(5), 21)).hit_tokens == 12
    assert m.lookup(foreign(m, numbers(6)[3:], 13)).hit_tokens == 0


def test_foreign_and_native_keys_never_mix() -> None:
    m = full()
    native = m.open(text(12))
    digests = m.digests(native).copy()
    compute(m, native, 12)
    assert m.lookup(foreign(m, digests, 12)).hit_tokens == 0
    assert m.find_key(A, bytes(digests[0])) >= 0
    assert m.find_key(A, bytes(digests[0]), namespace=m.namespaces[1]) == -1
    assert m.find_key(A, bytes(digests[0]), namespace=b"?" * 32) == -1


def test_foreign_namespaces_separate_salts() -> None:
    m = full()
    handle = foreign(m, numbers(3), 12, salt="a")
    compute(m, handle, 12)
    assert m.lookup(foreign(m, numbers(3), 12, salt="b")).hit_tokens == 0
    assert m.lookup(foreign(m, numbers(3), 12, salt="a")).hit_tokens == 8
    assert len(m.namespaces) == 2


def test_foreign_requests_have_no_keys_beyond_the_prompt() -> None:
    m = hybrid()
    handle = foreign(m, numbers(2), 9, max_tokens=20)
    m.extend_foreign(handle, 11)
    compute(m, handle, 20)
    assert [m.group_stats(g).keyed for g in (A, S)] == [2, 1]
    m.finish(handle)
    assert [m.group_stats(g).keyed for g in (A, S)] == [2, 1]


def test_blocks_of_two_prefixes_are_told_apart_though_their_requests_have_gone() -> None:
    m = Manager(FULL, slabs=UNLIMITED, retention=Sparse(), events=True)
    ones, twos = [1] * 9, [2] * 9
    run(m, twos[:5])
    m.take_runs()
    loads = []
    for tokens, present in ((ones[:5], [1]), (twos, [1, 1])):
        handle = m.open(tokens)
        m.lookup(handle, [np.array(present, np.uint8)])
        chain = m.digests(handle)
        loads.append((handle, granted(m.allocate(handle, 1)).load, chain))
    for handle, _, _ in loads:
        m.abort(handle)
    for _, load, _ in loads:
        m.end_load(load, np.ones(1, np.uint8))
    first, second = m.take_runs()
    assert isinstance(first, StoredRun)
    assert isinstance(second, StoredRun)
    assert (first.parent, bytes(first.keys[0])) == (None, bytes(loads[0][2][0]))
    chain = loads[1][2]
    assert (second.parent, bytes(second.keys[0])) == (bytes(chain[0]), bytes(chain[1]))


def test_pages_are_unpinned_in_any_order_and_keep_their_places() -> None:
    m = full(8)
    for first in (0, 100):
        run(m, text(16, first))
    keyed = m.take_keyed()
    m.pin(keyed)
    order = np.random.default_rng(1).permutation(len(keyed))
    m.unpin(A, keyed["page"][order])
    m.check()
    run(m, text(24, 200))  # takes six of eight pages, the tails of the older prompt first
    assert hit(m, text(17)) == 0
    assert hit(m, text(17, 100)) == 8


def test_a_namespace_is_used_by_its_requests_loads_keys_and_records() -> None:
    m = full(slabs=8)
    other = m.open(text(5), salt="other")

    def uses() -> list[int]:
        m.check()
        return [m._namespace_use(number) for number in range(3)]

    assert uses() == [1, 0, 0]
    first, second = m.open(text(9), salt="s"), m.open(text(9), salt="s")
    assert uses() == [1, 2, 0]
    with pytest.raises(CapacityError):
        m.open(text(9), salt="s", max_tokens=1000)
    with pytest.raises(ConfigError):
        m.open(text(9), salt="s", max_tokens=1)
    assert uses() == [1, 2, 0]
    m.lookup(first, all_present(m, 9))
    load = granted(m.allocate(first, 0)).load
    assert uses() == [1, 2 + 1 + 2, 0]  # with the load and its two pending keys
    m.abort(first)
    assert uses() == [1, 1 + 1 + 2, 0]
    m.end_load(load, np.ones(2, np.uint8))
    assert uses() == [1, 1 + 2, 0]
    run(m, text(13), salt="s")
    assert uses() == [1, 1 + 3 + 1, 0]  # a tier may be told of the third key
    assert len(m.take_keyed()) == 1
    assert uses() == [1, 1 + 3, 0]
    m.clear(salt="s")
    assert uses() == [1, 1, 0]
    m.finish(second)
    m.abort(other)
    assert uses() == [0, 0, 0]
