"""Events of a device and its tier in one stream: what the tier's say, and in what order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvcache.connectors import event_stream
from kvcache.connectors.event_stream import TierStream
from kvcache.connectors.key_events import KeysLost, KeysRemoved, KeysStored
from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    GroupLabel,
    decode_batch,
    encode_batch,
)
from kvcache.core.hashing import NATIVE_NAMESPACE

FOREIGN = b"\x07" * 32
LABELS = [GroupLabel(2, "full_attention"), GroupLabel(4, "sliding_window", 5)]


def key(number: int) -> bytes:
    return bytes([number]) * 32


def on_device(numbers: Sequence[int], **fields: Any) -> BlockStored:
    """Blocks of two tokens; the first follows block `numbers[0] - 1`."""
    return BlockStored(
        **{
            "block_hashes": tuple(map(key, numbers)),
            "parent_block_hash": key(numbers[0] - 1) if numbers[0] else None,
            "token_ids": tuple(t for n in numbers for t in (10 * n, 10 * n + 1)),
            "block_size": 2,
            "medium": "GPU",
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "session_id": "s",
            **fields,
        }
    )


def rows(numbers: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)


def stored(*numbers: int, group: int = 0, namespace: bytes = NATIVE_NAMESPACE) -> KeysStored:
    return KeysStored(group, namespace, rows(numbers))


def removed(*numbers: int, group: int = 0, namespace: bytes = NATIVE_NAMESPACE) -> KeysRemoved:
    return KeysRemoved(group, namespace, rows(numbers))


def gone(*numbers: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=tuple(map(key, numbers)), **({"medium": "GPU", "group_idx": 0} | fields)
    )


def bare(number: int, **fields: Any) -> BlockStored:
    plain = {"parent_block_hash": None, "token_ids": (), "session_id": None, "medium": "CPU"}
    return on_device([number], **(plain | fields))


@pytest.fixture
def stream() -> TierStream:
    return TierStream(LABELS, "CPU")


def test_a_tiers_event_says_what_the_devices_said(stream: TierStream) -> None:
    told = on_device([0, 1, 2])
    assert stream.join([told], []) == [told]
    assert stream.join([], [stored(0, 1, 2)]) == [on_device([0, 1, 2], medium="CPU")]


def test_part_of_a_run_has_its_own_parent_and_tokens(stream: TierStream) -> None:
    told = on_device([0, 1, 2, 3], extra_keys=(("salt",), None, ("i", 1), None))
    assert stream.join([told], [stored(1, 2), stored(0)]) == [
        told,
        on_device([1, 2], medium="CPU", extra_keys=(None, ("i", 1))),
        on_device([0], medium="CPU", extra_keys=(("salt",),)),
    ]
    assert stream.join([], [stored(3)]) == [on_device([3], medium="CPU")]


def test_runs_of_several_steps_become_one_event(stream: TierStream) -> None:
    told = [on_device([0, 1]), on_device([2], extra_keys=(("i", 0),)), on_device([3, 4])]
    assert stream.join(told, [stored(0, 1, 2, 3)])[3:] == [
        on_device([0, 1, 2, 3], medium="CPU", extra_keys=(None, None, ("i", 0), None))
    ]


def test_a_gap_another_session_or_a_key_alone_begins_a_new_event(stream: TierStream) -> None:
    told = [on_device([0, 1, 2]), on_device([3], session_id="t")]
    assert stream.join(told, [stored(0, 2, 3, 9)])[2:] == [
        on_device([0], medium="CPU"),
        on_device([2], medium="CPU"),
        on_device([3], medium="CPU", session_id="t"),
        bare(9),
    ]


def test_a_key_that_the_device_never_told_comes_alone_with_group_kind_and_size(
    stream: TierStream,
) -> None:
    labels = {"group_idx": 1, "block_size": 4, "kv_cache_spec_kind": "sliding_window"}
    labels |= {"kv_cache_spec_sliding_window": 5, "namespace": FOREIGN}
    told = stream.join([on_device([1])], [stored(1, 2, group=1, namespace=FOREIGN)])
    assert told[1:] == [bare(1, **labels), bare(2, **labels)]


def test_groups_and_namespaces_do_not_mix(stream: TierStream) -> None:
    foreign = on_device([1], namespace=FOREIGN, token_ids=())
    native = on_device([1], session_id="native")
    told = stream.join([foreign, native], [stored(1, namespace=FOREIGN), stored(1)])
    assert told[2:] == [
        on_device([1], namespace=FOREIGN, token_ids=(), medium="CPU"),
        on_device([1], session_id="native", medium="CPU"),
    ]
    assert stream.join([], [removed(1, namespace=FOREIGN)]) == [
        gone(1, medium="CPU", namespace=FOREIGN)
    ]


def test_what_the_device_evicted_meanwhile_is_still_described(stream: TierStream) -> None:
    told = stream.join([on_device([0]), gone(0)], [stored(0)])
    assert told == [on_device([0]), gone(0), on_device([0], medium="CPU")]


def test_a_key_stored_a_second_time_is_described_again(stream: TierStream) -> None:
    stream.join([on_device([0])], [stored(0), removed(0)])
    assert stream.join([], [stored(0)]) == [on_device([0], medium="CPU")]


def test_what_the_device_told_last_is_told_of_the_tier(stream: TierStream) -> None:
    stream.join([on_device([0]), gone(0), on_device([0], session_id="t")], [])
    stream.join([on_device([0], session_id=None, token_ids=())], [])  # which knows less
    assert stream.join([], [stored(0)]) == [on_device([0], session_id="t", medium="CPU")]


def test_what_is_remembered_is_bounded_those_told_first_go_first(
    stream: TierStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_REMEMBERED_BYTES", 1000)
    stream.join([on_device([0, 1, 2])], [])
    assert len(stream._told) == 2
    stream.join([on_device([1])], [])
    stream.join([on_device([3])], [])
    assert stream.join([], [stored(1, 2)]) == [on_device([1], medium="CPU"), bare(2)]


@pytest.mark.parametrize("device", [[], [AllBlocksCleared()]])
@pytest.mark.parametrize("tier", [[], [KeysLost()]])
def test_a_loss_on_either_side_is_told_first_and_once(
    stream: TierStream, device: list[Any], tier: list[Any]
) -> None:
    told = stream.join([*device, on_device([0])], [*tier, stored(0)])
    lost = [AllBlocksCleared()] if device or tier else []
    assert told == [*lost, on_device([0]), on_device([0], medium="CPU")]


def test_many_removals_are_cut_into_several_events(
    stream: TierStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_REMOVED_HASHES", 2)
    assert stream.join([], [removed(1, 2, 3)]) == [gone(1, 2, medium="CPU"), gone(3, medium="CPU")]


def test_a_tiers_events_go_over_the_wire_unchanged(stream: TierStream) -> None:
    told = stream.join([on_device([0, 1])], [stored(0, 1), stored(3, group=1), removed(0)])
    batch = EventBatch(ts=1.0, events=tuple(told))
    assert decode_batch(encode_batch(batch)) == batch
