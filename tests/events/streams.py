"""A place for sockets, a hand-driven publisher, and short forms of what a subscriber gives."""

from __future__ import annotations

import threading
from typing import Any

import zmq

from kvcache.core.events import BlockRemoved, EventBatch, encode_batch
from kvcache.core.events.replay import END_SEQ
from kvcache.core.events.subscriber import EventSubscriber, Received

DEADLINE = 30.0


def event(n: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=(n,), medium="GPU", group_idx=0)


def number(n: int) -> bytes:
    return n.to_bytes(8, "big")


def payload(n: int) -> bytes:
    return encode_batch(EventBatch(ts=float(n), events=(event(n),)))


def deliveries(subscriber: EventSubscriber, n: int) -> list[Any]:
    got = [subscriber.receive(DEADLINE) for _ in range(n)]
    assert None not in got
    return got


def brief(found: list[Any]) -> list[Any]:
    """Deliveries as numbers: seq, (seq, replayed), ("lost", first, last)."""
    return [
        ((d.seq, "replayed") if d.replayed else d.seq)
        if isinstance(d, Received)
        else (type(d).__name__, *d[:2])
        for d in found
    ]


class Stage:
    """A hand-driven publisher: a test decides what goes over the live socket, and what is kept."""

    def __init__(self, context: zmq.Context, at: str) -> None:
        self.live = context.socket(zmq.XPUB)
        self.live.bind(f"{at}/live")
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(f"{at}/replay")
        self.answers: list[tuple[bytes, ...]] = []
        self.asked: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def subscribed(self) -> None:
        assert self.live.poll(int(DEADLINE * 1000))
        self.live.recv()

    def send(self, *seqs: int) -> None:
        for seq in seqs:
            self.live.send_multipart((b"", number(seq), payload(seq)))

    def keep(self, *seqs: int, end: bool = True) -> None:
        self.answers = [(b"", number(seq), payload(seq)) for seq in seqs]
        if end:
            self.answers.append((b"", END_SEQ, b""))

    def _answer(self) -> None:
        while not self._stop.is_set():
            if self.router.poll(20):
                client, empty, start = self.router.recv_multipart()
                self.asked.append(start)
                for frames in self.answers:
                    self.router.send_multipart((client, empty, *frames))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self.router.close(linger=0)
        self.live.close(linger=0)


def subscribe(context: zmq.Context, at: str, **settings: Any) -> EventSubscriber:
    settings = {"replay_endpoint": f"{at}/replay", **settings}
    return EventSubscriber(f"{at}/live", context=context, **settings)
