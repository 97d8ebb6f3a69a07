"""The subscriber against a hand-driven publisher: gaps, replays, losses, restarts, nonsense."""

from __future__ import annotations

import time

import msgpack
import pytest
import zmq
from events.streams import DEADLINE, Stage, brief, deliveries, event, number, payload, subscribe

from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events.publisher import EventPublisher
from kvcache.core.events.replay import END_SEQ
from kvcache.core.events.subscriber import EventSubscriber, Restarted


def test_a_gap_is_filled_from_the_replay_and_given_in_order(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.keep(2, 3, 4, 5)
        stage.send(0, 1, 5, 6)
        got = deliveries(subscriber, 7)
        assert brief(got) == [
            0,
            1,
            (2, "replayed"),
            (3, "replayed"),
            (4, "replayed"),
            (5, "replayed"),
            6,
        ]
        assert stage.asked == [number(2)]
        stats = subscriber.stats()
        assert (stats.received, stats.replayed, stats.duplicates, stats.lost) == (3, 4, 1, 0)


def test_what_the_replay_lacks_is_lost_for_good(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.keep(3, 5)
        stage.send(0, 7)
        got = deliveries(subscriber, 7)
        assert brief(got) == [
            0,
            ("Lost", 1, 2),
            (3, "replayed"),
            ("Lost", 4, 4),
            (5, "replayed"),
            ("Lost", 6, 6),
            7,
        ]
        assert subscriber.stats().lost == 4


def test_without_a_replay_endpoint_a_gap_is_a_loss(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, replay_endpoint=None) as subscriber:
        stage.subscribed()
        stage.send(2, 4)
        got = deliveries(subscriber, 4)
        assert brief(got) == [("Lost", 0, 1), 2, ("Lost", 3, 3), 4]
        assert "no replay endpoint" in got[0].reason
        assert stage.asked == []


def test_a_replay_that_never_ends_is_given_up_and_the_stream_goes_on(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, replay_timeout_seconds=0.2) as subscriber:
        stage.subscribed()
        stage.keep(1, end=False)
        stage.send(0, 4, 5)
        got = deliveries(subscriber, 5)
        assert brief(got) == [0, (1, "replayed"), ("Lost", 2, 3), 4, 5]
        assert "within 0.2 s" in got[2].reason
        assert subscriber.stats().failed_replays == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        (b"x",),
        (b"", b"short", b""),
        (b"", number(0), payload(0)),  # not asked for
        (b"", number(2**63), b""),
        (b"", number(1), b"", b"", b""),
    ],
)
def test_nonsense_from_the_replay_endpoint_ends_the_replay(
    context: zmq.Context, at: str, stage: Stage, nonsense: tuple[bytes, ...]
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.answers = [nonsense] * 3
        stage.send(0, 2)
        assert brief(deliveries(subscriber, 3)) == [0, ("Lost", 1, 1), 2]


def test_older_replay_endpoints_without_topic_are_understood(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.answers = [(number(0), payload(0)), (END_SEQ, b"")]
        stage.send(1)
        assert brief(deliveries(subscriber, 2)) == [(0, "replayed"), 1]


def test_malformed_batch_is_a_loss_with_its_reason(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.live.send_multipart((b"", number(0), b"\xc1"))
        stage.live.send_multipart((b"only", b"two"))
        stage.live.send_multipart((b"", number(2**63), payload(0)))
        stage.send(1)
        got = deliveries(subscriber, 2)
        assert brief(got) == [("Lost", 0, 0), 1]
        assert "malformed" in got[0].reason
        assert subscriber.stats().malformed == 3


def test_a_publisher_that_starts_anew_is_noticed(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.send(0, 1, 2)
        stage.keep(0, 1)
        stage.send(1)
        got = deliveries(subscriber, 6)
        assert brief(got[:3]) == [0, 1, 2]
        assert got[3] == Restarted(2)
        assert brief(got[4:]) == [(0, "replayed"), (1, "replayed")]
        assert subscriber.stats().restarts == 1


def test_a_stream_may_be_joined_where_it_is(context: zmq.Context, at: str, stage: Stage) -> None:
    with subscribe(context, at, from_start=False) as subscriber:
        stage.subscribed()
        stage.send(5, 6)
        assert brief(deliveries(subscriber, 2)) == [5, 6]
        assert stage.asked == []


def test_unknown_events_are_counted(context: zmq.Context, at: str, stage: Stage) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.live.send_multipart((b"", number(0), msgpack.packb([0.0, [["Moved"]], None])))
        assert deliveries(subscriber, 1)[0].batch.events == ()
        assert subscriber.stats().unknown_events == 1
        assert subscriber.unknown_tags() == {"Moved": 1}


def test_receive_returns_none_when_its_time_is_over(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        assert subscriber.receive(0.0) is None
    with pytest.raises(MisuseError):
        subscriber.receive(0.0)
    subscriber.close()


def test_a_dead_replay_endpoint_does_not_keep_receive(context: zmq.Context, at: str) -> None:
    """A probe that fails takes longer than the time until the next one."""
    with subscribe(
        context,
        at,
        replay_endpoint=f"{at}/nobody",
        probe_seconds=0.01,
        replay_timeout_seconds=0.02,
    ) as subscriber:
        for probes in (1, 2, 3):
            assert subscriber.receive(0.05) is None
            assert subscriber.stats().failed_replays == probes


def test_a_caller_that_only_looks_still_probes(context: zmq.Context, at: str, stage: Stage) -> None:
    stage.keep(0)
    with subscribe(context, at, probe_seconds=0.01) as subscriber:
        end = time.monotonic() + DEADLINE
        while (got := subscriber.receive(0.0)) is None:
            assert time.monotonic() < end
        assert brief([got]) == [(0, "replayed")]


def test_before_the_first_batch_of_a_joined_stream_there_is_nothing_to_ask_for(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, from_start=False, probe_seconds=0.001) as subscriber:
        assert subscriber.receive(0.05) is None
        assert subscriber.stats().replays == 0


def test_nonsense_does_not_keep_receive_beyond_its_time(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        for _ in range(5):
            stage.live.send_multipart((b"only", b"two"))
        end = time.monotonic() + DEADLINE
        while (seen := subscriber.stats().malformed) < 5:
            assert time.monotonic() < end
            assert subscriber.receive(0.0) is None
            assert subscriber.stats().malformed - seen <= 1


@pytest.mark.parametrize("timeout", [float("nan"), "1", None, True])
def test_a_time_to_wait_is_a_number(context: zmq.Context, at: str, timeout: object) -> None:
    with subscribe(context, at) as subscriber, pytest.raises(ConfigError, match="timeout_seconds"):
        subscriber.receive(timeout)  # type: ignore[arg-type]


# ---- topics ----------------------------------------------------------------------------------------


def send(stage: Stage, topic: bytes, *seqs: int) -> None:
    for seq in seqs:
        stage.live.send_multipart((topic, number(seq), payload(seq)))


def test_replayed_batches_of_the_topic_are_ours_and_those_without_one_too(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, topic="kv@a") as subscriber:
        stage.subscribed()
        stage.answers = [
            (b"kv@a", number(1), payload(1)),
            (b"kv@a@model", number(2), payload(2)),
            (number(3), payload(3)),
            (b"", END_SEQ, b""),
        ]
        send(stage, b"kv@a", 0, 4)
        assert brief(deliveries(subscriber, 5)) == [
            0,
            (1, "replayed"),
            (2, "replayed"),
            (3, "replayed"),
            4,
        ]


@pytest.mark.parametrize("other", [b"kv@b", b"", b"kv@", b"\xff"])
def test_a_replay_under_another_topic_is_not_ours_and_our_own_batches_are_lost(
    context: zmq.Context, at: str, stage: Stage, other: bytes
) -> None:
    with subscribe(context, at, topic="kv@a") as subscriber:
        stage.subscribed()
        stage.answers = [
            (b"kv@a", number(1), payload(1)),
            *((other, number(n), payload(n)) for n in (2, 3, 4, 5, 6)),
            (b"", END_SEQ, b""),
        ]
        send(stage, b"kv@a", 0, 4)
        got = deliveries(subscriber, 4)
        assert brief(got) == [0, (1, "replayed"), ("Lost", 2, 3), 4]
        assert f"has topic {other.decode(errors='replace')!r}" in got[2].reason
        assert "does not begin with 'kv@a'" in got[2].reason
        stage.answers = []
        send(stage, b"kv@a", 5, 6)  # the numbers of the other stream are not counted as seen
        assert brief(deliveries(subscriber, 2)) == [5, 6]
        stats = subscriber.stats()
        assert (stats.received, stats.replayed, stats.lost) == (4, 1, 2)
        assert (stats.duplicates, stats.restarts, stats.failed_replays) == (0, 0, 1)


def test_a_probe_of_another_stream_delivers_nothing_and_loses_nothing(
    context: zmq.Context, at: str
) -> None:
    with (
        EventPublisher(
            f"{at}/live", replay_endpoint=f"{at}/replay", topic="kv@b", context=context
        ) as publisher,
        subscribe(context, at, topic="kv@a", probe_seconds=0.001) as subscriber,
    ):
        for n in range(5):
            publisher.publish([event(n)])
        assert publisher.flush(DEADLINE)
        end = time.monotonic() + DEADLINE
        while not subscriber.stats().failed_replays:
            assert time.monotonic() < end
            assert subscriber.receive(0.01) is None
        stats = subscriber.stats()
        assert (stats.received, stats.replayed, stats.lost) == (0, 0, 0)


# ---- settings that cannot work -----------------------------------------------------------------------


def test_a_probe_needs_somebody_to_ask(context: zmq.Context, at: str) -> None:
    message = r"EventSubscriber\.probe_seconds is 1 without a replay_endpoint"
    with pytest.raises(ConfigError, match=message):
        EventSubscriber(f"{at}/live", probe_seconds=1, context=context)


SYNTAX = "give tcp://HOST:PORT, ipc://PATH or inproc://NAME"
NO_ENDPOINTS = {
    "": SYNTAX,
    "nonsense": SYNTAX,
    "5557": SYNTAX,
    "udp://x:1": SYNTAX,
    "ipc://": SYNTAX,
    "tcp://host": "has no port: give tcp://HOST:PORT",
    "tcp://host:port": "has no port: give tcp://HOST:PORT",
    "tcp://host:65536": "is above 65535",
}


@pytest.mark.parametrize("endpoint", NO_ENDPOINTS)
def test_what_is_no_endpoint_is_said_as_by_the_publisher(
    context: zmq.Context, at: str, endpoint: str
) -> None:
    message = NO_ENDPOINTS[endpoint]
    with pytest.raises(ConfigError, match=message):
        EventPublisher(endpoint, context=context)
    for bind in (False, True):
        with pytest.raises(ConfigError, match=f"cannot subscribe to events at .*{message}"):
            EventSubscriber(endpoint, bind=bind, context=context)
    with pytest.raises(ConfigError, match=rf"EventSubscriber\.replay_endpoint is .*{message}"):
        EventSubscriber(f"{at}/live", replay_endpoint=endpoint, context=context)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:*", "tcp://*:*"])
def test_a_star_is_for_who_binds(context: zmq.Context, at: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be connected to, a \* .*bind=True"):
        EventSubscriber(endpoint, context=context)
    with pytest.raises(ConfigError, match=r"a \* is for who binds it: give the publisher's host$"):
        EventSubscriber(f"{at}/live", replay_endpoint=endpoint, context=context)
    with pytest.raises(ConfigError, match="give the subscriber's host, or bind=True"):
        EventPublisher(endpoint, bind=False, context=context)


def test_a_port_may_be_chosen_by_the_system(context: zmq.Context) -> None:
    with EventSubscriber("tcp://*:*", bind=True, context=context) as subscriber:
        assert not subscriber._socket.place.endswith((":*", ":0"))
    with EventPublisher("tcp://127.0.0.1:*", context=context) as publisher:
        assert not publisher.endpoint.endswith((":*", ":0"))
