"""The manager's own events: what they say of keys, tokens, parents and sessions, in small arenas."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvcache.core import event_calls
from kvcache.core.events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    ReferenceIndex,
    decode_batch,
    encode_batch,
)
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED
from kvcache.core.specs import FullAttention, LatentAttention, RecurrentState, SlidingWindow
from kvcache.retention import Dense, Sparse


def full(block: int) -> FullAttention:
    return FullAttention(name="full", layers=1, kv_heads=1, head_dim=8, block_tokens=block)


def window(block: int, size: int) -> SlidingWindow:
    return SlidingWindow(
        name="window", layers=1, kv_heads=1, head_dim=8, block_tokens=block, window=size
    )


GEOMETRIES = {
    "full": (full(4),),
    "window": (full(4), window(2, 5)),
    "state": (
        LatentAttention(name="latent", layers=1, block_tokens=4, rank=8, rope_dim=0),
        RecurrentState(name="state", layers=2, state_bytes_per_layer=200),
    ),
    "mixed": (
        full(8),
        window(4, 9),
        RecurrentState(name="state", layers=2, state_bytes_per_layer=200),
    ),
    "draft": (
        full(4),
        FullAttention(
            name="draft", layers=1, kv_heads=1, head_dim=8, block_tokens=4, lookahead_tokens=1
        ),
    ),
}


@dataclass
class Rig:
    """A manager, an index that follows its events over the wire, and what each key stands for."""

    manager: Manager
    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    known: dict[tuple[int, bytes], tuple[tuple[int, ...], bytes | None]] = field(
        default_factory=dict
    )
    """By group and key: the block's tokens, and the key before it."""

    def learn(self, handle: int, tokens: list[int]) -> None:
        for group, keys in enumerate(self.manager.group_digests(handle)):
            block = self.manager.geometry.block_tokens[group]
            parent = None
            for i, row in enumerate(keys):
                key = row.tobytes()
                self.known[group, key] = (tuple(tokens[i * block : (i + 1) * block]), parent)
                parent = key

    def take(self) -> tuple[Event, ...]:
        """Events through the codec into the index, each stored block compared with what is known."""
        batch = EventBatch(ts=1.0, events=tuple(self.manager.take_events()))
        events = decode_batch(encode_batch(batch)).events
        for event in events:
            if isinstance(event, BlockStored):
                self._compare(event)
        self.index.apply(events)
        assert (self.index.repeated_stores, self.index.unknown_removals) == (0, 0)
        return events

    def _compare(self, event: BlockStored) -> None:
        assert event.block_hashes
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.group_idx is not None
        parent = event.parent_block_hash
        for i, key in enumerate(event.block_hashes):
            assert isinstance(key, bytes)
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            assert (tokens, parent) == self.known[event.group_idx, key]
            parent = key

    def compare(self) -> None:
        """The index has exactly the keys that the manager finds."""
        held = {(group, key) for group, key in self.known if self.manager.find_key(group, key) >= 0}
        told = {(s.group, key) for s in self.index.shelves() for key in self.index.keys(s.group)}
        assert told == held
        for group in range(len(self.manager.geometry.groups)):
            assert self.manager.group_stats(group).keyed == len(self.index.keys(group))


def play(rig: Rig, tokens: list[int], reply: int, draw: random.Random, end: str) -> None:
    """One request: chunks of the prompt, then the reply; events are taken now and then."""
    manager = rig.manager
    handle = manager.open(
        np.array(tokens, np.int32), max_tokens=len(tokens) + reply, session="session"
    )
    rig.learn(handle, tokens)
    done = manager.lookup(handle).hit_tokens
    while done < len(tokens) or reply:
        if done == len(tokens):
            tokens.append(draw.randrange(50))
            manager.extend(handle, [tokens[-1]])
            rig.learn(handle, tokens)
            reply -= 1
        step = manager.begin_step()
        grant = manager.allocate(handle, min(len(tokens) - done, draw.choice((3, 8, 20))))
        assert grant is not None
        done = grant.end
        manager.commit(handle, done)
        manager.end_step(step)
        if draw.random() < 0.3:
            rig.take()
            rig.compare()
        if end == "abort" and draw.random() < 0.3:
            break
    {"finish": manager.finish, "abort": manager.abort}[end](handle)
    rig.take()
    rig.compare()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_replayed_events_give_the_managers_keys_blocks_and_parents(
    name: str, *, dense: bool
) -> None:
    geometry = Geometry(groups=GEOMETRIES[name], page_alignment_bytes=1)
    slabs = geometry.slabs_needed(80) * 2
    rig = Rig(Manager(geometry, slabs=slabs, retention=Dense() if dense else Sparse(), events=True))
    draw = random.Random(7)
    system = [draw.randrange(50) for _ in range(19)]
    stored = removed = 0
    for _ in range(40):
        text = [draw.randrange(50) for _ in range(draw.randrange(1, 40))]
        tokens = system[: draw.choice((0, 8, 19))] + text
        play(rig, tokens, draw.randrange(15), draw, draw.choice(("finish", "finish", "abort")))
        stored += len(rig.index)
        removed += sum(rig.manager.group_stats(g).evictions for g in range(len(geometry.groups)))
    assert stored
    assert removed
    rig.manager.clear()
    rig.take()
    rig.compare()
    assert len(rig.index) == 0


def test_stored_events_name_session_adapter_and_kind() -> None:
    geometry = Geometry(groups=GEOMETRIES["window"])
    manager = Manager(geometry, slabs=64, retention=Dense(), events=True)
    handle = manager.open(np.arange(8, dtype=np.int32), session="s", lora="adapter")
    manager.lookup(handle)
    step = manager.begin_step()
    grant = manager.allocate(handle, 8)
    assert grant is not None
    manager.commit(handle, grant.end)
    assert manager.take_events() == []
    manager.end_step(step)
    manager.finish(handle)
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored)]
    assert {(e.session_id, e.lora_name, e.medium) for e in stored} == {("s", "adapter", "GPU")}
    assert {
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored
    } == {
        (0, "full_attention", None),
        (1, "sliding_window", 5),
    }


def test_after_a_loss_a_cleared_pool_tells_everything_again() -> None:
    """The way back to a right index that docs/events.md gives; forgetting alone knows less."""
    geometry = Geometry(groups=GEOMETRIES["mixed"], page_alignment_bytes=1)
    rig = Rig(Manager(geometry, slabs=64, retention=Dense(), events=True))
    draw = random.Random(3)
    tokens = [draw.randrange(50) for _ in range(30)]
    play(rig, list(tokens), 0, draw, "finish")
    rig.index.forget()  # batches were lost
    handle = rig.manager.open(tokens)
    assert rig.manager.lookup(handle).hit_tokens == 24  # in the cache, and told to nobody
    rig.manager.abort(handle)
    rig.manager.clear()
    rig.index.apply(rig.manager.take_events())
    assert rig.index.unknown_removals > 0
    rig.index.unknown_removals = 0
    rig.compare()
    play(rig, list(tokens), 5, draw, "finish")
    assert len(rig.index) > 0


def test_clearing_one_salt_removes_its_keys_alone() -> None:
    manager = Manager(Geometry(groups=GEOMETRIES["full"]), slabs=64, retention=Dense(), events=True)
    index = ReferenceIndex()
    for salt in ("a", "b"):
        handle = manager.open(np.arange(8, dtype=np.int32), salt=salt)
        manager.lookup(handle)
        step = manager.begin_step()
        assert manager.allocate(handle, 8) is not None
        manager.commit(handle, 8)
        manager.end_step(step)
        manager.finish(handle)
    index.apply(manager.take_events())
    assert len(index) == 4
    manager.clear(salt="a")
    events = manager.take_events()
    assert AllBlocksCleared() not in events
    index.apply(events)
    assert len(index) == 2
    assert index.unknown_removals == 0


def test_names_of_closed_requests_are_bounded_where_nobody_takes_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_calls, "MAX_CLOSED", 8)
    manager = Manager(
        Geometry((FullAttention(name="a", layers=1, kv_heads=1, head_dim=8, block_tokens=4),)),
        slabs=UNLIMITED,
        retention=Sparse(),
        events=True,
    )
    for n in range(100):
        manager.finish(manager.open([n], session=str(n)))
    assert len(manager._labels) <= 8
    manager.take_events()
    assert not manager._labels


def test_a_salt_is_told_with_the_first_block() -> None:
    manager = Manager(
        Geometry((FullAttention(name="a", layers=1, kv_heads=1, head_dim=8, block_tokens=4),)),
        slabs=UNLIMITED,
        retention=Sparse(),
        events=True,
    )
    handle = manager.open(list(range(9)), salt="tenant", session="s")
    step = manager.begin_step()
    assert manager.allocate(handle, 9)
    manager.commit(handle, 9)
    manager.end_step(step)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == (("tenant",), None)
    assert stored.session_id == "s"
