"""Tables of slots that several processes share, by the calls of one or two users."""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.core import native
from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.shared_pool import SharedPool, SharedTables, format_region, region_layout

SLOTS, PAGE_BYTES, LAYOUT = [8], [4096], b"\x01" * 32


def address_of(memory: mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.fixture(name="memory")
def _memory() -> mmap:
    return mmap(-1, region_layout(SLOTS, PAGE_BYTES).tables_bytes + SLOTS[0] * PAGE_BYTES[0])


def user(memory: mmap, number: int) -> SharedPool:
    tables = SharedTables(
        address_of(memory), len(memory), SLOTS, PAGE_BYTES, layout=LAYOUT, user=number
    )
    return tables.pools[0]


@pytest.fixture(name="pool")
def _pool(memory: mmap) -> Iterator[SharedPool]:
    format_region(address_of(memory), len(memory), SLOTS, PAGE_BYTES, layout=LAYOUT, seed=3)
    pool = user(memory, 0)
    yield pool
    pool.check()


def keys(*numbers: int) -> NDArray[np.uint8]:
    return np.array([[n] * 32 for n in numbers], np.uint8).reshape(-1, 32)


def stored(pool: SharedPool, *numbers: int) -> list[int]:
    """Pages that are held, with these keys."""
    pages = pool.take(len(numbers))
    assert pool.publish(0, keys(*numbers), pages).all()
    found: list[int] = pages.tolist()
    return found


@pytest.mark.parametrize("size", [0, 256, 4096, region_layout([8] * 32, [4096] * 32).tables_bytes])
def test_nothing_is_written_where_there_is_no_room_for_the_tables(size: int) -> None:
    memory = mmap(-1, 1 << 21)
    slots, sizes = [8] * 32, [4096] * 32
    with pytest.raises(ConfigError, match=f"{size} bytes for a region of "):
        format_region(address_of(memory), size, slots, sizes, layout=LAYOUT, seed=3)
    assert not np.frombuffer(memory, np.uint8).any()


def test_nothing_is_read_behind_the_end(memory: mmap, pool: SharedPool) -> None:
    least = region_layout(SLOTS, PAGE_BYTES).tables_bytes
    for size in (0, 100, least - 1):
        with pytest.raises(ConfigError, match=f"^{size} bytes for a region of {least}"):
            SharedTables(address_of(memory), size, SLOTS, PAGE_BYTES, layout=LAYOUT, user=1)
    assert pool.shared_stats().held == 0


def test_more_than_is_held_is_let_go_by_none(pool: SharedPool) -> None:
    pages = stored(pool, 1, 2)
    pool.acquire(0, keys(1))
    for too_many in ([0, 1, 0, 0], [1, 1], [1, 0, 1]):
        with pytest.raises(MisuseError, match="let go more often than it was held"):
            pool.release(np.array([pages[i] for i in too_many], np.int32))
    assert pool.shared_stats().held == 2
    pool.release(np.array([pages[0], pages[1], pages[0]], np.int32))
    assert pool.shared_stats().held == 0
    assert pool.present(0, keys(1, 2)).tolist() == [1, 1]


def test_a_call_that_was_wrong_is_not_made_again(pool: SharedPool) -> None:
    pages = stored(pool, 1)
    for _ in range(2):
        with pytest.raises(MisuseError, match="is not held here"):
            pool.unpublish(pages[0] + 1)
    pool.release(np.array(pages, np.int32))
    assert pool.shared_stats().held == 0


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (3, 1, 4, 2)])
def test_held_pages_are_found_among_each_other(memory: mmap, pool: SharedPool, order: Any) -> None:
    """In any order; and by whole keys: neither by digests alone, nor after their keys went."""
    by_key = dict(zip((1, 2, 3, 4), stored(pool, 1, 2, 3, 4), strict=True))
    held = np.array([by_key[n] for n in order], np.int32)
    assert pool.acquire_held(0, keys(1, 3, 9, 4), held).tolist() == [
        by_key[1],
        by_key[3],
        -1,
        by_key[4],
    ]
    assert pool.acquire_held(5, keys(1, 3), held).tolist() == [-1, -1]
    assert pool.acquire_held(0, keys(1), held[:0]).tolist() == [-1]
    pool.unpublish(by_key[3])
    assert pool.acquire_held(0, keys(2, 3), held).tolist() == [by_key[2], -1]
    with pytest.raises(MisuseError, match="is not held here"):
        user(memory, 1).acquire_held(0, keys(1), held)
    pool.release(held)
    assert pool.shared_stats().held == 4  # once more than they were held at first
    pool.release(np.array([by_key[n] for n in (1, 2, 3, 4)], np.int32)[[0, 1, 2, 3]])
    assert pool.shared_stats().held == 0


def test_users_are_known_until_they_are_forgotten(memory: mmap, pool: SharedPool) -> None:
    other = user(memory, 5)
    pages = stored(other, 1, 2)
    tables = pool._tables
    assert tables.users() == 1 | 1 << 5
    assert tables.forget(5)
    assert tables.users() == 1
    assert pool.shared_stats().held == 0
    assert pages
    assert tables.forget(0)
    assert tables.users() == 1  # whoever comes after it looks once more


def test_many_keys_are_looked_up_in_pieces_and_none_is_lost() -> None:
    count = 20_000
    memory = mmap(-1, region_layout([count], [64]).tables_bytes + count * 64 + 4096)
    format_region(address_of(memory), len(memory), [count], [64], layout=LAYOUT, seed=3)
    tables = SharedTables(address_of(memory), len(memory), [count], [64], layout=LAYOUT, user=0)
    pool = tables.pools[0]
    digests = np.zeros((count, 32), np.uint8)
    digests[:, :4] = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    pages = pool.take(count)
    assert len(pages) == len(set(pages.tolist())) == count
    assert pool.publish(0, digests, pages).all()
    assert np.array_equal(pool.acquire(0, digests[::-1]), pages[::-1])
    assert pool.present(0, digests).all()
    assert np.array_equal(pool.acquire_held(0, digests, pages), pages)
    for _ in range(3):
        pool.release(pages)
    assert pool.shared_stats().held == 0
    assert (
        pool.take(count + 5).tolist() == pages.tolist()
    )  # the first that were let go are the oldest
    pool.check()


def test_the_library_refuses_bad_arguments(pool: SharedPool) -> None:
    ffi, lib = native.load()
    with pytest.raises(ConfigError, match="held"):
        native.call(
            lib.kvc_shared_acquire_held,
            pool._tables._native,
            0,
            b"\0" * 32,
            b"\0" * 32,
            32,
            1,
            ffi.NULL,
            1,
            ffi.new("int32_t[1]"),
        )
    with pytest.raises(ConfigError, match="users is NULL"):
        native.call(lib.kvc_shared_users, pool._tables._native, ffi.NULL)
