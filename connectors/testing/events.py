"""The part of the contract suite that is about events. A tier that reports none keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcache.connectors.base import TransferResult
from kvcache.connectors.key_events import KeyEvent, KeysLost, KeysStored
from kvcache.connectors.testing.harness import Factory, Key, Rig, Setup, chain, digest, expect, rig
from kvcache.core.hashing import NATIVE_NAMESPACE


class Follower:
    """The keys of a tier, as its events tell them."""

    def __init__(self) -> None:
        self.told: dict[str | None, set[tuple[int, bytes, bytes]]] = {}
        """Of each medium: group, namespace, digest."""

    @property
    def keys(self) -> set[tuple[int, bytes, bytes]]:
        """Those of all media."""
        return set().union(*self.told.values())

    def apply(self, events: Iterable[KeyEvent]) -> int:
        """Take events in order; how many keys they told."""
        told = 0
        for event in events:
            expect(not isinstance(event, KeysLost), "events were lost though they were taken")
            if isinstance(event, KeysLost):
                continue
            expect(event.keys.ndim == 2 and event.keys.shape[1] == 32, "keys are not [n, 32]")
            expect(len(event.keys), "an event without keys")
            told += len(event.keys)
            stored, keys = isinstance(event, KeysStored), self.told.setdefault(event.medium, set())
            for row in event.keys:
                key = event.group, event.namespace, row.tobytes()
                expect((key in keys) != stored, "a key was told twice, or went and never came")
                (keys.add if stored else keys.remove)(key)
        return told

    def knows(self, key: Key) -> bool:
        """Is the key told and not gone, of one medium at least?"""
        name = key.group, key.namespace, digest(key)
        return any(name in keys for keys in self.told.values())


def _follow(r: Rig, follower: Follower) -> int:
    """How many keys were told since the last time."""
    return follower.apply(r.scheduler.take_events())


def events_tell_a_key_when_it_is_visible(factory: Factory) -> None:
    """After `complete`, once, for good items only, under its group and namespace."""
    with rig(factory, Setup(events=True)) as r:
        if not r.scheduler.reports_events:
            return
        follower = Follower()
        keys = chain("a", 4)
        transfer = r.planned(keys)
        expect(_follow(r, follower) == 0, "a planned store was told")
        r.submit(transfer)
        result = r.results(transfer.id)[transfer.id][-1]
        expect(_follow(r, follower) == 0, "a store was told before complete() saw its result")
        ok = result.ok.copy()
        ok[1] = 0
        r.scheduler.complete(TransferResult(result.id, result.direction, ok, error="Injected: one"))
        _follow(r, follower)
        expect(
            [follower.knows(key) for key in keys] == [1, 0, 1, 1], "not the good items were told"
        )
        r.store(keys)
        others = [Key("a0", 1), Key("a0", 0, b"\x01" * 32)]
        for key in others:
            r.store([key])
        _follow(r, follower)
        expect(all(map(follower.knows, keys + others)), "a stored key was not told")
        r.lookup(1, keys)
        expect(all(r.load(1, keys)), "a plain load failed")
        _follow(r, follower)
        expect(len(follower.keys) == 6, f"{len(follower.keys)} keys were told, 6 stored")


def events_tell_what_was_evicted(factory: Factory) -> None:
    """Replayed they give the keys that a lookup finds, whenever they are taken."""
    with rig(factory, Setup(events=True)) as r:
        if not r.scheduler.reports_events:
            return
        follower = Follower()
        spaces = NATIVE_NAMESPACE, b"\x01" * 32
        rows = [
            chain(name, r.setup.pages[group] - 2, group, space)
            for name in "abc"
            for group in range(2)
            for space in spaces
        ]
        for i, keys in enumerate(rows):
            r.store(keys)
            if i % 3 == 0:
                _follow(r, follower)
        _follow(r, follower)
        keys = [key for row in rows for key in row]
        visible = [
            key for row in rows for key, here in zip(row, r.visible(row), strict=True) if here
        ]
        expect(len(visible) < len(keys), "a small tier evicted nothing")
        expect(
            [key for key in keys if follower.knows(key)] == visible,
            "the events do not give the keys that a lookup finds",
        )
        expect(len(follower.keys) == len(visible), "keys were told that nobody stored")


EVENT_RULES: tuple[Callable[[Factory], None], ...] = (
    events_tell_a_key_when_it_is_visible,
    events_tell_what_was_evicted,
)
