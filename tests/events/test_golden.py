"""Bytes of vLLM's own encoder, both ways, and its pool's keys from its events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from events import recorded

from kvcache.core.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
    with_int_hashes,
)

MAP_CASES = [name for name in recorded.index()["cases"] if name != "array_form"]


def test_recordings_are_of_the_version_that_we_follow() -> None:
    assert recorded.index()["vllm"] == "0.33.0"


@pytest.mark.parametrize("name", MAP_CASES)
def test_what_we_decode_we_encode_to_the_same_bytes(name: str) -> None:
    for payload in recorded.payloads(name):
        assert encode_batch(decode_batch(payload)) == payload


def test_our_records_are_encoded_as_vllm_encodes_its_own() -> None:
    events = recorded.every_field()
    batch = EventBatch(ts=1.5, events=events, data_parallel_rank=3)
    assert encode_batch(batch) == recorded.payloads("every_field")[0]
    plain = EventBatch(ts=2.0, events=events[-1:])
    assert encode_batch(plain) == recorded.payloads("every_field")[1]


def test_older_array_form_decodes_to_the_same_events() -> None:
    whole, five, six = map(decode_batch, recorded.payloads("array_form"))
    everything = recorded.every_field()
    assert whole == EventBatch(ts=1.5, events=everything, data_parallel_rank=3)
    oldest = BlockStored(
        block_hashes=everything[0].block_hashes,
        parent_block_hash=bytes(32),
        token_ids=everything[0].token_ids,
        block_size=3,
        lora_id=7,
    )
    assert five.events[:2] == (oldest, BlockRemoved(block_hashes=(1, 2)))
    assert six.events[0] == replace(oldest, medium="GPU")
    assert six.events[1] == BlockRemoved(block_hashes=(1, 2), medium="GPU")


def test_integer_hashes_are_vllms() -> None:
    whole = map(decode_batch, recorded.payloads("full_dense"))
    short = map(decode_batch, recorded.payloads("full_dense_ints"))
    for one, other in zip(whole, short, strict=True):
        assert tuple(map(with_int_hashes, one.events)) == other.events


@pytest.mark.parametrize("name", recorded.pools())
def test_replaying_vllms_events_gives_its_pools_keys(name: str) -> None:
    for held, pool in recorded.replayed(name, count_copies=True):
        assert held == pool


def test_vllms_pools_hold_one_key_in_several_blocks() -> None:
    """Why `count_copies` is there: without it, its sparse streams leave keys out."""
    wrong = [
        name
        for name in recorded.pools()
        if any(held != pool for held, pool in recorded.replayed(name, count_copies=False))
    ]
    assert wrong == ["window_sparse", "state_sparse"]


def test_recordings_contain_evictions_and_mangled_sparse_events() -> None:
    """vLLM's issue 44451: tokens of the whole range, hashes of the blocks that are kept."""
    for name in recorded.pools():
        events = [e for p in recorded.payloads(name) for e in decode_batch(p).events]
        stored = [e for e in events if isinstance(e, BlockStored)]
        mangled = [e for e in stored if len(e.token_ids) != len(e.block_hashes) * e.block_size]
        assert any(isinstance(e, BlockRemoved) for e in events)
        assert bool(mangled) == (not name.startswith(("full_dense", "window_dense")))
