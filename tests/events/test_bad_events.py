"""What is no event, no number, no list: named at once; what an event holds costs its batch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from events.streams import DEADLINE, brief, deliveries, event, subscribe

from kvcache.core.errors import ConfigError, InputError
from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ReferenceIndex,
    WireError,
    decode_batch,
    encode_batch,
    encode_batches,
    encode_event,
    with_int_hashes,
    without_salts,
)
from kvcache.core.events.publisher import EventPublisher


def stored(**fields: Any) -> BlockStored:
    base = {"block_hashes": (1,), "parent_block_hash": None, "token_ids": (5, 6), "block_size": 2}
    return BlockStored(**{**base, **fields})


NO_EVENTS: dict[str, Any] = {
    "a key beyond 64 bits": BlockRemoved(block_hashes=(2**70,)),
    "no keys": BlockRemoved(block_hashes=None),  # type: ignore[arg-type]
    "a set of keys": BlockRemoved(block_hashes={1}),  # type: ignore[arg-type]
    "a key of a list": BlockRemoved(block_hashes=([1, 2],)),  # type: ignore[arg-type]
    "a key that is a truth": BlockRemoved(block_hashes=(True,)),
    "stored without keys": stored(block_hashes=None),
    "a number as keys": stored(block_hashes=5),
    "an array of digests": stored(block_hashes=np.zeros((1, 32), np.uint8)),
    "a list as parent": stored(parent_block_hash=[1]),
    "no block size": stored(block_size=None),
    "a block size of text": stored(block_size="x"),
    "a block size below 0": stored(block_size=-1),
    "a block size beyond 64 bits": stored(block_size=2**70),
    "no tokens": stored(token_ids=None),
    "tokens of text": stored(token_ids="ab"),  # noqa: S106 (a list of tokens, not a secret)
    "tokens of fractions": stored(token_ids=np.array([0.5, 1.5])),
    "tokens in two dimensions": stored(token_ids=np.zeros((1, 2), np.int32)),
    "a name without UTF-8": stored(lora_name="\ud800"),
}


@pytest.mark.parametrize("settings", [{}, {"int_hashes": True}, {"publish_salts": False}])
@pytest.mark.parametrize("case", NO_EVENTS)
def test_event_that_cannot_be_encoded_costs_its_batch_alone(
    context: zmq.Context, at: str, case: str, settings: dict[str, bool]
) -> None:
    with EventPublisher(
        f"{at}/live", replay_endpoint=f"{at}/replay", context=context, **settings
    ) as publisher:
        for batch in ([event(0)], [event(1), NO_EVENTS[case]], [event(2)]):
            assert publisher.publish(batch)
        assert publisher.flush(DEADLINE)
        stats = publisher.stats()
        assert (stats.batches, stats.dropped) == (2, 1)
        with subscribe(context, at, probe_seconds=0.0001) as subscriber:
            got = brief(deliveries(subscriber, 3))
        assert got == [(0, "replayed"), ("Lost", 1, 1), (2, "replayed")]


class Hostile:
    """Raises whatever is done with it."""

    def __getattribute__(self, name: str) -> object:
        raise LookupError(name)

    def __iter__(self) -> Iterator[object]:
        raise LookupError

    def __repr__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("settings", [{}, {"int_hashes": True}, {"publish_salts": False}])
@pytest.mark.parametrize("field", ["block_hashes", "token_ids", "block_size", "extra_keys"])
def test_an_object_that_raises_costs_its_batch_alone(
    context: zmq.Context, at: str, field: str, settings: dict[str, bool]
) -> None:
    with EventPublisher(f"{at}/live", context=context, **settings) as publisher:
        publisher.publish([stored(**{field: Hostile()})])
        publisher.publish([event(1)])
        assert publisher.flush(DEADLINE)
        assert (publisher.stats().batches, publisher.stats().dropped) == (1, 1)


@pytest.mark.parametrize("ts", ["x", [], True, 10**400, float("nan"), float("inf"), b"1", {}])
def test_a_time_that_is_no_finite_number_is_refused_at_once(
    context: zmq.Context, at: str, ts: Any
) -> None:
    with EventPublisher(f"{at}/live", context=context) as publisher:
        for events in ([event(0)], []):
            with pytest.raises(ConfigError, match=r"ts is .*: it must be a"):
                publisher.publish(events, ts=ts)
        assert publisher.publish([event(0)])
        assert publisher.flush(DEADLINE)
        assert (publisher.stats().batches, publisher.stats().dropped) == (1, 0)


@pytest.mark.parametrize("events", [None, 5, event(0)])
def test_what_is_no_list_of_events_is_refused_at_once(
    context: zmq.Context, at: str, events: Any
) -> None:
    with (
        EventPublisher(f"{at}/live", context=context) as publisher,
        pytest.raises(ConfigError, match=r"events is .*: give a list"),
    ):
        publisher.publish(events)


@pytest.mark.parametrize("bad", ["AllBlocksCleared", None, 5, AllBlocksCleared, [event(7)]])
def test_what_is_no_event_is_refused_at_once(context: zmq.Context, at: str, bad: Any) -> None:
    with (
        EventPublisher(f"{at}/live", context=context) as publisher,
        pytest.raises(InputError, match=r"is no KV event"),
    ):
        publisher.publish([event(0), bad])
    assert publisher.stats().batches == 0


ONE_EVENT = {
    "without_salts": without_salts,
    "with_int_hashes": with_int_hashes,
    "encode_event": encode_event,
    "encode_batch": lambda bad: encode_batch(EventBatch(ts=0, events=(bad,))),
    "encode_batches": lambda bad: list(encode_batches(EventBatch(ts=0, events=(bad,)), 1000)),
    "apply": lambda bad: ReferenceIndex().apply([bad]),
}


@pytest.mark.parametrize("bad", ["x", None, 5, BlockStored, (event(0),), [event(0), event(1)]])
@pytest.mark.parametrize("function", ONE_EVENT)
def test_every_function_of_events_refuses_what_is_none(function: str, bad: Any) -> None:
    """A list given to a function of one event came back as it was, salts and all."""
    with pytest.raises(InputError, match="is no KV event") as refused:
        ONE_EVENT[function](bad)
    assert ("call this for each event" in str(refused.value)) == isinstance(bad, tuple | list)


def test_a_list_of_events_loses_its_salts_one_by_one() -> None:
    events = [stored(extra_keys=(("secret", ("image", 0)),)), BlockRemoved(block_hashes=(1,))]
    assert [without_salts(e) for e in events] == [
        stored(extra_keys=((("image", 0),),)),
        BlockRemoved(block_hashes=(1,)),
    ]


@pytest.mark.parametrize("extra", [5, "secret", ("secret",), (5,), {"secret": 1}])
def test_salts_that_cannot_be_told_from_other_keys_are_refused(extra: Any) -> None:
    with pytest.raises(InputError, match=r"extra_keys is .*: it must be None, or a tuple"):
        without_salts(stored(extra_keys=extra))


@pytest.mark.parametrize("batch", [None, 5, event(0), EventBatch(ts=0.0, events=5)])  # type: ignore[arg-type]
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    for encode in (encode_batch, lambda b: list(encode_batches(b, 1000))):
        with pytest.raises(InputError, match=r"is no EventBatch|EventBatch.events is 5"):
            encode(batch)


@pytest.mark.parametrize("payload", [None, 5, "text", [1]])
def test_a_payload_that_is_no_bytes_is_refused(payload: Any) -> None:
    with pytest.raises(WireError, match="a payload is bytes"):
        decode_batch(payload)


@pytest.mark.parametrize("int_hashes", [False, True])
def test_numbers_of_numpy_arrive_as_numbers(
    context: zmq.Context, at: str, int_hashes: bool
) -> None:
    numpy = stored(
        block_hashes=(np.uint64(2**63), np.int64(7)),
        parent_block_hash=np.uint64(3),
        token_ids=np.arange(4, dtype=np.int32),
        block_size=np.int64(2),
        group_idx=np.int8(1),
    )
    plain = stored(
        block_hashes=(2**63, 7),
        parent_block_hash=3,
        token_ids=(0, 1, 2, 3),
        block_size=2,
        group_idx=1,
    )
    with EventPublisher(
        f"{at}/live", replay_endpoint=f"{at}/replay", context=context, int_hashes=int_hashes
    ) as publisher:
        for ts in (np.float32(1.5), np.int64(2), 3):
            publisher.publish(np.array([numpy], object), ts=ts)  # type: ignore[arg-type]
        assert publisher.flush(DEADLINE)
        with subscribe(context, at, probe_seconds=0.0001) as subscriber:
            got = [delivery.batch for delivery in deliveries(subscriber, 3)]
    assert [batch.ts for batch in got] == [1.5, 2.0, 3.0]
    assert [batch.events for batch in got] == [(plain,)] * 3
