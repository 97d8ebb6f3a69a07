"""The page pool against an oracle of two dictionaries and an LRU order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

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
from kvcache.core.pool import (
    POOL_EVENT_DTYPE,
    POOL_LOST,
    POOL_REMOVED,
    POOL_STORED,
    PagePool,
    PoolStats,
)

Key = tuple[int, int]
"""Namespace, and a number that stands for a digest."""

Told = tuple[int, int, int]
"""Kind, namespace, number."""


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def rows(numbers: Sequence[int], gap: int = 0) -> NDArray[np.uint8]:
    """Digests with a gap of so many bytes between the rows."""
    data = b"".join(digest(n) + bytes(gap) for n in numbers)
    return np.frombuffer(data, np.uint8).reshape(-1, 32 + gap)[:, :32]


def pages_of(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def told(pool: PagePool) -> list[Told]:
    """Events, with the numbers that their digests stand for."""
    numbers = {digest(n): n for n in range(100)} | {bytes(32): -1}
    return [(kind, ns, numbers[bytes(key)]) for kind, ns, key in pool.take_events().tolist()]


class PoolOracle:
    """What the header of the pool says, in dictionaries."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.refs: dict[int, int] = {}
        self.page_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.events: list[Told] = []

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
            self.events.append((POOL_REMOVED, *key))

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
        self.events.append((POOL_STORED, *key))
        return True

    def release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0 and page in self.key_of:
            self.lru[page] = None


small = st.integers(0, 2**16)
namespaces = st.integers(0, 1)
numbers = st.integers(0, 9)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from([1, 2, 3, 5, 8, -1]),
        seed=st.integers(0, 2**64 - 1),
        journal=st.sampled_from([0, 1, 3, 1000]),
    )
    def build(self, capacity: int, seed: int, journal: int) -> None:
        _, lib = native.load()
        capacity = lib.kvc_unlimited() if capacity < 0 else capacity
        self.pool = PagePool(capacity, seed=seed, journal=journal)
        self.journal = journal
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

    @rule()
    def take_events(self) -> None:
        """All of them in order; or the youngest, behind a mark, where they were too many."""
        events, wanted = told(self.pool), self.oracle.events
        self.oracle.events = []
        if self.journal == 0:
            assert events == []
        elif len(wanted) <= self.journal:
            assert events == wanted
        else:
            assert events[0][0] == POOL_LOST
            rest = events[1:]
            assert len(rest) == len(wanted) % (self.journal + 1)
            assert rest == wanted[len(wanted) - len(rest) :]

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


def test_events_come_in_order_once_and_only_where_asked_for(pool: PagePool) -> None:
    pages = keyed_pages(pool, [1, 2])
    assert pool.take_events().dtype == POOL_EVENT_DTYPE
    pool = PagePool(2, journal=100)
    pages = keyed_pages(pool, [1, 2])
    pool.release(pages)
    pool.acquire(0, rows([2]))
    pool.take(1)
    pool.unpublish(int(pages[1]))
    pool.unpublish(int(pages[1]))
    assert told(pool) == [
        (POOL_STORED, 0, 1),
        (POOL_STORED, 0, 2),
        (POOL_REMOVED, 0, 1),
        (POOL_REMOVED, 0, 2),
    ]
    assert told(pool) == []


def test_a_key_that_is_there_already_tells_nothing() -> None:
    pool = PagePool(4, journal=100)
    pool.publish(0, rows([1, 1]), pool.take(2))
    assert told(pool) == [(POOL_STORED, 0, 1)]


def test_events_beyond_the_journal_leave_a_mark_in_their_place() -> None:
    pool = PagePool(10, journal=3)
    keyed_pages(pool, [1, 2, 3])
    assert len(told(pool)) == 3
    keyed_pages(pool, [4, 5, 6, 7])
    assert told(pool) == [(POOL_LOST, 0, -1)]
    keyed_pages(pool, [8])
    assert told(pool) == [(POOL_STORED, 0, 8)]


def test_with_less_room_than_there_are_no_event_is_written_or_forgotten() -> None:
    pool = PagePool(4, journal=100)
    keyed_pages(pool, [1, 2])
    ffi, lib = native.load()
    events, n = ffi.new("kvc_pool_event[2]"), ffi.new("int64_t*")
    native.call(lib.kvc_pool_take_events, pool._native, events, 1, n)
    assert n[0] == 2
    assert events[0].kind == 0
    assert len(told(pool)) == 2


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_a_pool_of_impossible_size_is_a_named_error(capacity: int) -> None:
    with pytest.raises(ConfigError):
        PagePool(capacity)


def test_a_journal_of_less_than_nothing_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match="a journal of -1 events"):
        PagePool(1, journal=-1)


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


def test_namespaces_are_those_of_keys_and_of_events_that_wait() -> None:
    pool = PagePool(3, journal=9)
    for number in (7, 2**32 - 1, 7, 5):  # the last replaces the oldest
        page = pool.take(1)
        pool.publish(number, np.full((1, 32), len(pool.namespaces()), np.uint8), page)
        pool.release(page)
    assert pool.namespaces().tolist() == [5, 7, 2**32 - 1]
    assert len(pool.take_events()) == 5
    assert pool.namespaces().tolist() == [5, 7, 2**32 - 1]
    pool.unpublish(int(pool.acquire(5, np.full((1, 32), 2, np.uint8))[0]))
    assert pool.namespaces().tolist() == [5, 7, 2**32 - 1]  # told, and not heard yet
    pool.take_events()
    assert pool.namespaces().tolist() == [7, 2**32 - 1]


def test_the_library_refuses_negative_counts_and_short_strides(pool: PagePool) -> None:
    ffi, lib = native.load()
    out, key = ffi.new("int32_t[4]"), ffi.new("uint8_t[64]")
    events, count = ffi.new("kvc_pool_event[1]"), ffi.new("int64_t*")
    keyed_pages(pool, [1])
    for function, *arguments in (
        (lib.kvc_pool_release, out, -1),
        (lib.kvc_pool_acquire, 0, key, 31, 1, out),
        (lib.kvc_pool_present, 0, key, 32, -1, key),
        (lib.kvc_pool_publish, 0, key, out, -1, key),
        (lib.kvc_pool_take_events, events, -1, count),
        (lib.kvc_pool_spaces, ffi.NULL, -1, count),
    ):
        with pytest.raises(ConfigError):
            native.call(function, pool._native, *arguments)
    pool.check()


@pytest.mark.parametrize("count", ["1", None, 1.5, 1.0, float("nan"), True, np.float32(1), 2**70])
def test_numbers_of_pages_are_whole_numbers(count: Any) -> None:
    pool = PagePool(4)
    with pytest.raises(ConfigError, match="count of pages"):
        pool.take(count)
    for field in ("seed", "journal"):
        if count != 2**70 and (field, count) != ("seed", None):
            with pytest.raises(ConfigError, match=f"PagePool.{field}"):
                PagePool(4, **{field: count})
    with pytest.raises(ConfigError, match=r"PagePool\.capacity"):
        PagePool(count)
    assert pool.stats().free == PagePool(4).stats().free


def test_more_pages_than_there_are_cost_no_memory_to_ask_for() -> None:
    assert len(PagePool(4).take(2**40)) == 4


@pytest.mark.parametrize("capacity", [12, 16, 23, 30, 80])
def test_a_search_ends_where_keys_have_passed_every_bucket(capacity: int) -> None:
    """Keys come and go in a small index until none of its buckets tells a search to end."""
    absent = rows([10**6])
    for seed in range(40):
        pool = PagePool(capacity, seed=seed)
        for number in range(20 * capacity):
            page = pool.take(1)
            pool.publish(0, rows([number]), page)
            pool.release(page)
            assert pool.present(0, absent).tolist() == [0]
        kept = range(19 * capacity, 20 * capacity)
        assert pool.present(0, rows(list(kept))).tolist() == [1] * capacity
        pool.check()
