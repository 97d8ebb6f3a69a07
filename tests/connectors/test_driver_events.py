"""Events of device and tier, replayed: exactly the keys of both, under any history."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from tiers.random_play import play_at_random
from tiers.stamp_engine import ATTENTION, BLOCK, PATIENCE, STATE, Engine, engine, text

from kvcache.connectors import pool_scheduler
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.connectors.testing import Faults
from kvcache.core.errors import MisuseError
from kvcache.core.events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    ReferenceIndex,
    Shelf,
    decode_batch,
    encode_batch,
)
from kvcache.core.hashing import NATIVE_NAMESPACE
from kvcache.retention import Dense, Sparse

GROUPS = (ATTENTION, STATE)
SHELVES = {Shelf(group, medium) for group in GROUPS for medium in ("GPU", "CPU")}


class Known(NamedTuple):
    """What a key stands for."""

    tokens: tuple[int, ...]
    parent: bytes | None
    sessions: set[str]
    """Of all requests that have it: one of them wrote it."""


@dataclass
class Follower:
    """An index that follows an engine's events over the wire."""

    engine: Engine
    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    known: dict[tuple[int, bytes], Known] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    """Keys by medium and kind of event."""

    def learn(self) -> None:
        """The keys of all open requests."""
        for handle, request in self.engine.requests.items():
            for group, keys in enumerate(self.engine.manager.group_digests(handle)):
                parent = None
                for i, row in enumerate(keys):
                    key = row.tobytes()
                    tokens = tuple(request.tokens[i * BLOCK : (i + 1) * BLOCK])
                    known = self.known.setdefault((group, key), Known(tokens, parent, set()))
                    known.sessions.add(request.session)
                    parent = key

    def take(self) -> tuple[Event, ...]:
        """Events through the codec into the index; each stored block is compared."""
        batch = EventBatch(ts=1.0, events=tuple(self.engine.offload.take_events()))
        events = decode_batch(encode_batch(batch)).events
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.told["cleared"] += 1
                continue
            self.told[f"{event.medium} {type(event).__name__}"] += len(event.block_hashes)
            if isinstance(event, BlockStored):
                self._compare(event)
        self.index.apply(events)
        return events

    def _compare(self, event: BlockStored) -> None:
        assert event.block_hashes
        assert event.group_idx is not None
        assert event.block_size == BLOCK
        assert event.kv_cache_spec_kind == ("full_attention", "mamba")[event.group_idx]
        if not event.token_ids:  # a load that ended after its request
            assert (event.medium, event.session_id) == ("GPU", None)
        parent = event.parent_block_hash
        for i, key in enumerate(event.block_hashes):
            assert isinstance(key, bytes)
            known = self.known[event.group_idx, key]
            assert parent == known.parent
            parent = key
            if event.token_ids:
                assert event.token_ids[i * BLOCK : (i + 1) * BLOCK] == known.tokens
                assert event.session_id in known.sessions

    def there(self, group: int) -> tuple[set[bytes], set[bytes]]:
        """The keys that the device finds, and those that the tier does."""
        keys = [key for g, key in self.known if g == group]
        device = {key for key in keys if self.engine.manager.find_key(group, key) >= 0}
        pool, number = pool_of(self.engine, group)
        if number is None or not keys:
            return device, set()
        rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        flags = pool.present(number, rows).tolist()
        held = {key for key, flag in zip(keys, flags, strict=True) if flag}
        assert pool.stats().keyed == len(held)
        return device, held

    def compare(self) -> None:
        """The index has exactly the keys that are found, in each group and medium."""
        for group in GROUPS:
            device, tier = self.there(group)
            assert self.index.keys(group, "GPU") == device
            assert self.index.keys(group, "CPU") == tier
        assert self.index.shelves() <= SHELVES
        assert (self.index.repeated_stores, self.index.unknown_removals) == (0, 0)


def pool_of(e: Engine, group: int) -> tuple[Any, int | None]:
    """A group's pool in the tier, and the tier's number for native keys."""
    scheduler = e.offload._scheduler
    assert isinstance(scheduler, PoolScheduler)
    return scheduler._pools[group], scheduler._numbers.get(NATIVE_NAMESPACE)


def play(e: Engine, chance: random.Random, steps: int, often: float) -> Follower:
    follower = Follower(e)
    for _ in range(steps):
        play_at_random(e, chance, 1)
        follower.learn()
        if chance.random() < often:
            follower.take()
            follower.compare()
    return follower


def random_setup(chance: random.Random) -> dict[str, Any]:
    return {
        "slabs": chance.choice((6, 8, 12)),
        "tier": chance.choice(((64, 24), (30, 9), (12, 4))),
        "retention": chance.choice((Dense(), Sparse(0), Sparse(8))),
        "faults": Faults(
            fail_item=chance.choice((0, 0.2)),
            late=chance.choice((0, 0.2)),
            duplicate=0.1,
            drop=chance.choice((0, 0.1)),
            refuse=0.1,
            refuse_by_raising=chance.choice((0, 0.1)),
        ),
        "events": True,
    }


@pytest.mark.parametrize("seed", range(8))
def test_events_of_device_and_tier_rebuild_the_keys_of_both(seed: int) -> None:
    chance = random.Random(seed)
    with engine(seed=seed, **random_setup(chance)) as e:
        follower = play(e, chance, 300, often=chance.choice((0.1, 0.5, 1)))
        for handle in list(e.requests):
            e.close(handle, "abort")
        e.settle()
        follower.take()
        follower.compare()
        e.manager.clear()
        follower.take()
        follower.compare()
        assert {shelf.medium for shelf in follower.index.shelves()} == {"CPU"}
        for medium in ("GPU", "CPU"):
            assert follower.told[f"{medium} BlockStored"] > 0
        assert follower.told["GPU BlockRemoved"] > 0
        assert follower.told["cleared"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_after_a_loss_nobody_is_told_of_keys_that_are_not_there(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier keeps few events, and they are taken too seldom: less is known, never more."""
    monkeypatch.setattr(pool_scheduler, "MAX_WAITING_EVENTS", 4)
    chance = random.Random(seed)
    with engine(seed=seed, **random_setup(chance)) as e:
        follower = Follower(e)
        for _ in range(30):
            for _ in range(12):
                play_at_random(e, chance, 1)
                follower.learn()
            follower.take()
            for group in GROUPS:
                device, tier = follower.there(group)
                assert follower.index.keys(group, "GPU") <= device
                assert follower.index.keys(group, "CPU") <= tier
        assert follower.told["cleared"] > 0


def test_a_small_tier_tells_what_it_evicts() -> None:
    with engine(tier=(8, 4), slabs=12, events=True) as e:
        follower = Follower(e)
        for i in range(8):
            handle = e.open(text(i, 20))
            follower.learn()
            e.run(handle)
            follower.take()
            follower.compare()
        assert follower.told["CPU BlockRemoved"] > 20
        assert len(follower.index.keys(ATTENTION, "CPU")) == 8


def test_one_event_tells_all_that_one_store_brought() -> None:
    with engine(slabs=12, events=True) as e:
        follower = Follower(e)
        handle = e.open(text(1, 24))
        follower.learn()
        e.run(handle, chunk=8)
        stored = [event for event in follower.take() if isinstance(event, BlockStored)]
        groups = [(event.medium, event.group_idx) for event in stored]
        assert groups.count(("CPU", ATTENTION)) == 1
        attention = next(event for event in stored if groups[stored.index(event)][0] == "CPU")
        assert attention.token_ids == tuple(text(1, 24))
        assert attention.session_id == "session 1"


def test_a_load_tells_of_the_device_alone() -> None:
    with engine(slabs=12, events=True) as e:
        follower = Follower(e)
        e.serve(text(1, 24))
        e.manager.clear()
        e.offload.take_events()
        e.serve(text(1, 24))
        told = e.offload.take_events()
        assert e.offload.stats().loaded_pages > 0
        assert {event.medium for event in told if isinstance(event, BlockStored)} == {"GPU"}
        assert follower.told == Counter()


def test_foreign_keys_keep_their_namespace_in_the_tier() -> None:
    with engine(slabs=12, events=True) as e:
        keys = np.frombuffer(hashlib.shake_256(b"foreign").digest(6 * 32), np.uint8).reshape(-1, 32)
        for salt in ("a", "b"):
            handle = e.manager.open_foreign(keys, prompt_tokens=24, salt=salt)
            e.offload.lookup(handle)
            step = e.manager.begin_step()
            grant = e.allocate(handle, 24)
            assert grant is not None
            e.offload.start_load(handle, grant)
            e.manager.commit(handle, grant.end)
            e.manager.end_step(step)
            e.offload.forget(handle)
            e.manager.finish(handle)
            assert e.offload.drain(PATIENCE)
        index = ReferenceIndex()
        index.apply(e.offload.take_events())
        rows = {row.tobytes() for row in keys}
        shelves = index.shelves()
        assert len({shelf.namespace for shelf in shelves}) == 2
        for shelf in shelves:
            assert shelf.namespace is not None
            assert index.keys(shelf.group, shelf.medium, namespace=shelf.namespace) <= rows
            if shelf.group == ATTENTION:
                assert index.keys(*shelf[:2], namespace=shelf.namespace) == rows
        assert {shelf.medium for shelf in shelves} == {"GPU", "CPU"}


def test_without_the_managers_events_a_tier_tells_keys_alone() -> None:
    with engine(slabs=12, events=True) as e:
        e.serve(text(1, 24))
        assert e.manager.take_events()  # somebody else took them
        told = e.offload.take_events()
        assert told
        for event in told:
            assert isinstance(event, BlockStored)
            assert (len(event.block_hashes), event.parent_block_hash) == (1, None)
            assert (event.token_ids, event.block_size, event.medium) == ((), BLOCK, "CPU")
            assert event.kv_cache_spec_kind == ("full_attention", "mamba")[event.group_idx or 0]


def test_nothing_is_told_twice() -> None:
    with engine(slabs=12, events=True) as e:
        e.serve(text(1, 24))
        assert e.offload.take_events()
        assert e.offload.take_events() == []


def test_to_ask_for_events_that_nobody_keeps_is_misuse() -> None:
    with engine(slabs=12, events=False) as e:
        e.serve(text(1, 24))
        with pytest.raises(MisuseError, match="events=True"):
            e.offload.take_events()
