"""Encoding and decoding: round trips, forms that are tolerated, bytes that are hostile."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from events import recorded
from hypothesis import given, strategies as st

from kvcache.core.errors import InputError
from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Decoder,
    Event,
    EventBatch,
    WireError,
    decode_batch,
    encode_batch,
    encode_batches,
    encode_event,
    with_int_hashes,
)
from kvcache.core.events.decode import MAX_TAGS, OTHER_TAGS
from kvcache.core.events.pieces import MAX_STORED_TOKENS

hashes = st.one_of(
    st.binary(min_size=32, max_size=32), st.integers(min_value=-(2**63), max_value=2**64 - 1)
)
tokens = st.integers(min_value=0, max_value=2**31 - 1)
text = st.none() | st.text(max_size=40)
number = st.none() | st.integers(min_value=-(2**31), max_value=2**31)
scalar = st.one_of(st.text(max_size=5), st.integers(0, 9), st.binary(max_size=5), st.none())
extra = st.none() | st.lists(scalar | st.tuples(scalar, scalar), max_size=3).map(tuple)


def tuples(of: st.SearchStrategy[Any], size: int = 5) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=size).map(tuple)


stored = st.builds(
    BlockStored,
    block_hashes=tuples(hashes, 40),
    parent_block_hash=st.none() | hashes,
    token_ids=tuples(tokens, 300),
    block_size=st.integers(0, 2**20),
    lora_id=number,
    medium=text,
    lora_name=text,
    extra_keys=st.none() | tuples(extra),
    group_idx=number,
    kv_cache_spec_kind=text,
    kv_cache_spec_sliding_window=number,
    locality=text,
    ownership=text,
    session_id=text,
    lookahead_token_ids=st.none() | tuples(tuples(tokens)),
    namespace=st.none() | st.binary(min_size=32, max_size=32),
)
removed = st.builds(
    BlockRemoved,
    block_hashes=tuples(hashes, 40),
    medium=text,
    group_idx=number,
    locality=text,
    ownership=text,
    namespace=st.none() | st.binary(min_size=32, max_size=32),
)
batches = st.builds(
    EventBatch,
    ts=st.floats(allow_nan=False),
    events=tuples(st.one_of(stored, removed, st.just(AllBlocksCleared()))),
    data_parallel_rank=number,
)


# ---- round trips ---------------------------------------------------------------------------------


@given(batches)
def test_every_batch_comes_back_as_it_was(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(batches)
def test_array_form_of_every_batch_decodes_to_the_same(batch: EventBatch) -> None:
    events = [[type(e).__name__, *(getattr(e, f.name) for f in fields(e))] for e in batch.events]
    payload = msgpack.packb([batch.ts, events, batch.data_parallel_rank])
    assert decode_batch(payload) == batch


@given(batches, st.integers(min_value=1, max_value=2000))
def test_cut_batches_carry_all_events_in_order(batch: EventBatch, limit: int) -> None:
    parts = [decode_batch(p) for p in encode_batches(batch, limit)]
    assert [e for part in parts for e in part.events] == list(batch.events)
    for part in parts:
        size = sum(len(encode_event(e)) for e in part.events)
        assert size <= limit or len(part.events) == 1
        assert (part.ts, part.data_parallel_rank) == (batch.ts, batch.data_parallel_rank)


def test_optional_fields_that_are_unset_are_not_on_the_wire() -> None:
    event = BlockStored(
        block_hashes=(b"k" * 32,), parent_block_hash=None, token_ids=(1,), block_size=1
    )
    written = msgpack.unpackb(encode_event(event))
    assert list(written) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]


@pytest.mark.parametrize(
    "event",
    [
        BlockRemoved(block_hashes=(2**64,)),
        BlockRemoved(block_hashes=(object(),)),
        BlockRemoved(block_hashes=(), medium="\ud800"),
        "AllBlocksCleared",
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(event: Any) -> None:
    with pytest.raises(InputError):
        encode_batch(EventBatch(ts=0.0, events=(event,)))


@pytest.mark.parametrize("ts", ["x", None, [], 10**400])
def test_a_time_that_is_no_number_is_refused(ts: Any) -> None:
    with pytest.raises(InputError, match="ts"):
        encode_batch(EventBatch(ts=ts, events=()))


def test_tokens_of_an_array_are_written_and_cut_like_a_tuple() -> None:
    block, tokens = 16, np.arange(2 * MAX_STORED_TOKENS, dtype=np.int32)
    payloads = []
    for ids in (tokens, tuple(tokens.tolist())):
        event = BlockStored(
            block_hashes=tuple(range(len(tokens) // block)),
            parent_block_hash=None,
            token_ids=ids,  # type: ignore[arg-type]
            block_size=block,
        )
        payloads.append(list(encode_batches(EventBatch(ts=0.0, events=(event,)), 2**20)))
    assert payloads[0] == payloads[1]
    assert len(payloads[0]) == 2


@pytest.mark.parametrize("key", [None, "text", [1, 2], np.zeros(32, np.uint8), 1.0])
def test_what_is_no_key_has_no_low_bits(key: Any) -> None:
    with pytest.raises(InputError):
        with_int_hashes(BlockRemoved(block_hashes=(key,)))
    with pytest.raises(InputError):
        with_int_hashes(key)


# ---- forms that are tolerated --------------------------------------------------------------------


def batch_of(*events: object) -> bytes:
    return msgpack.packb([1.0, events, None])


def test_unknown_fields_are_ignored() -> None:
    raw = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "colour": [[{"a": 1}]]}
    assert decode_batch(batch_of(raw)).events == (BlockRemoved(block_hashes=(7,), medium="GPU"),)
    newer = ["BlockRemoved", [7], "GPU", None, None, None, None, "more", "and more"]
    assert decode_batch(batch_of(newer)).events == (BlockRemoved(block_hashes=(7,), medium="GPU"),)


def test_batch_as_a_map_and_batch_without_rank_are_read() -> None:
    event = ["AllBlocksCleared"]
    want = EventBatch(ts=1.0, events=(AllBlocksCleared(),))
    assert decode_batch(msgpack.packb({"ts": 1, "events": [event]})) == want
    assert decode_batch(msgpack.packb([1, [event]])) == want


def test_unknown_tags_are_skipped_and_counted_in_bounded_space() -> None:
    decoder = Decoder()
    batch = decoder.decode(batch_of(["Moved", 1], {"type": "Moved"}, ["AllBlocksCleared"]))
    assert batch.events == (AllBlocksCleared(),)
    assert decoder.unknown_tags == {"Moved": 2}
    decoder.decode(batch_of(*([f"tag {i}" * 100] for i in range(3 * MAX_TAGS))))
    assert len(decoder.unknown_tags) == MAX_TAGS + 1
    assert sum(decoder.unknown_tags.values()) == 2 + 3 * MAX_TAGS
    assert decoder.unknown_tags[OTHER_TAGS] == 2 * MAX_TAGS + 1
    assert max(map(len, decoder.unknown_tags)) <= 64


# ---- hostile bytes -------------------------------------------------------------------------------


def good(event: Event) -> dict[str, Any]:
    return {"type": type(event).__name__} | {f.name: getattr(event, f.name) for f in fields(event)}


@given(st.binary(max_size=300))
def test_random_bytes_are_a_wire_error_or_a_batch(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except WireError:
        return
    assert isinstance(batch, EventBatch)


@given(st.data())
def test_changed_bytes_are_a_wire_error_or_a_batch(data: st.DataObject) -> None:
    payload = bytearray(recorded.payloads("every_field")[0])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode_batch(bytes(payload))
    except WireError:
        return
    assert isinstance(repr(batch), str)
    assert isinstance(hash(batch), int)


@pytest.mark.parametrize("cut", range(0, 900, 53))
def test_truncated_payload_is_a_wire_error(cut: int) -> None:
    with pytest.raises(WireError):
        decode_batch(recorded.payloads("every_field")[0][:cut])


def test_bytes_after_the_batch_are_a_wire_error() -> None:
    with pytest.raises(WireError, match="no msgpack"):
        decode_batch(recorded.payloads("every_field")[1] + b"\0")


def test_payload_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="max_payload_bytes"):
        Decoder(max_payload_bytes=10).decode(b"\xc1" * 11)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",  # four billion events
        b"\xdd\xff\xff\xff\xff" * 5000,  # each holds four billion
        b"\xdf\xff\xff\xff\xff" * 5000,
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,  # a hundred thousand deep
        b"\x81\xa1a" * 50_000,
        batch_of({"type": "BlockRemoved", "block_hashes": [], "medium": None})[:-1] + b"\xc1",
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb([1.0, [msgpack.ExtType(5, b"x")], None]),
        msgpack.packb({1: 2}),
        b"\x93\xcb" + bytes(8) + b"\x91\xa2\xff\xff" + b"\xc0",  # no UTF-8
    ],
)
def test_bombs_are_a_wire_error_before_they_cost_memory(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(payload)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_hashes", None),
        ("block_hashes", ["text"]),
        ("block_hashes", [True]),
        ("block_hashes", nested(400)),
        ("parent_block_hash", "text"),
        ("token_ids", [1.5]),
        ("token_ids", {"a": 1}),
        ("block_size", -1),
        ("block_size", True),
        ("lora_id", "x"),
        ("medium", 3),
        ("extra_keys", [3]),
        ("extra_keys", nested(400)),
        ("extra_keys", [[{"a": 1}]]),
        ("group_idx", 1.0),
        ("session_id", b"bytes"),
        ("lookahead_token_ids", [1]),
        ("lookahead_token_ids", [["x"]]),
        ("namespace", "text"),
    ],
)
def test_field_of_the_wrong_type_is_named(field: str, value: object) -> None:
    raw = good(recorded.every_field()[0]) | {field: value}
    with pytest.raises(WireError, match=f"BlockStored.{field} is"):
        decode_batch(batch_of(raw))


@pytest.mark.parametrize("event", [None, 5, "BlockStored", [], [5], {"kind": 1}, nested(300)])
def test_what_is_no_event_is_a_wire_error(event: object) -> None:
    with pytest.raises(WireError):
        decode_batch(batch_of(event))


@pytest.mark.parametrize(
    "top", [5, [], [1.0], ["x", []], [1.0, 5], [1.0, [], "rank"], [True, []], {"ts": 1.0}]
)
def test_what_is_no_batch_is_a_wire_error(top: object) -> None:
    with pytest.raises(WireError):
        decode_batch(msgpack.packb(top))
