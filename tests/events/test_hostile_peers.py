"""Peers that flood, never read, or send frames of any size: bounded work, bounded memory, the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from socket import AF_UNIX, socket as raw_socket
from typing import Any

import pytest
import zmq
from events.streams import DEADLINE, Stage, brief, deliveries, event, number, payload, subscribe
from zmq.utils.monitor import recv_monitor_message

from kvcache.core.events import live_socket
from kvcache.core.events.publisher import EventPublisher
from kvcache.core.events.replay import END_SEQ, ReplayBuffer
from kvcache.core.events.replay_server import FRAMES_A_TURN, MAX_JOBS, ReplayServer
from kvcache.core.events.sockets import (
    MAX_ANSWERS,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    MAX_TOPIC_BYTES,
    bound_incoming,
    receive,
)
from kvcache.core.events.subscriber import GONE, EventSubscriber, Lost, Received

Client = Callable[[int], zmq.Socket]

PLACE = "inproc://replay"


@pytest.fixture
def buffer() -> ReplayBuffer:
    made = ReplayBuffer(max_batches=1000, max_bytes=2**20)
    for seq in range(1000):
        made.append(seq, b"x")
    return made


@pytest.fixture
def server(context: zmq.Context, buffer: ReplayBuffer) -> Iterator[ReplayServer]:
    router = context.socket(zmq.ROUTER)
    ReplayServer.prepare(router)
    router.bind(PLACE)
    yield ReplayServer(router, buffer, b"topic", timeout_seconds=DEADLINE)
    router.close(linger=0)


@pytest.fixture
def client(context: zmq.Context) -> Iterator[Client]:
    """Clients that keep so many unread answers; closed in the end."""
    made: list[zmq.Socket] = []

    def connect(reads: int) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        made.append(socket)
        socket.setsockopt(zmq.SNDHWM, 2000)
        socket.setsockopt(zmq.RCVHWM, reads)
        socket.setsockopt(zmq.SNDTIMEO, int(DEADLINE * 1000))
        socket.connect(PLACE)
        return socket

    yield connect
    for socket in made:
        socket.close(linger=0)


def test_a_flood_of_bad_requests_is_read_a_bounded_part_a_turn(
    client: Client, server: ReplayServer
) -> None:
    flood = client(2000)
    for _ in range(1500):
        flood.send(b"bad")  # two frames with the client's name
    turns = 0
    while server.counts["bad_requests"] < 1500:  # each turn reads some
        before = server.counts["bad_requests"]
        server.serve()
        turns += 1
        assert 0 < server.counts["bad_requests"] - before <= FRAMES_A_TURN // 2
    assert turns == -(-1500 * 2 // FRAMES_A_TURN)
    assert not server.busy


def test_a_request_of_thousands_of_frames_is_one_bad_request_read_over_many_turns(
    client: Client, server: ReplayServer
) -> None:
    flood = client(2000)
    flood.send_multipart([b""] * 10_000)
    flood.send_multipart((b"", number(998)))
    turns = 0
    while not server.counts["bad_requests"]:
        assert turns < 100
        server.serve()
        turns += 1
        assert len(server._frames) <= 4
    assert turns == -(-10_001 // FRAMES_A_TURN)
    for _ in range(2):
        server.serve()
    assert (server.counts["bad_requests"], server.counts["replays"]) == (1, 1)
    answers = [receive(flood)[2] for _ in range(3)]
    assert answers == [number(998), number(999), END_SEQ]


def test_a_client_that_reads_nothing_makes_little_wait_for_it(
    client: Client, server: ReplayServer
) -> None:
    sleeper = client(1)
    sleeper.send_multipart((b"", number(0)))
    for _ in range(20):
        server.serve()
    assert server.counts["replayed_batches"] == MAX_ANSWERS + 1
    assert server.blocked
    assert server.busy


def test_no_more_clients_are_served_at_once_than_may_be(
    client: Client, server: ReplayServer
) -> None:
    sleepers = [client(1) for _ in range(MAX_JOBS + 5)]
    for sleeper in sleepers:
        sleeper.send_multipart((b"", number(0)))
    for _ in range(3):
        server.serve()
    assert server.full
    assert server.counts["replays"] == MAX_JOBS
    served = next(s for s in sleepers if s.poll(0))
    for _ in range(1001):  # one of them reads after all
        while served.poll(0):
            receive(served)
        server.serve()
        if not server.full:
            break
    server.serve()
    assert server.counts["replays"] == MAX_JOBS + 1


def test_live_batches_go_on_during_a_flood(context: zmq.Context, at: str) -> None:
    with (
        EventPublisher(f"{at}/live", replay_endpoint=f"{at}/replay", context=context) as publisher,
        subscribe(context, at, probe_seconds=0.0001) as subscriber,
    ):
        flood = context.socket(zmq.DEALER)
        flood.connect(f"{at}/replay")
        sent = 0
        for n in range(50):
            publisher.publish([event(n)])
            for _ in range(100):
                if flood.poll(0, zmq.POLLOUT):
                    flood.send(b"bad")
                    sent += 1
        assert [d.seq for d in deliveries(subscriber, 50)] == list(range(50))
        flood.close(linger=0)
        assert publisher.stats().bad_requests <= sent


def ended(monitor: zmq.Socket) -> None:
    """Waits until the monitored socket has lost a connection that it had."""
    while True:
        assert monitor.poll(int(DEADLINE * 1000))
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            return


@pytest.mark.parametrize("where", ["live", "replay"])
def test_a_frame_beyond_the_limit_ends_its_connection_and_no_other(
    context: zmq.Context, at: str, where: str
) -> None:
    with (
        EventPublisher(f"{at}/live", replay_endpoint=f"{at}/replay", context=context) as publisher,
        subscribe(context, at, probe_seconds=0.0001) as subscriber,
    ):
        hostile = context.socket(zmq.XSUB if where == "live" else zmq.DEALER)
        monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hostile.connect(f"{at}/{where}")
        hostile.send(b"\1" + b"x" * MAX_REQUEST_BYTES)
        ended(monitor)
        hostile.disable_monitor()
        monitor.close(linger=0)
        hostile.close(linger=0)
        publisher.publish([event(0)])
        assert [d.seq for d in deliveries(subscriber, 1)] == [0]
        assert publisher.stats().bad_requests == 0


def test_the_longest_name_and_topic_are_within_the_limit(context: zmq.Context, at: str) -> None:
    with (
        EventPublisher(
            f"{at}/live",
            replay_endpoint=f"{at}/replay",
            topic="t" * MAX_TOPIC_BYTES,
            context=context,
        ) as publisher,
        subscribe(context, at, topic="t" * MAX_TOPIC_BYTES, from_start=False) as subscriber,
    ):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"i" * 255)
        dealer.connect(f"{at}/replay")
        dealer.send_multipart((b"", number(0)))
        assert dealer.poll(int(DEADLINE * 1000))
        assert receive(dealer)[2] == END_SEQ
        dealer.close(linger=0)
        for _ in range(int(DEADLINE / 0.05)):
            publisher.publish([event(0)])
            if (got := subscriber.receive(0.05)) is not None:
                break
        assert isinstance(got, Received)


def test_a_batch_beyond_the_limit_is_a_loss_and_the_stream_goes_on(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, max_payload_bytes=2000) as subscriber:
        stage.subscribed()
        stage.keep()
        stage.send(0)
        assert brief(deliveries(subscriber, 1)) == [0]
        stage.live.send_multipart((b"", number(1), bytes(2001)))
        for n in range(2, int(DEADLINE / 0.02)):  # until the connection is made anew
            stage.send(n)
            if (got := subscriber.receive(0.02)) is not None:
                break
        assert isinstance(got, Lost)
        assert (got.first, got.reason) == (1, GONE)
        (after,) = deliveries(subscriber, 1)
        assert isinstance(after, Received)
        assert after.seq == got.last + 1


def test_a_replayed_batch_beyond_the_limit_ends_the_replay(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at, max_payload_bytes=2000, replay_timeout_seconds=0.3) as subscriber:
        stage.subscribed()
        stage.answers = [(b"", number(0), payload(0)), (b"", number(1), bytes(2001))]
        stage.send(2)
        assert brief(deliveries(subscriber, 3)) == [(0, "replayed"), ("Lost", 1, 1), 2]


def test_a_message_of_many_frames_is_malformed_and_not_kept(
    context: zmq.Context, at: str, stage: Stage
) -> None:
    with subscribe(context, at) as subscriber:
        stage.subscribed()
        stage.live.send_multipart([b""] * 5000)
        stage.send(0)
        assert brief(deliveries(subscriber, 1)) == [0]
        assert subscriber.stats().malformed == 1


def test_bounds_are_set_on_every_socket_that_reads(context: zmq.Context, at: str) -> None:
    with (
        EventPublisher(
            f"{at}/live", replay_endpoint=f"{at}/replay", hwm=77, context=context
        ) as publisher,
        subscribe(context, at, max_payload_bytes=5000, hwm=33) as subscriber,
    ):
        router = publisher._sockets.router
        assert router is not None
        for socket, frame, waiting, sent in (
            (router, MAX_REQUEST_BYTES, MAX_REQUESTS, MAX_ANSWERS),
            (publisher._sockets.pub, MAX_REQUEST_BYTES, MAX_REQUESTS, 77),
            (subscriber._socket._socket, 5000, 33, None),
        ):
            assert socket.getsockopt(zmq.MAXMSGSIZE) == frame
            assert socket.getsockopt(zmq.RCVHWM) == waiting
            assert sent in {None, socket.getsockopt(zmq.SNDHWM)}


def test_a_publisher_that_comes_back_is_connected_to_once(context: zmq.Context, at: str) -> None:
    """libzmq does it by itself; that must not be undone."""
    with EventSubscriber(f"{at}/live", from_start=False, context=context) as subscriber:
        for life in range(3):
            with EventPublisher(f"{at}/live", context=context) as publisher:
                told: list[int] = []
                for n in range(int(DEADLINE / 0.05)):
                    publisher.publish([event(1000 * life + n)])
                    got: Any = subscriber.receive(0.05)
                    if isinstance(got, Received):
                        told += got.batch.events[0].block_hashes
                    if len([key for key in told if key >= 1000 * life]) == 5:
                        break
                assert len([key for key in told if key >= 1000 * life]) == 5
                assert told == sorted(set(told))


def test_connections_that_come_and_go_unread_hold_up_no_socket(
    context: zmq.Context, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ZeroMQ tells of connections must never fill: its only thread would wait for a reader."""

    def hasty(subscriber: zmq.Socket, **limits: int) -> None:
        bound_incoming(subscriber, **limits)
        subscriber.setsockopt(zmq.RECONNECT_IVL, 1)

    monkeypatch.setattr(live_socket, "bound_incoming", hasty)
    with raw_socket(AF_UNIX) as listener:
        listener.bind(f"{at}/live".removeprefix("ipc://"))
        listener.listen()
        listener.settimeout(DEADLINE)
        with EventSubscriber(f"{at}/live", context=context):
            for _ in range(1200):  # two events each; 2,000 may wait by default
                listener.accept()[0].close()
            with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
                pull.bind(f"{at}/other")
                push.connect(f"{at}/other")
                push.send(b"x")
                assert pull.poll(int(DEADLINE * 1000))
