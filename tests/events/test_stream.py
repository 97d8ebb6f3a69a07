"""Publisher and subscriber together, over real sockets."""

from __future__ import annotations

import zmq
from events.streams import DEADLINE, brief, deliveries, event, subscribe

from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    EventBatch,
)
from kvcache.core.events.publisher import EventPublisher
from kvcache.core.events.subscriber import Received


def test_what_is_published_arrives_in_order_with_rank_and_time(
    context: zmq.Context, at: str
) -> None:
    with (
        EventPublisher(
            f"{at}/live",
            replay_endpoint=f"{at}/replay",
            topic="kv@pod",
            context=context,
        ) as publisher,
        subscribe(context, at, topic="kv", probe_seconds=0.05) as subscriber,
    ):
        for n in range(50):
            assert publisher.publish([event(n), AllBlocksCleared()], ts=float(n))
        got = deliveries(subscriber, 50)
        assert [d.seq for d in got] == list(range(50))
        assert [d.batch for d in got] == [
            EventBatch(ts=float(n), events=(event(n), AllBlocksCleared()), data_parallel_rank=0)
            for n in range(50)
        ]
        stats = publisher.stats()
        assert (stats.batches, stats.dropped, stats.buffered_batches) == (50, 0, 50)


def test_joined_late_everything_kept_is_replayed_and_the_rest_lost(
    context: zmq.Context, at: str
) -> None:
    with EventPublisher(
        f"{at}/live", replay_endpoint=f"{at}/replay", buffer_batches=4, context=context
    ) as publisher:
        for n in range(10):
            publisher.publish([event(n)])
        assert publisher.flush(DEADLINE)
        with subscribe(context, at, probe_seconds=0.0001) as subscriber:
            got = deliveries(subscriber, 5)
        assert brief(got) == [("Lost", 0, 5), *((n, "replayed") for n in range(6, 10))]
    assert publisher.stats().replayed_batches == 4  # counted once sent: read after the thread's end


def test_a_large_replay_is_complete_for_several_readers_while_live_goes_on(
    context: zmq.Context, at: str
) -> None:
    n = 3000
    with EventPublisher(
        f"{at}/live", replay_endpoint=f"{at}/replay", context=context, max_queue_batches=2 * n
    ) as publisher:
        for i in range(n):
            publisher.publish([event(i)])
        assert publisher.flush(DEADLINE)
        readers = [subscribe(context, at, probe_seconds=0.0001) for _ in range(3)]
        firsts = [r.receive(DEADLINE) for r in readers]  # each has begun its replay
        assert all(isinstance(d, Received) and d.seq == 0 for d in firsts)
        for i in range(n, n + 20):
            publisher.publish([event(i)])
        for reader in readers:
            got = deliveries(reader, n + 19)
            assert [d.batch.events[0].block_hashes[0] for d in got] == list(range(1, n + 20))
            reader.close()


def test_large_batches_are_cut_and_numbered_one_by_one(context: zmq.Context, at: str) -> None:
    events = [BlockRemoved(block_hashes=(bytes([i]) * 32,) * 50) for i in range(10)]
    with (
        EventPublisher(
            f"{at}/live",
            replay_endpoint=f"{at}/replay",
            max_batch_bytes=4000,
            context=context,
        ) as publisher,
        subscribe(context, at, probe_seconds=0.0001) as subscriber,
    ):
        publisher.publish(events)
        got = deliveries(subscriber, 5)
        assert [e for d in got for e in d.batch.events] == events
        assert publisher.stats().batches == 5
