"""Asks a replay endpoint for what was missed: a fresh socket for each question, one deadline for each answer."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

from kvcache.core.events.pyzmq import zmq
from kvcache.core.events.replay import END_SEQ
from kvcache.core.events.sockets import MAX_ANSWERS, bound_incoming, receive
from kvcache.core.values import shown

MAX_SEQ = 2**63 - 1


class ReplayAnswer(NamedTuple):
    """One batch, or the reason why no more come."""

    seq: int
    payload: bytes
    failure: str = ""


def sequence_number(frame: bytes) -> int | None:
    """The number in a frame of 8 bytes, big endian; None if it is none (or the end mark)."""
    seq = int.from_bytes(frame, "big") if len(frame) == 8 else MAX_SEQ + 1
    return seq if seq <= MAX_SEQ else None


def ask_replay(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    start: int,
    timeout_seconds: float,
    *,
    topic: bytes,
    max_payload_bytes: int,
) -> Generator[ReplayAnswer]:
    """Batches from number `start` on, ascending, as they come; ends with the endpoint's end mark.

    Waits at most `timeout_seconds` for each answer; if nothing comes, or nonsense, the last answer
    carries a `failure`. So does one under a topic that does not begin with `topic`: its numbers are
    those of another stream. Answers of older publishers, which leave the topic out, are read too. A
    reader that pauses makes the endpoint pause.
    """
    least = start
    dealer = context.socket(zmq.DEALER)
    try:
        # A slow reader slows the endpoint down, not fills the memory.
        bound_incoming(dealer, frame_bytes=max_payload_bytes, messages=MAX_ANSWERS)
        dealer.connect(endpoint)
        patience = math.ceil(timeout_seconds * 1000)
        dealer.setsockopt(zmq.SNDTIMEO, patience)
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            if not dealer.poll(patience):
                yield ReplayAnswer(-1, b"", f"no end of the replay within {timeout_seconds} s")
                return
            frames = receive(dealer)
            if len(frames) in {3, 4} and frames[-2] == END_SEQ:
                return
            seq = sequence_number(frames[-2]) if len(frames) in {3, 4} else None
            if seq is None or seq < least:
                yield ReplayAnswer(-1, b"", "the replay endpoint answered nonsense")
                return
            if len(frames) == 4 and not frames[1].startswith(topic):
                other, own = (t.decode(errors="replace") for t in (frames[1], topic))
                yield ReplayAnswer(
                    -1,
                    b"",
                    f"the replay endpoint has topic {shown(other)}, which does not begin with"
                    f" {shown(own)}: it is another publisher's",
                )
                return
            least = seq + 1
            yield ReplayAnswer(seq, frames[-1])
    except zmq.ZMQError as error:
        yield ReplayAnswer(-1, b"", f"{endpoint}: {error}")
    finally:
        dealer.close(linger=0)
