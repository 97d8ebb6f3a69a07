"""The page pool against an oracle of two dictionaries and an LRU order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from numpy.typing import NDArray

from kvcache.core import native
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.pool import PagePool, PoolStats

Key = tuple[int, int]
"""Namespace, and a number that stands for a digest."""


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def rows(numbers: Sequence[int], gap: int = 0) -> NDArray[np.uint8]:
    """Digests with a gap of so many bytes between the rows."""
    data = b"".join(digest(n) + bytes(gap) for n in numbers)
    return np.frombuffer(data, np.uint8).reshape(-1, 32 + gap)[:, :32]


def pages_of(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


class PoolOracle:
    """What the header of the pool says, in dictionaries."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.refs: dict[int, int] = {}
        self.page_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    def free(self) -> set[int]:
        return {p for p, n in self.refs.items() if n == 0 and p not in self.key_of}

    def held(self) -> list[int]:
        return sorted(p for p, n in self.refs.items() if n)

    def candidates(self) -> set[int]:
        """The pages that may be taken next: any free one, else a new one, else the LRU one."""
        if free := self.free():
            return free
        if len(self.refs) < self.capacity:
            return {len(self.refs)}
        return set(list(self.lru)[:1])

    def take(self, page: int) -> None:
        if page in self.lru:
            del self.lru[page]
            self.drop_key(page)
            self.evictions += 1
        self.refs[page] = 1

    def drop_key(self, page: int) -> None:
        if key := self.key_of.pop(page, None):
            del self.page_of[key]
            self.lru.pop(page, None)

    def acquire(self, key: Key) -> int:
        page = self.page_of.get(key, -1)
        if page >= 0:
            self.lru.pop(page, None)
            self.refs[page] += 1
        return page

    def publish(self, key: Key, page: int) -> bool:
        if key in self.page_of:
            return False
        self.page_of[key], self.key_of[page] = page, key
        return True

    def release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0 and page in self.key_of:
            self.lru[page] = None


small = st.integers(0, 2**16)
namespaces = st.integers(0, 1)
numbers = st.integers(0, 9)


class PoolMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([1, 2, 3, 5, 8, -1]), seed=st.integers(0, 2**64 - 1))
    def build(self, capacity: int, seed: int) -> None:
        _, lib = native.load()
        capacity = lib.kvc_unlimited() if capacity < 0 else capacity
        self.pool = PagePool(capacity, seed=seed)
        self.oracle = PoolOracle(capacity)
        self.version = self.pool.version
        self.keys: dict[Key, int] = {}

    @rule(n=st.integers(0, 4))
    def take(self, n: int) -> None:
        taken = self.pool.take(n).tolist()
        for page in taken:
            assert page in self.oracle.candidates()
            self.oracle.take(page)
        assert len(taken) == n or not self.oracle.candidates()

    @rule(ns=namespaces, wanted=st.lists(numbers, max_size=4), gap=st.sampled_from([0, 1, 32]))
    def acquire(self, ns: int, wanted: list[int], gap: int) -> None:
        expected = [self.oracle.acquire((ns, n)) for n in wanted]
        assert self.pool.acquire(ns, rows(wanted, gap)).tolist() == expected

    @precondition(lambda self: self.oracle.held())
    @rule(pick=small, ns=namespaces, number=numbers)
    def publish(self, pick: int, ns: int, number: int) -> None:
        held = self.oracle.held()
        page = held[pick % len(held)]
        if page in self.oracle.key_of:
            with pytest.raises(MisuseError):
                self.pool.publish(ns, rows([number]), pages_of(page))
        else:
            published = self.pool.publish(ns, rows([number]), pages_of(page)).tolist()
            assert published == [self.oracle.publish((ns, number), page)]

    @precondition(lambda self: self.oracle.refs)
    @rule(pick=small)
    def unpublish(self, pick: int) -> None:
        page = pick % len(self.oracle.refs)
        self.pool.unpublish(page)
        self.oracle.drop_key(page)

    @precondition(lambda self: self.oracle.held())
    @rule(picks=st.lists(small, min_size=1, max_size=5))
    def release(self, picks: list[int]) -> None:
        held = self.oracle.held()
        pages = [held[pick % len(held)] for pick in picks]
        if any(pages.count(p) > self.oracle.refs[p] for p in pages):
            with pytest.raises(MisuseError):
                self.pool.release(pages_of(*pages))
            return
        self.pool.release(pages_of(*pages))
        for page in pages:
            self.oracle.release(page)

    @rule(picks=st.lists(small, max_size=2), excess=st.sampled_from([-1, 0, 1, 1000]))
    def release_of_a_page_that_is_not_held_changes_nothing(
        self, picks: list[int], excess: int
    ) -> None:
        held = self.oracle.held()
        idle = sorted(set(self.oracle.refs) - set(held))
        bad = idle[excess % len(idle)] if idle else len(self.oracle.refs) + abs(excess)
        with pytest.raises(MisuseError):
            self.pool.release(pages_of(*(held[p % len(held)] for p in picks if held), bad))

    @rule(ns=namespaces, number=numbers, excess=st.integers(-2, 3))
    def publish_on_a_page_that_is_not_held_changes_nothing(
        self, ns: int, number: int, excess: int
    ) -> None:
        page = len(self.oracle.refs) + excess
        if self.oracle.refs.get(page, 0) == 0:
            with pytest.raises(MisuseError):
                self.pool.publish(ns, rows([number]), pages_of(page))

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.pool.check()
        oracle = self.oracle
        for ns in (0, 1):
            present = self.pool.present(ns, rows(range(10), gap=ns))
            assert present.tolist() == [(ns, n) in oracle.page_of for n in range(10)]
        assert self.pool.stats() == PoolStats(
            capacity=oracle.capacity,
            created=len(oracle.refs),
            free=len(oracle.free()),
            cached=len(oracle.lru),
            held=len(oracle.held()),
            keyed=len(oracle.page_of),
            evictions=oracle.evictions,
        )
        if oracle.page_of != self.keys:
            assert self.pool.version != self.version, "a key changed, the version did not"
        self.version, self.keys = self.pool.version, dict(oracle.page_of)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=120, stateful_step_count=40
)


# ---- facts -------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> PagePool:
    return PagePool(4)


def keyed_pages(pool: PagePool, numbers: Sequence[int]) -> NDArray[np.int32]:
    pages = pool.take(len(numbers))
    assert pool.publish(0, rows(numbers), pages).all()
    return pages


def test_released_pages_are_reused_lru_first(pool: PagePool) -> None:
    pages = keyed_pages(pool, [1, 2, 3, 4])
    order = pages[[2, 0, 3, 1]]
    pool.release(order)
    assert np.array_equal(pool.take(4), order)


def test_a_touched_page_moves_to_the_end_of_the_lru_order(pool: PagePool) -> None:
    a, b, c, d = keyed_pages(pool, [1, 2, 3, 4]).tolist()
    pool.release(pages_of(a, b, c, d))
    assert pool.acquire(0, rows([1])).tolist() == [a]
    pool.release(pages_of(a))
    assert pool.take(4).tolist() == [b, c, d, a]


def test_pages_without_key_are_reused_before_any_key_is_evicted(pool: PagePool) -> None:
    pages = keyed_pages(pool, [1, 2, 3])
    blank = pool.take(1)
    pool.release(np.concatenate([pages, blank]))
    assert pool.take(1).tolist() == blank.tolist()
    assert pool.present(0, rows([1, 2, 3])).all()


def test_the_first_writer_of_a_key_wins(pool: PagePool) -> None:
    first, second = pool.take(2).tolist()
    assert pool.publish(0, rows([1, 1]), pages_of(first, second)).tolist() == [1, 0]
    assert pool.acquire(0, rows([1])).tolist() == [first]


def test_namespaces_do_not_mix(pool: PagePool) -> None:
    keyed_pages(pool, [1])
    assert pool.acquire(1, rows([1])).tolist() == [-1]


def test_asking_and_holding_do_not_change_the_version(pool: PagePool) -> None:
    pages = keyed_pages(pool, [1, 2])
    version = pool.version
    pool.present(0, rows([1, 2, 3]))
    pool.release(pages)
    pool.acquire(0, rows([2]))
    assert pool.version == version
    pool.unpublish(int(pages[0]))
    assert pool.version != version


def test_ten_thousand_regular_keys_stay_apart() -> None:
    pool = PagePool(10_000)
    pages = pool.take(10_000)
    keys = np.zeros((10_000, 32), np.uint8)  # as regular as foreign keys may be
    keys[:, :4] = np.arange(10_000, dtype="<u4").view(np.uint8).reshape(-1, 4)
    assert pool.publish(0, keys, pages).all()
    assert np.array_equal(pool.acquire(0, keys), pages)
    for page in pages[::2].tolist():
        pool.unpublish(page)
    found = pool.acquire(0, keys)
    assert np.array_equal(found[1::2], pages[1::2])
    assert set(found[::2].tolist()) == {-1}
    pool.check()


def test_digests_may_lie_apart_in_any_array(pool: PagePool) -> None:
    keyed_pages(pool, [1, 2, 3, 4])
    records = np.zeros(4, [("number", "<i8"), ("digest", ("u1", 32))])
    records["digest"] = rows([1, 2, 3, 4])
    assert pool.acquire(0, records["digest"][::2]).tolist() == [0, 2]
    assert pool.acquire(0, rows([1, 2, 3, 4])[::-1]).tolist() == [3, 2, 1, 0]
    assert pool.acquire(0, rows([1])[:0]).size == 0


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_a_pool_of_impossible_size_is_a_named_error(capacity: int) -> None:
    with pytest.raises(ConfigError):
        PagePool(capacity)


BAD_CALLS: dict[str, tuple[Callable[[PagePool], object], type[Exception]]] = {
    "take below 0": (lambda p: p.take(-1), ConfigError),
    "unpublish of no page": (lambda p: p.unpublish(99), ConfigError),
    "unpublish of page -1": (lambda p: p.unpublish(-1), ConfigError),
    "digests of 31 bytes": (lambda p: p.present(0, rows([1])[:, :31]), ConfigError),
    "digests of another type": (lambda p: p.acquire(0, rows([1]).astype("u2")), ConfigError),
    "a page twice that is held once": (lambda p: p.release(pages_of(0, 1, 1)), MisuseError),
    "a free page": (lambda p: p.release(pages_of(0, 2)), MisuseError),
    "a page that does not exist": (lambda p: p.release(pages_of(0, 3)), MisuseError),
    "page -1": (lambda p: p.release(pages_of(-1)), MisuseError),
    "a second key": (lambda p: p.publish(0, rows([9]), pages_of(0)), MisuseError),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_misuse_is_a_named_error_and_changes_nothing(pool: PagePool, case: str) -> None:
    call, expected = BAD_CALLS[case]
    keyed_pages(pool, [1, 2])
    pool.release(pool.take(1))
    before = pool.stats()
    with pytest.raises(expected):
        call(pool)
    assert pool.stats() == before
    pool.check()


def test_the_library_refuses_negative_counts_and_short_strides(pool: PagePool) -> None:
    ffi, lib = native.load()
    out, key = ffi.new("int32_t[4]"), ffi.new("uint8_t[64]")
    keyed_pages(pool, [1])
    for function, *arguments in (
        (lib.kvc_pool_release, out, -1),
        (lib.kvc_pool_acquire, 0, key, 31, 1, out),
        (lib.kvc_pool_present, 0, key, 32, -1, key),
        (lib.kvc_pool_publish, 0, key, out, -1, key),
    ):
        with pytest.raises(ConfigError):
            native.call(function, pool._native, *arguments)
    pool.check()
