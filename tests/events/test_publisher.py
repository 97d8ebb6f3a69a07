"""The publisher: full queues, failures, slow and rude clients, its end, and the very frames."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import zmq
from events.streams import DEADLINE, brief, deliveries, event, number, subscribe

from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
)
from kvcache.core.events.publisher import EventPublisher, EventStreamError
from kvcache.core.events.replay import END_SEQ
from kvcache.core.events.subscriber import EventSubscriber, Lost, Received


def test_full_queue_drops_shows_a_gap_and_never_blocks(context: zmq.Context, at: str) -> None:
    publisher = EventPublisher(
        f"{at}/live", replay_endpoint=f"{at}/replay", max_queue_batches=2, context=context
    )
    entered, go_on = threading.Event(), threading.Event()
    send = publisher._send

    def held(batch: EventBatch) -> None:
        entered.set()
        assert go_on.wait(DEADLINE)
        send(batch)

    publisher._send = held  # type: ignore[method-assign]
    with publisher:
        assert publisher.publish([event(0)])
        assert entered.wait(DEADLINE)
        assert [publisher.publish([event(n)]) for n in (1, 2, 3, 4)] == [True, True, False, False]
        assert not publisher.flush(0.0)
        go_on.set()
        assert publisher.flush(DEADLINE)
        publisher.gap()
        assert publisher.publish([event(6)])
        assert publisher.flush(DEADLINE)
        assert publisher.stats().dropped == 3
        with subscribe(context, at, probe_seconds=0.0001) as subscriber:
            got = deliveries(subscriber, 5)
        assert brief(got) == [
            (0, "replayed"),
            (1, "replayed"),
            (2, "replayed"),
            ("Lost", 3, 5),
            (6, "replayed"),
        ]


def test_thread_that_ended_is_told_by_the_next_publish(context: zmq.Context, at: str) -> None:
    publisher = EventPublisher(f"{at}/live", context=context)

    def broken(batch: EventBatch) -> None:
        raise OSError("the wire is cut")

    publisher._send = broken  # type: ignore[method-assign]
    publisher.publish([event(0)])
    publisher.flush(DEADLINE)
    publisher._thread.join(DEADLINE)
    with pytest.raises(EventStreamError, match="the wire is cut"):
        publisher.publish([event(1)])
    with pytest.raises(EventStreamError):
        publisher.gap()
    publisher.close()


def test_a_close_that_runs_out_of_time_says_so(
    context: zmq.Context, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = EventPublisher(f"{at}/live", context=context)
    entered, go_on = threading.Event(), threading.Event()

    def held(batch: EventBatch) -> None:
        entered.set()
        assert go_on.wait(DEADLINE)

    publisher._send = held  # type: ignore[method-assign]
    publisher.publish([event(0)])
    assert entered.wait(DEADLINE)
    assert not publisher.close(0.0)
    assert "its sockets stay open" in caplog.text
    go_on.set()
    assert publisher.close(DEADLINE)


def test_a_batch_that_arrives_has_been_counted_and_can_be_replayed(
    context: zmq.Context, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventPublisher(f"{at}/live", replay_endpoint=f"{at}/replay", context=context) as publisher:
        pub, seen = publisher._sockets.pub, []

        class Watched:
            def send_multipart(self, frames: tuple[bytes, ...]) -> None:
                stats = publisher.stats()
                seen.append((stats.batches, stats.buffered_batches))
                pub.send_multipart(frames)

        monkeypatch.setattr(publisher._sockets, "pub", Watched())
        for n in range(3):
            assert publisher.publish([event(n)])
        assert publisher.flush(DEADLINE)
        monkeypatch.undo()
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_a_connection_that_ends_early_waits_for_nobody(context: zmq.Context, at: str) -> None:
    """ZeroMQ's default is to wait for ever, and `close` comes too late for what ended before."""
    with (
        EventPublisher(f"{at}/live", replay_endpoint=f"{at}/replay", context=context) as publisher,
        subscribe(context, at) as subscriber,
    ):
        sockets = (
            publisher._sockets.pub,
            publisher._sockets.router,
            subscriber._socket._socket,
            subscriber._socket._monitor,
        )
        assert [socket.getsockopt(zmq.LINGER) for socket in sockets] == [0] * 4  # type: ignore[union-attr]


def test_bad_replay_requests_are_counted_and_ignored(context: zmq.Context, at: str) -> None:
    with EventPublisher(f"{at}/live", replay_endpoint=f"{at}/replay", context=context) as publisher:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"{at}/replay")
        for frames in ((b"",), (b"", b"short"), (b"x", number(0)), (b"", number(0), b"more")):
            dealer.send_multipart(frames)
        dealer.send_multipart((b"", number(0)))
        assert dealer.poll(int(DEADLINE * 1000))
        assert dealer.recv_multipart() == [b"", b"", END_SEQ, b""]
        dealer.close(linger=0)
        stats = publisher.stats()
        assert (stats.bad_requests, stats.replays) == (4, 1)


def test_client_that_stops_reading_holds_up_nobody_and_is_dropped(
    context: zmq.Context, at: str
) -> None:
    with EventPublisher(
        f"{at}/live",
        replay_endpoint=f"{at}/replay",
        replay_timeout_seconds=3.0,
        max_queue_batches=4000,
        context=context,
    ) as publisher:
        for _ in range(4000):
            publisher.publish([BlockRemoved(block_hashes=(bytes(32),) * 20)])
        assert publisher.flush(DEADLINE)
        sleeper = context.socket(zmq.DEALER)
        sleeper.set_hwm(1)
        sleeper.connect(f"{at}/replay")
        sleeper.send_multipart((b"", number(0)))
        with subscribe(context, at, probe_seconds=0.0001) as subscriber:
            assert [d.seq for d in deliveries(subscriber, 4000)] == list(range(4000))
        never = threading.Event()
        for _ in range(600):
            if publisher.stats().failed_replays or never.wait(0.05):
                break
        assert publisher.stats().failed_replays == 1
        sleeper.close(linger=0)


def test_close_sends_what_is_queued_and_refuses_more(context: zmq.Context, at: str) -> None:
    publisher = EventPublisher(f"{at}/live", context=context)
    with EventSubscriber(f"{at}/live", from_start=False, context=context) as subscriber:
        while (first := subscriber.receive(0.02)) is None:
            publisher.publish([event(0)])
        assert isinstance(first, Received)
        for n in range(1000, 1100):
            publisher.publish([event(n)])
        assert publisher.close(DEADLINE)
        assert publisher.close()
        with pytest.raises(MisuseError):
            publisher.publish([event(0)])
        seen = 0
        while seen != 1099:
            (delivery,) = deliveries(subscriber, 1)
            assert isinstance(delivery, Received)
            seen = delivery.batch.events[0].block_hashes[0]


def test_publisher_connects_to_a_subscriber_that_binds(context: zmq.Context) -> None:
    with EventSubscriber("tcp://127.0.0.1:*", bind=True, context=context) as subscriber:
        address = subscriber._socket.place
        with EventPublisher(address, context=context) as publisher:
            got = None
            while got is None:
                publisher.publish([event(1)])
                got = subscriber.receive(0.05)
            assert isinstance(got, Received | Lost)


def test_an_address_is_bound_where_it_is_asked_for(context: zmq.Context) -> None:
    with EventPublisher("tcp://127.0.0.1:0", bind=True, context=context) as publisher:
        assert not publisher.endpoint.endswith(":0")
        with EventSubscriber(publisher.endpoint, from_start=False, context=context) as subscriber:
            while (got := subscriber.receive(0.05)) is None:
                publisher.publish([event(1)])
            assert isinstance(got, Received)


def test_a_name_is_connected_to_where_it_is_asked_for(context: zmq.Context, at: str) -> None:
    with (
        EventSubscriber(f"{at}/live", bind=True, from_start=False, context=context) as subscriber,
        EventPublisher(f"{at}/live", bind=False, context=context) as publisher,
    ):
        while (got := subscriber.receive(0.05)) is None:
            publisher.publish([event(1)])
        assert isinstance(got, Received)


def test_an_address_without_a_star_cannot_be_bound_twice_and_is_no_error_to_connect_to(
    context: zmq.Context,
) -> None:
    with EventPublisher("tcp://127.0.0.1:0", bind=True, context=context) as first:
        with pytest.raises(ConfigError, match="cannot be published at"):
            EventPublisher(first.endpoint, bind=True, context=context)
        with EventPublisher(first.endpoint, context=context) as second:  # vLLM's rule
            assert second.publish([event(0)])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hwm", 0),
        ("hwm", 1.5),
        ("hwm", 2**31),
        ("max_queue_batches", "x"),
        ("max_queue_batches", 0),
        ("buffer_batches", None),
        ("buffer_bytes", 0),
        ("max_batch_bytes", True),
        ("max_batch_bytes", 0),
        ("topic", 3),
        ("topic", "t" * 1001),
        ("topic", "\ud800"),
        ("data_parallel_rank", "0"),
        ("data_parallel_rank", -1),
        ("replay_timeout_seconds", 0),
        ("replay_timeout_seconds", float("nan")),
        ("replay_timeout_seconds", "1"),
        ("int_hashes", 1),
        ("publish_salts", None),
        ("bind", "yes"),
        ("replay_endpoint", 5558),
        ("context", "shared"),
    ],
)
def test_a_publisher_names_the_setting_that_it_refuses(
    context: zmq.Context, at: str, setting: str, value: object
) -> None:
    settings = {"context": context, setting: value}
    with pytest.raises(ConfigError, match=rf"EventPublisher\.{setting} (is|has) "):
        EventPublisher(f"{at}/live", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hwm", 0),  # to ZeroMQ: no limit
        ("hwm", True),
        ("max_payload_bytes", 0),
        ("max_payload_bytes", 2**31),
        ("max_payload_bytes", 1e6),
        ("probe_seconds", 0),
        ("probe_seconds", -1),
        ("probe_seconds", "5"),
        ("replay_timeout_seconds", 0),
        ("replay_timeout_seconds", float("inf")),
        ("topic", b"t"),
        ("topic", "t" * 1001),
        ("from_start", 0),
        ("bind", None),
        ("replay_endpoint", b"ipc://x"),
        ("context", 1),
    ],
)
def test_a_subscriber_names_the_setting_that_it_refuses(
    context: zmq.Context, at: str, setting: str, value: object
) -> None:
    settings = {"context": context, "replay_endpoint": f"{at}/replay", setting: value}
    with pytest.raises(ConfigError, match=rf"EventSubscriber\.{setting} (is|has) "):
        EventSubscriber(f"{at}/live", **settings)  # type: ignore[arg-type]


def test_endpoints_that_cannot_work_are_named(context: zmq.Context, at: str) -> None:
    for endpoint in (5557, None):
        with pytest.raises(ConfigError, match=r"EventPublisher\.endpoint is"):
            EventPublisher(endpoint, context=context)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"EventSubscriber\.endpoint is"):
            EventSubscriber(endpoint, context=context)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="above 65535"):
        EventPublisher("tcp://127.0.0.1:65535", data_parallel_rank=1, context=context)
    with pytest.raises(ConfigError, match="cannot be published"):
        EventPublisher("ipc:///no/such/folder/x", context=context)
    with pytest.raises(ConfigError, match="cannot be published"):
        EventPublisher("nonsense", context=context)
    with pytest.raises(ConfigError, match="cannot subscribe"):
        EventSubscriber("nonsense", context=context)
    same = {"endpoint": f"{at}/both", "replay_endpoint": f"{at}/both"}
    with pytest.raises(
        ConfigError,
        match=r"replays \(replay_endpoint\) cannot be served .* are the same: give each",
    ):
        EventPublisher(**same, context=context)  # type: ignore[arg-type]


def test_hashes_may_be_sent_as_vllms_64_bit_integers(context: zmq.Context, at: str) -> None:
    with (
        EventPublisher(
            f"{at}/live", replay_endpoint=f"{at}/replay", int_hashes=True, context=context
        ) as publisher,
        subscribe(context, at, probe_seconds=0.0001) as subscriber,
    ):
        publisher.publish([BlockRemoved(block_hashes=(bytes(31) + b"\x07",))])
        assert deliveries(subscriber, 1)[0].batch.events == (BlockRemoved(block_hashes=(7,)),)


def test_salts_are_left_out_where_it_is_asked_for(context: zmq.Context, at: str) -> None:
    stored = BlockStored(
        block_hashes=(b"a" * 32, b"b" * 32),
        parent_block_hash=None,
        token_ids=(1, 2),
        block_size=1,
        extra_keys=(("tenant",), None),
    )
    adapted = replace(
        stored,
        lora_name="tenant",  # the same text twice: the first is the adapter's
        extra_keys=(("tenant", ("image", 0), "tenant"), ("tenant",)),
    )
    with (
        EventPublisher(
            f"{at}/live", replay_endpoint=f"{at}/replay", publish_salts=False, context=context
        ) as publisher,
        subscribe(context, at, probe_seconds=0.0001) as subscriber,
    ):
        publisher.publish([stored, adapted, event(1)])
        (got,) = deliveries(subscriber, 1)
    assert got.batch.events == (
        replace(stored, extra_keys=None),
        replace(adapted, extra_keys=(("tenant", ("image", 0)), ("tenant",))),
        event(1),
    )


def test_wire_is_topic_number_and_payload(context: zmq.Context, at: str) -> None:
    listener = context.socket(zmq.SUB)
    listener.setsockopt(zmq.SUBSCRIBE, b"")
    with EventPublisher(
        f"{at}/live", topic="t", data_parallel_rank=2, context=context
    ) as publisher:
        assert publisher.endpoint == f"{at}/live_dp2"
        listener.connect(publisher.endpoint)
        while not listener.poll(50):
            publisher.publish([event(1)], ts=1.0)
        topic, seq, raw = listener.recv_multipart()
        assert (topic, len(seq)) == (b"t", 8)
        assert decode_batch(raw) == EventBatch(ts=1.0, events=(event(1),), data_parallel_rank=2)
    listener.close(linger=0)
