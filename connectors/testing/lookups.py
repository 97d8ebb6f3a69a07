"""The part of the contract suite that is about lookups: what they promise, and what they hold."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.connectors.testing.harness import PATIENCE_SECONDS, Factory, Key, chain, expect, rig


def lookup_is_idempotent(factory: Factory) -> None:
    """Equal answers, and the pins of one lookup however often it is repeated."""
    with rig(factory) as r:
        keys = chain("a", 3)
        r.store(keys[:2])
        for _ in range(3):
            expect(r.lookup(1, keys) == [1, 1, 0], "a repeated lookup gave another answer")
        expect(r.pinned() == 2, f"three lookups pin {r.pinned()} pages, not 2")
        r.store(keys[2:])
        expect(r.lookup(1, keys) == [1, 1, 1], "a repeated lookup missed a new key")
        r.scheduler.release(1)
        expect(r.pinned() == 0, "pins are left after release")


def a_promise_survives_pressure(factory: Factory) -> None:
    """What a lookup reported can be loaded, however much is stored meanwhile."""
    with rig(factory) as r:
        keys = chain("a", 3)
        r.store(keys)
        r.lookup(1, keys)
        for i in range(4 * r.setup.pages[0]):
            r.store([Key(f"other{i}")])
        expect(r.lookup(1, keys) == [1, 1, 1], "a promised key is gone")
        expect(all(r.load(1, keys)), "a promised key could not be loaded")


def a_new_lookup_replaces_the_old(factory: Factory) -> None:
    """Pins follow the last lookup of a request; another request's stay."""
    with rig(factory) as r:
        first, second = chain("a", 3), chain("b", 2)
        r.store(first + second)
        r.lookup(1, first)
        r.lookup(1, second)
        expect(r.pinned() == 2, f"the old lookup still pins: {r.pinned()} pages, not 2")
        r.lookup(2, second)
        r.scheduler.release(1)
        expect(r.pinned() == 2, "a release dropped another request's pins")
        r.scheduler.release(2)
        expect(r.pinned() == 0, "pins are left after release")


def what_is_not_wanted_any_more_is_let_go(factory: Factory) -> None:
    """`narrow` keeps the pins of the first keys alone, and takes their place as the last lookup."""
    with rig(factory) as r:
        keys = chain("a", 5)
        r.store([keys[0], keys[1], keys[3], keys[4]])
        r.worker.flush(PATIENCE_SECONDS)  # what works in the background holds pages, too
        r.lookup(1, keys)
        r.scheduler.narrow(r.request_keys(1, keys[:3]))
        expect(r.pinned() == 2, f"two pages are wanted, {r.pinned()} pinned")
        expect(r.lookup(1, keys[:3]) == [1, 1, 0], "a lookup of the same keys finds others")
        r.store(keys[2:3])
        expect(r.lookup(1, keys[:3]) == [1, 1, 1], "what was stored since is not found")
        expect(r.lookup(1, keys) == [1] * 5, "what was let go is not found any more")
        r.scheduler.narrow(r.request_keys(1, keys[:2]))
        expect(all(r.load(1, keys[:2])), "a load of what was wanted failed")
        r.scheduler.narrow(r.request_keys(2, keys[:1]))
        expect(all(r.load(2, keys[:1])), "what was never looked up before is not looked up")
        expect(r.pinned() == 0, "pins are left after release")


def a_version_tells_when_lookups_would_find_more(factory: Factory) -> None:
    """It is another one after a store, and the same where nothing was stored or evicted."""
    with rig(factory) as r:
        before = r.scheduler.version
        r.store(chain("a", 1))
        stored = r.scheduler.version
        expect(stored is None or stored != before, "a key came, the version is the same")
        r.lookup(1, chain("a", 1))
        r.scheduler.release(1)
        expect(r.scheduler.version == stored, "a lookup changed the version")


def what_is_held_is_told_without_a_promise(factory: Factory) -> None:
    """`holds` tells what a lookup would find, or that it cannot tell, and changes no pin."""
    with rig(factory) as r:
        keys = chain("a", 3)
        r.store(keys[:2])
        r.lookup(1, keys[:1])
        held = r.scheduler.holds(r.request_keys(2, keys))
        expect(r.pinned() == 1, f"a question pins: {r.pinned()} pages, not the lookup's one")
        if held is not None:
            expect(held[0].tolist() == [1, 1, 0], f"{held[0].tolist()} are held, not the first two")
        r.scheduler.release(1)
        expect(r.pinned() == 0, "pins are left after release")


def a_load_takes_the_pins_over(factory: Factory) -> None:
    """From plan to final result the wanted slots stay, the others are let go."""
    with rig(factory) as r:
        keys = chain("a", 4)
        r.store(keys)
        r.lookup(1, keys)
        transfer = r.plan_load(1, keys[:2])
        expect(r.pinned() == 2, f"a load of 2 pages pins {r.pinned()}")
        for i in range(4 * r.setup.pages[0]):
            r.store([Key(f"other{i}")])
        result = r.run(transfer)
        expect(result.ok.all(), "a planned load lost its slots")
        r.verify(keys[:2], transfer, result.ok)
        expect(r.pinned() == 0, "pins are left after a finished load")


LOOKUP_RULES: tuple[Callable[[Factory], None], ...] = (
    lookup_is_idempotent,
    a_promise_survives_pressure,
    a_new_lookup_replaces_the_old,
    what_is_not_wanted_any_more_is_let_go,
    a_version_tells_when_lookups_would_find_more,
    what_is_held_is_told_without_a_promise,
    a_load_takes_the_pins_over,
)
