"""A manager whose events are followed: small geometries, an index over the wire, requests from open to end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvcache.core.events import (
    BlockStored,
    Event,
    EventBatch,
    ReferenceIndex,
    decode_batch,
    encode_batch,
)
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.specs import (
    Compressed,
    FullAttention,
    LatentAttention,
    LatentWindow,
    PoolingState,
    RecurrentState,
    SlidingWindow,
)
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
    "deepseek": (
        Compressed(name="light", layers=1, ratio=4, entry_bytes=16, index_bytes=4, block_tokens=8),
        Compressed(name="heavy", layers=1, ratio=8, entry_bytes=16, block_tokens=8),
        LatentWindow(name="window", layers=1, entry_bytes=16, window=9, block_tokens=4),
        PoolingState(
            name="light_pool", layers=1, ratio=4, token_bytes=16, block_tokens=4, overlap=True
        ),
        PoolingState(name="heavy_pool", layers=1, ratio=8, token_bytes=16, block_tokens=8),
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
    payloads: list[bytes] = field(default_factory=list)
    held: dict[int, set[tuple[int, bytes]]] = field(default_factory=dict)
    """Keys that the manager had, by how many payloads had told of them."""

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
        self.payloads.append(encode_batch(batch))
        events = decode_batch(self.payloads[-1]).events
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
        self.held[len(self.payloads)] = held
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


def play_sessions(geometry: Geometry, retention: Dense | Sparse) -> Rig:
    """Forty requests in a small arena, with a shared prompt, aborts, evictions and two clears."""
    slabs = geometry.slabs_needed(80) * 2
    rig = Rig(Manager(geometry, slabs=slabs, retention=retention, events=True))
    draw = random.Random(7)
    system = [draw.randrange(50) for _ in range(19)]
    stored = 0
    for n in range(40):
        text = [draw.randrange(50) for _ in range(draw.randrange(1, 40))]
        tokens = system[: draw.choice((0, 8, 19))] + text
        play(rig, tokens, draw.randrange(15), draw, draw.choice(("finish", "finish", "abort")))
        stored += len(rig.index)
        if n == 25:
            rig.manager.clear()
    assert stored
    assert any(rig.manager.group_stats(g).evictions for g in range(len(geometry.groups)))
    rig.manager.clear()
    rig.take()
    rig.compare()
    assert len(rig.index) == 0
    return rig
