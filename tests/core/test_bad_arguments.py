"""Whatever a caller passes: a named error at once, no wrapped number, nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.core import arrays
from kvcache.core.copy import copy_pages
from kvcache.core.errors import ConfigError, KVCacheError
from kvcache.core.hashing import Fingerprint, root_digest
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.native_manager import most_slabs
from kvcache.core.pool import PagePool
from kvcache.core.records import MOST_TOKENS
from kvcache.core.retain import RetentionPlan, TurnShape
from kvcache.core.specs import FullAttention, RecurrentState
from kvcache.retention import Dense, Sparse

ATTENTION = FullAttention(name="a", layers=1, kv_heads=1, head_dim=8, block_tokens=4)
STATE = RecurrentState(name="s", layers=1, state_bytes_per_layer=64)
HYBRID = Geometry((ATTENTION, STATE))


@pytest.fixture
def manager() -> Manager:
    return Manager(HYBRID, slabs=40, retention=Sparse(0))


def running(m: Manager, tokens: int = 12) -> int:
    handle = m.open(range(tokens), max_tokens=tokens + 4)
    m.lookup(handle)
    assert m.allocate(handle, tokens) is not None
    step = m.begin_step()
    m.commit(handle, tokens)
    m.end_step(step)
    return handle


NUMBERS: dict[str, Callable[[Manager, int], Any]] = {
    "open beyond 64 bits": lambda m, _: m.open([1], max_tokens=2**63),
    "open beyond what is possible": lambda m, _: m.open([1], max_tokens=2**62),
    "open with a fraction": lambda m, _: m.open([1], max_tokens=1.5),  # type: ignore[arg-type]
    "boundary that is no number": lambda m, _: m.open([1], boundaries=[float("nan")]),
    "boundary of half a token": lambda m, _: m.open([1, 2], boundaries=[1.5]),  # type: ignore[list-item]
    "boundary beyond the prompt": lambda m, _: m.open([1], boundaries=[2**63 - 1]),
    "allocate the maximum": lambda m, h: m.allocate(h, 2**63 - 1),
    "allocate beyond 64 bits": lambda m, h: m.allocate(h, 2**64),
    "next to be evicted of no number": lambda m, _: m.next_evicted("all"),  # type: ignore[arg-type]
    "next to be evicted of a fraction": lambda m, _: m.next_evicted(1.5),  # type: ignore[arg-type]
    "next to be evicted beyond 64 bits": lambda m, _: m.next_evicted(2**70),
    "committing an array": lambda m, h: m.allocate_many([h], [1], commit=np.ones(2)),  # type: ignore[arg-type]
    "committing with drafts and an array": lambda m, h: m.allocate_many(
        [h],
        [1],
        drafts=[0],
        commit=np.ones(2),  # type: ignore[arg-type]
    ),
    "commit beyond 64 bits": lambda m, h: m.commit(h, 2**63),
    "stops to the maximum": lambda m, h: m.stops(h, 0, 2**63 - 1),
    "stops from below": lambda m, h: m.stops(h, -1, 4),
    "table of a huge group": lambda m, h: m.block_table(h, 2**31),
    "table of a group below": lambda m, h: m.block_table(h, -1),
    "table from a block below": lambda m, h: m.block_table(h, 0, -1),
    "plan of no state group": lambda m, h: m.state_plan(h, 0),
    "handle beyond 64 bits": lambda m, _: m.info(2**70),
    "handle of text": lambda m, _: m.info("1"),  # type: ignore[arg-type]
    "unpin of a wrapped page": lambda m, _: m.unpin(0, np.array([2**32])),
    "unpin of half a page": lambda m, _: m.unpin(0, np.array([0.5])),  # type: ignore[arg-type]
    "unpin in two dimensions": lambda m, _: m.unpin(0, np.zeros((2, 0), np.int32)),
    "pin of other records": lambda m, _: m.pin(np.zeros(3, np.int64)),  # type: ignore[arg-type]
    "foreign keys of width 0": lambda m, _: m.open_foreign(
        np.zeros((3, 0), np.uint8), prompt_tokens=12
    ),
    "foreign keys of numbers": lambda m, _: m.open_foreign(
        np.zeros((3, 32), np.int64),  # type: ignore[arg-type]
        prompt_tokens=12,
    ),
    "ragged tokens": lambda m, _: m.open([[1], [2, 3]]),  # type: ignore[list-item]
    "salt that is no text": lambda m, _: m.open([1], salt=5),  # type: ignore[arg-type]
    "salt that is no Unicode": lambda m, _: m.open([1], salt="\ud800"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_arguments_that_cannot_be_are_refused_and_change_nothing(
    manager: Manager, case: str
) -> None:
    handle = running(manager)
    before = (manager.stats(), manager.arena_stats(), manager.info(handle))
    with pytest.raises(KVCacheError):
        NUMBERS[case](manager, handle)
    after = (manager.stats(), manager.arena_stats(), manager.info(handle))
    assert after == before
    manager.check()


NO_HANDLES: dict[str, Callable[[int], Any]] = {
    "nothing": lambda _: None,
    "a list": lambda h: [h],
    "a dict": lambda _: {},
    "text": str,
    "a float": float,
    "a short float": np.float32,
    "a fraction": lambda h: Fraction(2 * h + 1, 2),
    "a decimal": lambda h: Decimal(h) + Decimal("0.5"),
    "an array of one": lambda h: np.array([h]),
    "an array of no dimension": np.array,
    "an array of two": lambda h: np.array([h, h]),
    "beyond 64 bits": lambda h: h + 2**64,
}
BY_HANDLE: dict[str, Callable[[Manager, Any], Any]] = {
    "info": lambda m, h: m.info(h),
    "block_table": lambda m, h: m.block_table(h, 0),
    "draft_holes": lambda m, h: m.draft_holes(h, 0),
    "state_plan": lambda m, h: m.state_plan(h, 1),
    "digests": lambda m, h: m.digests(h),
    "group_digests": lambda m, h: m.group_digests(h),
    "extend": lambda m, h: m.extend(h, [1]),
    "extend_foreign": lambda m, h: m.extend_foreign(h, 1),
    "finish": lambda m, h: m.finish(h),
    "abort": lambda m, h: m.abort(h),
    "preempt": lambda m, h: m.preempt(h),
    "lookup": lambda m, h: m.lookup(h),
    "stops": lambda m, h: m.stops(h, 0, 4),
    "need": lambda m, h: m.need(h, 4),
    "allocate": lambda m, h: m.allocate(h, 4),
    "blockage": lambda m, h: m.blockage(h),
    "commit": lambda m, h: m.commit(h, 4),
    "end_step": lambda m, h: m.end_step(h),
    "load_items": lambda m, h: m.load_items(h),
    "end_load": lambda m, h: m.end_load(h, np.ones(1, np.uint8)),
    "abandon_load": lambda m, h: m.abandon_load(h),
}


@pytest.mark.parametrize("value", NO_HANDLES)
@pytest.mark.parametrize("call", BY_HANDLE)
def test_a_handle_is_a_whole_number_before_anything_is_done_with_it(
    manager: Manager, call: str, value: str
) -> None:
    """What C would cut to one closed the request, and left what is known of it here."""
    handle = running(manager)
    before = (manager.stats(), manager.arena_stats(), manager.info(handle))
    with pytest.raises(ConfigError):
        BY_HANDLE[call](manager, NO_HANDLES[value](handle))
    assert (manager.stats(), manager.arena_stats(), manager.info(handle)) == before
    manager.finish(handle)
    assert not manager._shapes
    assert not manager._chains


def test_a_handle_of_numpy_is_one() -> None:
    manager = Manager(HYBRID, slabs=40, retention=Sparse(0), events=True)
    handle = np.int64(running(manager))
    assert len(manager.digests(handle)) == 3  # type: ignore[arg-type]
    manager.finish(handle)  # type: ignore[arg-type]
    assert not manager._shapes
    assert not manager._chains
    assert manager.take_events()
    assert not manager._labels


@pytest.mark.parametrize("group", [Decimal("0.5"), np.array(0), 0.0, None])
def test_a_group_is_a_whole_number(manager: Manager, group: Any) -> None:
    handle = running(manager)
    with pytest.raises(ConfigError):
        manager.block_table(handle, group)
    with pytest.raises(ConfigError):
        manager.unpin(group, np.zeros(0, np.int32))


def test_presence_maps_without_width_are_refused(manager: Manager) -> None:
    handle = manager.open(range(9))
    with pytest.raises(ConfigError, match="present has shape"):
        manager.lookup(handle, [np.zeros((2, 0), np.uint8), np.zeros(2, np.uint8)])


class Policy:
    """A policy that answers what the test wants."""

    def __init__(self) -> None:
        self.answer: RetentionPlan | Exception = RetentionPlan((0, 0), (), ())

    def plan(self, shape: TurnShape) -> RetentionPlan:
        del shape
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BAD_PLANS = {
    "fewer flags than positions": RetentionPlan((0, 0), (4, 8), (True,)),
    "position off the grid": RetentionPlan((0, 0), (3,), (True,)),
    "positions that descend": RetentionPlan((0, 0), (8, 4), (True, True)),
    "interval off the grid": RetentionPlan((0, 6), (), ()),
    "negative interval": RetentionPlan((0, -4), (), ()),
    "interval beyond reason": RetentionPlan((0, 2**62), (), ()),
    "interval beyond 64 bits": RetentionPlan((0, 2**64), (), ()),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_policy_that_answers_nonsense_is_refused_at_open(case: str) -> None:
    policy = Policy()
    manager = Manager(HYBRID, slabs=40, retention=policy)
    policy.answer = BAD_PLANS[case]
    with pytest.raises(ConfigError):
        manager.open(range(12))
    assert manager.stats().open_requests == 0
    manager.check()


def test_the_longest_interval_and_the_largest_arena_are_those_of_the_core() -> None:
    policy, most = Policy(), most_slabs(HYBRID)
    manager = Manager(HYBRID, slabs=most, retention=policy)
    policy.answer = RetentionPlan((0, MOST_TOKENS), (), ())
    manager.abort(manager.open(range(12)))
    policy.answer = RetentionPlan((0, MOST_TOKENS + HYBRID.grid_tokens), (), ())
    with pytest.raises(ConfigError, match=f"up to {MOST_TOKENS}"):
        manager.open(range(12))
    with pytest.raises(ConfigError):
        Manager(HYBRID, slabs=most + 1, retention=policy)


def test_a_policy_is_asked_again_about_a_junction_that_it_failed_on() -> None:
    policy = Policy()
    manager = Manager(HYBRID, slabs=40, retention=policy)
    manager.finish(running(manager))
    handle = manager.open([*range(8), 99, 98])  # attention has 8 tokens, no state is kept there
    policy.answer = RuntimeError("not now")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not now"):
            manager.lookup(handle)
    policy.answer = RetentionPlan((0, 0), (8,), (True,))
    assert manager.lookup(handle).junction == 8
    assert manager.stops(handle, 0, 9) == [8]


def test_digests_outlive_their_request_and_manager_and_cannot_be_written() -> None:
    manager = Manager(HYBRID, slabs=40, retention=Sparse(0))
    handle = manager.open(range(12))
    digests, groups = manager.digests(handle), manager.group_digests(handle)
    before = digests.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        digests[0] = 0
    manager.abort(handle)
    del manager
    assert digests.tobytes() == before
    assert groups[0].tobytes() == before


def test_digests_grow_with_the_request(manager: Manager) -> None:
    handle = manager.open(range(7), max_tokens=12)
    assert len(manager.digests(handle)) == 1
    first = manager.digests(handle)
    manager.extend(handle, range(7, 12))
    assert len(manager.digests(handle)) == 3
    assert manager.digests(handle)[0].tobytes() == first[0].tobytes()


@pytest.mark.parametrize(
    "pages", [np.array([2**32]), np.array([-(2**32)]), np.array([0.0]), np.zeros((1, 0), np.int32)]
)
def test_page_lists_never_wrap(pages: NDArray[Any]) -> None:
    pool = PagePool(4)
    pool.take(1)
    before = pool.stats()
    with pytest.raises(ConfigError):
        pool.release(pages)
    with pytest.raises(ConfigError):
        copy_pages([], pages, pages)
    assert pool.stats() == before


def test_publish_wants_one_key_for_each_page() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(ConfigError, match="1 keys for 2 pages"):
        pool.publish(0, np.zeros((1, 32), np.uint8), pages)
    assert pool.stats().keyed == 0


def test_a_grid_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="hit grid"):
        Geometry((FullAttention(name="a", layers=1, kv_heads=1, head_dim=8, block_tokens=2**31),))
    coprime = [
        FullAttention(name=str(b), layers=1, kv_heads=1, head_dim=8, block_tokens=b)
        for b in (65_537, 65_539)
    ]
    with pytest.raises(ConfigError, match="least common multiple"):
        Geometry(tuple(coprime))


def test_flat_copies_only_what_it_must() -> None:
    array = np.arange(4, dtype=np.int32)
    assert arrays.flat(array, np.int32, "x") is array
    assert arrays.flat(array[::2], np.int32, "x").tolist() == [0, 2]
    assert arrays.flat([True, False], np.uint8, "x").tolist() == [1, 0]
    assert arrays.flat((), np.int64, "x").dtype == np.int64


def test_a_root_of_unusable_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="valid text"):
        root_digest(Fingerprint(model="\udcff"), hash_unit_tokens=4)


def test_records_may_be_packed_differently(manager: Manager) -> None:
    running(manager)
    items = manager.take_keyed()
    packed = np.concatenate([items, items[:0]])
    assert packed.dtype != items.dtype
    assert (manager.pin(packed) >= 0).all()
    assert manager.stats().pinned == len(items)


def test_a_grant_past_more_states_than_there_are_pages_ends_where_they_end() -> None:
    geometry = Geometry((STATE,), state_grid_tokens=16)
    manager = Manager(geometry, slabs=100, retention=Dense())
    handle = manager.open([1], max_tokens=2**40)
    assert manager.need(handle, 2**32) == [100]
    grant = manager.allocate(handle, 2**32)
    assert grant is not None
    assert (grant.start, grant.end) == (0, 1600)
    with pytest.raises(ConfigError, match="shorter range"):
        manager.stops(handle, 0, 2**40)
    manager.check()


NAMED: dict[str, tuple[Callable[[Manager, int, Any], Any], str]] = {
    "extend_foreign": (lambda m, _, v: m.extend_foreign(v, 1), "handle"),
    "extend": (lambda m, _, v: m.extend(v, [1]), "handle"),
    "lookup": (lambda m, _, v: m.lookup(v), "handle"),
    "allocate": (lambda m, _, v: m.allocate(v, 1), "handle"),
    "need": (lambda m, _, v: m.need(v, 1), "handle"),
    "stops": (lambda m, _, v: m.stops(v, 0, 4), "handle"),
    "blockage": (lambda m, _, v: m.blockage(v), "handle"),
    "commit": (lambda m, _, v: m.commit(v, 12), "handle"),
    "finish": (lambda m, _, v: m.finish(v), "handle"),
    "abort": (lambda m, _, v: m.abort(v), "handle"),
    "preempt": (lambda m, _, v: m.preempt(v), "handle"),
    "info": (lambda m, _, v: m.info(v), "handle"),
    "digests": (lambda m, _, v: m.digests(v), "handle"),
    "group_digests": (lambda m, _, v: m.group_digests(v), "handle"),
    "block_table": (lambda m, _, v: m.block_table(v, 0), "handle"),
    "state_plan": (lambda m, _, v: m.state_plan(v, 1), "handle"),
    "draft_holes": (lambda m, _, v: m.draft_holes(v, 0), "handle"),
    "end_step": (lambda m, _, v: m.end_step(v), "step"),
    "group of block_table": (lambda m, h, v: m.block_table(h, v), "group"),
    "first of block_table": (lambda m, h, v: m.block_table(h, 0, v), "first"),
    "group of state_plan": (lambda m, h, v: m.state_plan(h, v), "group"),
    "group of draft_holes": (lambda m, h, v: m.draft_holes(h, v), "group"),
    "group of group_stats": (lambda m, _, v: m.group_stats(v), "group"),
    "group of unpin": (lambda m, _, v: m.unpin(v, np.zeros(0, np.int32)), "group"),
    "group of find_key": (lambda m, h, v: m.find_key(v, m.digests(h)[0].tobytes()), "group"),
    "load_items": (lambda m, _, v: m.load_items(v), "load"),
    "end_load": (lambda m, _, v: m.end_load(v, np.ones(1, np.uint8)), "load"),
    "abandon_load": (lambda m, _, v: m.abandon_load(v), "load"),
}


@pytest.mark.parametrize("value", [None, "1", 1.0, [1], 2**70, -(2**70)])
@pytest.mark.parametrize("call", NAMED)
def test_an_argument_of_a_wrong_type_is_named(manager: Manager, call: str, value: Any) -> None:
    handle = running(manager)
    use, name = NAMED[call]
    with pytest.raises(ConfigError, match=rf"^{name} is .*: it must be (a whole number|from)"):
        use(manager, handle, value)
    manager.check()


def test_an_argument_of_a_pool_is_named() -> None:
    pool, keys = PagePool(4), np.zeros((1, 32), np.uint8)
    for call in (pool.present, pool.acquire, lambda v, k: pool.publish(v, k, pool.take(1))):
        with pytest.raises(ConfigError, match="namespace is None"):
            call(None, keys)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="namespace is -1: it must be from 0 to 4294967295"):
            call(-1, keys)
    with pytest.raises(ConfigError, match="page is '3'"):
        pool.unpublish("3")  # type: ignore[arg-type]


def test_the_table_of_a_state_group_points_to_its_plan(manager: Manager) -> None:
    handle = running(manager)
    with pytest.raises(ConfigError, match="group 1 has states and no blocks: use state_plan"):
        manager.block_table(handle, 1)
    with pytest.raises(ConfigError, match="group 0, block -1: blocks count from 0"):
        manager.block_table(handle, 0, -1)


def test_a_group_or_size_class_that_is_not_there_is_said_with_how_many_there_are(
    manager: Manager,
) -> None:
    with pytest.raises(ConfigError, match="there is no group 2: the geometry has 2, numbered from"):
        manager.group_stats(2)
    with pytest.raises(ConfigError, match="there is no group -1: the geometry has 2"):
        manager.block_table(running(manager), -1)


@pytest.mark.parametrize("items", [np.zeros(1), np.zeros(1, np.int32), [1, 2]])
def test_records_of_another_kind_are_refused_in_words(manager: Manager, items: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        manager.pin(items)
    said = "expected records with the fields end, handle, ns, group, page, digest"
    assert str(refused.value).endswith(said)
    assert "formats" not in str(refused.value)
