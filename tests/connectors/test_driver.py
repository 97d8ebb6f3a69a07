"""What a tier is for, driven as an engine drives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers.shared_pieces import shared
from tiers.stamp_engine import (
    ATTENTION,
    GEOMETRY,
    PATIENCE,
    STATE,
    Engine,
    engine,
    text,
)

from kvcache.connectors.arena_regions import arena_regions
from kvcache.connectors.base import KEYED_DTYPE, KeyedPages, PageRegion
from kvcache.connectors.cpu import CpuConnector
from kvcache.connectors.driver import Offload
from kvcache.connectors.testing import Setup, rig
from kvcache.core.errors import ConfigError, InvariantError, MisuseError
from kvcache.core.hashing import NATIVE_NAMESPACE
from kvcache.core.manager import Manager
from kvcache.core.pool import PagePool
from kvcache.core.records import UNLIMITED
from kvcache.retention import Dense, Sparse


def test_an_evicted_prefix_comes_back_from_the_tier() -> None:
    with engine(tier=(128, 64)) as e:
        prompt = text(0, 41)
        assert e.serve(prompt).hits[0].hit_tokens == 0
        for other in range(1, 5):
            e.serve(text(other, 41))
        again = e.serve(prompt)
        assert again.hits[0].device_tokens == 0
        assert again.hits[0].hit_tokens == 40
        assert e.offload.stats().loaded_pages == 10 + 1  # ten blocks, the one state at their end
        e.assert_idle()


def test_device_and_tier_serve_one_hit_together() -> None:
    """The head is on the device, the tail only below."""
    with engine(slabs=9) as e:
        prompt = text(0, 61)
        e.serve(prompt)
        e.manager.clear()
        e.serve(prompt[:33])
        loaded = e.offload.stats().loaded_pages
        again = e.serve(prompt)
        assert again.hits[0].device_tokens == 32
        assert again.hits[0].hit_tokens == 60
        assert e.offload.stats().loaded_pages - loaded == 7 + 1


def test_output_is_stored_for_the_next_turn() -> None:
    with engine(retention=Sparse(0)) as e:
        turn = e.serve(text(0, 30), output=20)
        e.manager.clear()
        again = e.serve([*turn.tokens, *text(1, 9)])
        assert again.hits[0].hit_tokens == 48


def test_salts_never_share() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt, salt="a")
        e.manager.clear()
        assert e.serve(prompt, salt="b").hits[0].hit_tokens == 0
        e.manager.clear()
        assert e.serve(prompt, salt="a").hits[0].hit_tokens == 40


def test_foreign_keys_are_found_under_their_namespace() -> None:
    with engine() as e:
        keys = np.random.default_rng(0).integers(0, 256, (6, 32), dtype=np.uint8)

        def play(salt: str) -> int:
            handle = e.manager.open_foreign(keys, prompt_tokens=25, salt=salt)
            hit = e.offload.lookup(handle)
            assert hit is not None
            step = e.manager.begin_step()
            grant = e.manager.allocate(handle, 25 - hit.hit_tokens)
            assert grant is not None
            assert e.offload.start_load(handle, grant)
            if grant.load:
                assert e.offload.drain(PATIENCE)
                assert e.offload.poll() == [(handle, True)]
                grant = e.manager.allocate(handle, 25 - hit.hit_tokens)
                assert grant is not None
            e.manager.commit(handle, 25)
            e.manager.end_step(step)
            e.offload.forget(handle)
            e.manager.finish(handle)
            assert e.offload.drain(PATIENCE)
            e.manager.clear()
            return hit.hit_tokens

        assert play("a") == 0
        assert play("a") == 24
        assert play("b") == 0


def test_a_repeated_lookup_changes_nothing() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        handle = e.open(prompt)
        hits = {str(e.offload.lookup(handle)) for _ in range(3)}
        assert len(hits) == 1
        pinned = e.offload.stats().pinned_pages
        e.offload.lookup(handle)
        assert e.offload.stats().pinned_pages == pinned > 0
        e.close(handle, "abort")
        e.assert_idle()


def test_a_grant_without_load_ends_the_pins() -> None:
    with engine() as e:
        e.serve(text(0, 41))
        handle = e.open(text(0, 41), output=5)
        e.step()
        assert e.requests[handle].state == "running"
        assert e.offload.stats().pinned_pages == 0
        e.run(handle)


# ---- what a lookup pins --------------------------------------------------------------------------


PROMPT = text(0, 41)


def lose_block(e: Engine, handle: int, block: int) -> None:
    """The tier forgets one block of a request."""
    pool = e.offload._scheduler._pools[ATTENTION]  # type: ignore[attr-defined]
    (slot,) = pool.acquire(0, e.manager.group_digests(handle)[ATTENTION][block : block + 1])
    pool.unpublish(slot)
    pool.release(np.array([slot], np.int32))


def open_with_a_gap(e: Engine) -> int:
    """A request whose prompt is in the tier alone, but for the tokens from 12 to 15."""
    e.serve(PROMPT)
    assert e.offload.drain(PATIENCE)
    e.manager.clear()
    handle = e.open(PROMPT)
    lose_block(e, handle, 3)
    return handle


def compute_beside(e: Engine, tokens: list[int]) -> None:
    """Another request, without the tier: all is computed, while others wait."""
    step = e.manager.begin_step()
    other = e.open(tokens)
    e.manager.lookup(other)
    grant = e.manager.allocate(other, len(tokens))
    assert grant is not None
    e.compute(other, e.requests[other], grant)
    e.manager.end_step(step)
    e.offload.end_of_step()
    e.close(other, "abort")


def test_a_lookup_pins_nothing_behind_the_first_gap() -> None:
    with engine() as e:
        handle = open_with_a_gap(e)
        for _ in range(3):
            hit = e.offload.lookup(handle)
            assert hit is not None
            assert hit.hit_tokens == 12
            assert e.offload.stats().pinned_pages == 3 + 3
            e.check()
        assert [h.hit_tokens for h in e.run(handle).hits] == [12]
        e.assert_idle()


def test_a_repeated_lookup_behind_a_gap_does_not_ask_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine() as e:
        handle = open_with_a_gap(e)
        e.offload.lookup(handle)
        monkeypatch.delattr(PagePool, "acquire")
        monkeypatch.delattr(PagePool, "present")
        hit = e.offload.lookup(handle)
        assert hit is not None
        assert hit.hit_tokens == 12
        e.close(handle, "abort")


def test_a_gap_that_was_filled_is_seen_by_the_next_lookup() -> None:
    with engine() as e:
        waiting = open_with_a_gap(e)
        first = e.offload.lookup(waiting)
        compute_beside(e, PROMPT[:17])
        assert e.offload.drain(PATIENCE)
        e.manager.clear()
        second = e.offload.lookup(waiting)
        assert first is not None
        assert second is not None
        assert [first.hit_tokens, second.hit_tokens] == [12, 40]
        e.close(waiting, "abort")
        e.assert_idle()


def test_a_gap_that_the_device_filled_is_seen_by_the_next_lookup() -> None:
    """Of which the tier knows nothing: what it has behind is part of the hit from then on."""
    with engine(lazy_bytes=1) as e:
        waiting = open_with_a_gap(e)
        hits = [e.offload.lookup(waiting)]
        compute_beside(e, PROMPT[:17])
        hits.append(e.offload.lookup(waiting))
        assert [hit and hit.hit_tokens for hit in hits] == [12, 40]
        e.close(waiting, "abort")
        e.assert_idle()


def test_a_repeated_lookup_asks_for_the_gap_alone_when_others_have_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine() as e:
        handle = open_with_a_gap(e)
        e.offload.lookup(handle)
        asked: list[int] = []
        for name in ("acquire", "present"):
            real = getattr(PagePool, name)

            def counted(*args: Any, real: Any = real) -> Any:
                asked.append(len(args[2]))
                return real(*args)

            monkeypatch.setattr(PagePool, name, counted)
        for other in range(1, 4):
            compute_beside(e, text(other, 21))
            assert e.offload.drain(PATIENCE)
            asked.clear()
            hit = e.offload.lookup(handle)
            assert hit is not None
            assert hit.hit_tokens == 12
            assert sum(asked) <= 2
        e.close(handle, "abort")


def test_a_gap_that_another_process_filled_is_seen_by_the_next_lookup(tmp_path: Path) -> None:
    """Of which this process stored nothing: it hears of it by the tier's version."""
    tmp_path.chmod(0o700)
    setup = Setup(geometry=GEOMETRY, pages=(64, 24))
    with (
        engine(connector=shared(setup, tmp_path)) as e,
        rig(lambda s: shared(s, tmp_path), setup) as other,
    ):
        handle = e.open(text(0, 41))
        digests = e.manager.group_digests(handle)

        def store(blocks: Sequence[int]) -> None:
            items = np.zeros(2 * len(blocks), KEYED_DTYPE)
            items["group"] = np.repeat([ATTENTION, STATE], len(blocks))
            items["page"] = np.tile(blocks, 2)
            items["digest"] = np.concatenate([digests[g][list(blocks)] for g in (ATTENTION, STATE)])
            plan = other.scheduler.plan_store(KeyedPages(items, [NATIVE_NAMESPACE]))
            assert plan is not None
            assert other.run(plan[0]).ok.all()

        store([0, 1, 2, 5])
        hits = [e.offload.lookup(handle), e.offload.lookup(handle)]
        assert e.offload.stats().pinned_pages == 2 * 3
        store([3, 4])
        hits.append(e.offload.lookup(handle))
        assert [hit and hit.hit_tokens for hit in hits] == [12, 12, 24]
        e.close(handle, "abort")


def test_attention_without_a_state_stays_pinned_up_to_its_gap() -> None:
    """A state may come within reach: the device may get it any time."""
    with engine(retention=Sparse(0)) as e:
        e.serve(text(0, 41))
        e.manager.clear()
        handle = e.open([*text(0, 38), *text(1, 10)])
        hit = e.offload.lookup(handle)
        assert hit is not None
        assert (hit.hit_tokens, hit.junction) == (0, 36)
        assert e.offload.stats().pinned_pages == 9
        e.close(handle, "abort")


# ---- configuration -------------------------------------------------------------------------------


def test_regions_must_cover_the_pools() -> None:
    manager = Manager(GEOMETRY, slabs=2, retention=Dense())
    connector = CpuConnector(GEOMETRY, pages=[4, 4])
    sizes = [g.page_bytes for g in GEOMETRY.groups]
    with pytest.raises(ConfigError, match="1 regions for 2 groups"):
        Offload(manager, connector, [PageRegion(64, sizes[0], 8)])
    with pytest.raises(
        ConfigError, match="region of group 'state' has 3 pages, an arena of 2 slabs has up to 6"
    ):
        Offload(manager, connector, [PageRegion(64, sizes[0], 10), PageRegion(64, sizes[1], 3)])
    endless = Manager(GEOMETRY, slabs=UNLIMITED, retention=Dense())
    with pytest.raises(ConfigError, match=r"arena .* is UNLIMITED: give Manager\(slabs=geometry"):
        Offload(endless, connector, [PageRegion(64, sizes[0], 10), PageRegion(64, sizes[1], 4)])
    connector.worker.close()


def test_regions_of_an_arena_are_what_each_group_sees_of_it() -> None:
    with engine() as e:
        slabs = len(e.arena) // GEOMETRY.slab_bytes
        assert arena_regions(GEOMETRY, address=e.arena.ctypes.data, slabs=slabs) == e.regions()


def test_a_load_is_started_once() -> None:
    with engine() as e:
        prompt = text(0, 21)
        e.serve(prompt)
        e.manager.clear()
        handle = e.manager.open(prompt)
        assert e.offload.lookup(handle)
        grant = e.manager.allocate(handle, 0)
        assert grant
        assert e.offload.start_load(handle, grant)
        with pytest.raises(MisuseError, match="was started already"):
            e.offload.start_load(handle, grant)
        e.offload.forget(handle)
        e.manager.abort(handle)
        e.settle()
        e.assert_idle()


def test_a_manager_without_a_journal_is_refused() -> None:
    with engine() as e:
        manager = Manager(GEOMETRY, slabs=7, retention=Dense(), journal=False)
        with pytest.raises(ConfigError, match="journal=True"):
            Offload(manager, CpuConnector(GEOMETRY, pages=(8, 4)), e.regions())


def test_check_notices_a_pin_that_no_store_knows_of() -> None:
    with engine() as e:
        e.serve(text(0, 9))
        item = np.zeros(1, KEYED_DTYPE)
        handle = e.open(text(0, 9))
        item["page"] = e.manager.find_key(ATTENTION, e.manager.digests(handle)[0].tobytes())
        item["digest"] = e.manager.digests(handle)[0]
        assert (e.manager.pin(item) >= 0).all()
        with pytest.raises(InvariantError, match="1 device pages are pinned, stores know of 0"):
            e.offload.check()
        e.manager.unpin(ATTENTION, item["page"])
