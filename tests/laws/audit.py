"""Law 16: a reader of the events alone knows the pool's keys, and what each of them stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from laws.content import Digests
from laws.counting import seen
from laws.oracle import Key, Oracle
from laws.prompts import plain

from kvcache.core.events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    ReferenceIndex,
    decode_batch,
    encode_batch,
)

Name = tuple[int, bytes | None, bytes]
"""Group, namespace of foreign keys, digest."""


class Audit:
    """Applies events as they come, and compares."""

    def __init__(self, oracle: Oracle, digests: Digests, where: str) -> None:
        self.oracle, self.digests, self.where = oracle, digests, where
        self.index = ReferenceIndex()
        self.known: dict[Name, Key] = {}
        self._learned: list[set[Key]] = [set() for _ in oracle.groups]

    def name(self, group: int, key: Key) -> Name:
        foreign = self.digests.root(key.space) if key.space[0] == "foreign" else None
        return group, foreign, self.digests.of(group, key)

    def learn(self, ever: Sequence[set[Key]]) -> None:
        for group, keys in enumerate(ever):
            for key in keys - self._learned[group]:
                self.known[self.name(group, key)] = key
            self._learned[group] |= keys

    def check(
        self, events: Sequence[Event], ever: Sequence[set[Key]], resident: Sequence[set[Key]]
    ) -> None:
        """`ever`: all keys up to now; `resident`: those that are there after the last event."""
        self.learn(ever)
        events = decode_batch(encode_batch(EventBatch(ts=0.0, events=tuple(events)))).events
        for event in events:
            seen[f"event: {type(event).__name__}", self.where] += 1
            assert not isinstance(event, AllBlocksCleared), "events were lost"
            assert event.block_hashes, "an event of nothing"
            if isinstance(event, BlockStored):
                self._check_stored(event)
        self.index.apply(events)
        assert self.index.repeated_stores == self.index.unknown_removals == 0
        there = {self.name(g, key) for g, keys in enumerate(resident) for key in keys}
        told = {
            (shelf.group, shelf.namespace, digest)
            for shelf in self.index.shelves()
            for digest in self.index.keys(shelf.group, shelf.medium, namespace=shelf.namespace)
        }
        assert told == there

    def _check_stored(self, event: BlockStored) -> None:
        """Neighbouring blocks of one prefix, with their own tokens and the key before them."""
        group = event.group_idx
        assert group is not None
        block = event.block_size
        assert block == self.oracle.blocks[group]
        keys = [self.known[group, event.namespace, digest] for digest in event.block_hashes]
        ends = [key.end for key in keys]
        assert ends == list(range(ends[0], ends[0] + block * len(ends), block))
        assert all(a.tokens == b.tokens[: len(a.tokens)] for a, b in itertools.pairwise(keys))
        if event.token_ids:
            assert [*event.token_ids] == plain(keys[-1].tokens[ends[0] - block : ends[-1]])
        elif event.namespace is None:
            seen["event of a writer that is gone", self.where] += 1
            if event.parent_block_hash is None:
                return
        if ends[0] == block:
            assert event.parent_block_hash is None
            return
        first = keys[0]
        before = self.oracle.key(group, first.space, first.tokens, ends[0] - block)
        assert before
        assert event.parent_block_hash == self.digests.of(group, before)
