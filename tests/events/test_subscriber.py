"""The subscriber against a hand-driven publisher: gaps, replays, losses, restarts, nonsense."""

from __future__ import annotations

import time

import msgpack
import pytest
import zmq
from events.streams import DEADLINE, Stage, brief, deliveries, number, payload, subscribe

from kvcache.core.errors import ConfigError, MisuseError
from kvcache.core.events.replay import END_SEQ
from kvcache.core.events.subscriber import Restarted


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
