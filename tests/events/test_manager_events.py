"""The manager's own events: what they say of keys, tokens, parents and sessions, in small arenas."""

from __future__ import annotations

import random

import numpy as np
import pytest
from events.managers import GEOMETRIES, Rig, play, play_sessions

from kvcache.core import event_calls
from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ReferenceIndex,
)
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED
from kvcache.core.specs import FullAttention
from kvcache.presets import preset
from kvcache.retention import Dense, Sparse


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_replayed_events_give_the_managers_keys_blocks_and_parents(
    name: str, *, dense: bool
) -> None:
    geometry = Geometry(groups=GEOMETRIES[name], page_alignment_bytes=1)
    play_sessions(geometry, Dense() if dense else Sparse())


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


def test_windows_are_told_as_vllm_tells_them() -> None:
    manager = Manager(preset("deepseek-v4-pro"), slabs=UNLIMITED, retention=Sparse(), events=True)
    assert [(label.kind, label.window_tokens) for label in manager.group_labels()] == [
        ("mla_attention", None),
        ("mla_attention", None),
        ("sliding_window_mla", 128),
        ("sliding_window_mla", 8),
        ("sliding_window_mla", 128),
    ]


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


@pytest.mark.parametrize("change", ["clear", "salt", "weights", "adapter"])
def test_what_is_taken_after_a_change_tells_it_in_order_and_by_the_names_of_its_time(
    change: str,
) -> None:
    """docs/events.md, "When to take them"."""
    manager = Manager(Geometry(groups=GEOMETRIES["full"]), slabs=64, retention=Dense(), events=True)
    prompt = np.arange(8, dtype=np.int32)

    def serve() -> None:
        handle = manager.open(prompt, salt="tenant", lora="adapter", session="s")
        manager.lookup(handle)
        step = manager.begin_step()
        assert manager.allocate(handle, 8) is not None
        manager.commit(handle, 8)
        manager.end_step(step)
        manager.finish(handle)

    serve()
    match change:
        case "clear":
            manager.clear()
        case "salt":
            manager.clear(salt="tenant")
        case "weights":
            manager.set_weights_epoch(7)
        case "adapter":
            manager.set_lora_version("adapter", "2")
    serve()
    first, gone, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert isinstance(second, BlockStored)
    assert set(gone.block_hashes) == set(first.block_hashes)
    for event in (first, second):
        assert event.extra_keys == (("adapter", "tenant"), ("adapter",))
        assert (event.session_id, event.token_ids) == ("s", tuple(range(8)))
    same = change in {"clear", "salt"}
    assert (first.block_hashes == second.block_hashes) == same
