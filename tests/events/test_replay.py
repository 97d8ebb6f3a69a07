"""What a publisher keeps for replays, its queue, and endpoints: the parts without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvcache.core.errors import ConfigError
from kvcache.core.events import EventBatch
from kvcache.core.events.endpoints import for_rank, is_bound
from kvcache.core.events.outbox import Outbox
from kvcache.core.events.replay import END_SEQ, ReplayBuffer, ReplayJob


def job(start: int, last: int) -> ReplayJob:
    return ReplayJob(b"c", start, last, now=0.0, timeout_seconds=2.0)


def numbers(job: ReplayJob, buffer: ReplayBuffer) -> list[int]:
    found = []
    while not (frames := job.peek(buffer)).end:
        found.append(int.from_bytes(frames.seq, "big"))
        job.advance(0.0)
    assert frames == (END_SEQ, b"", True)
    return found


def test_buffer_keeps_the_newest_within_both_bounds() -> None:
    by_count = ReplayBuffer(max_batches=3, max_bytes=1000)
    by_bytes = ReplayBuffer(max_batches=100, max_bytes=25)
    for seq in range(6):
        by_count.append(seq, b"x")
        by_bytes.append(seq, bytes(10))
    assert (by_count.first(), len(by_count), by_count.bytes) == (3, 3, 3)
    assert (by_bytes.first(), len(by_bytes), by_bytes.bytes) == (4, 2, 20)
    by_bytes.append(6, bytes(26))
    assert (len(by_bytes), by_bytes.bytes, by_bytes.last, by_bytes.first()) == (0, 0, 6, 7)


def test_replay_gives_what_is_kept_from_the_wanted_number_on() -> None:
    buffer = ReplayBuffer(max_batches=4, max_bytes=1000)
    for seq in (0, 1, 2, 5, 6, 9):
        buffer.append(seq, b"x")
    assert numbers(job(0, buffer.last), buffer) == [2, 5, 6, 9]
    assert numbers(job(6, buffer.last), buffer) == [6, 9]
    assert numbers(job(2**64 - 1, buffer.last), buffer) == []
    assert numbers(job(0, -1), ReplayBuffer(max_batches=1, max_bytes=1)) == []


class Counted(ReplayBuffer):
    """Counts how often it is asked."""

    asked = 0

    def at_or_after(self, seq: int) -> tuple[int, bytes] | None:
        self.asked += 1
        return super().at_or_after(seq)


def test_numbers_that_were_dropped_cost_a_replay_nothing() -> None:
    buffer, kept = Counted(max_batches=4, max_bytes=1000), [0, 1, 10**15, 2 * 10**15]
    for seq in kept:
        buffer.append(seq, b"x")
    buffer.last = 3 * 10**15
    for start in (0, 2, 10**15 + 1, 2 * 10**15 + 1):
        buffer.asked = 0
        wanted = [seq for seq in kept if seq >= start]
        assert numbers(job(start, buffer.last), buffer) == wanted
        assert buffer.asked == len(wanted) + 1


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=60),
    bounds=st.tuples(st.integers(1, 9), st.integers(1, 40)),
)
def test_buffer_is_the_tail_of_what_came_within_both_bounds(
    steps: list[tuple[int, int]], bounds: tuple[int, int]
) -> None:
    """`steps`: how far the number goes on, and bytes."""
    buffer, kept, seq = ReplayBuffer(max_batches=bounds[0], max_bytes=bounds[1]), [], -1
    for gap, size in steps:
        seq += gap
        buffer.append(seq, bytes(size))
        kept.append((seq, bytes(size)))
        while len(kept) > bounds[0] or sum(len(payload) for _, payload in kept) > bounds[1]:
            del kept[0]
        assert (len(buffer), buffer.bytes) == (len(kept), sum(len(p) for _, p in kept))
        assert buffer.first() == (kept[0][0] if kept else seq + 1)
        for start in range(seq + 2):
            assert buffer.at_or_after(start) == next((k for k in kept if k[0] >= start), None)
        assert len(buffer._numbers) <= 2 * len(kept) + 1


def test_replay_goes_on_while_the_buffer_moves() -> None:
    buffer = ReplayBuffer(max_batches=4, max_bytes=1000)
    for seq in range(4):
        buffer.append(seq, b"x")
    asked = job(0, buffer.last)
    assert asked.peek(buffer).seq == asked.peek(buffer).seq == (0).to_bytes(8, "big")
    asked.advance(0.0)
    for seq in (4, 5, 6):  # 0 to 2 are gone, and 4 to 6 came after the question
        buffer.append(seq, b"x")
    assert numbers(asked, buffer) == [3]


def test_replay_is_overdue_without_progress_and_in_the_end_with_it() -> None:
    asked = job(0, 100)
    assert not asked.overdue(1.9)
    assert asked.overdue(2.0)
    asked.advance(1.9)
    assert not asked.overdue(3.8)
    asked.advance(39.9)
    assert not asked.overdue(39.9)
    assert asked.overdue(40.0)


def batch(ts: float) -> EventBatch:
    return EventBatch(ts=ts, events=())


def test_full_outbox_keeps_a_gap_where_the_batches_were() -> None:
    box = Outbox(2)
    assert [box.put(batch(i)) for i in range(4)] == [True, True, False, False]
    assert box.take() == batch(0)
    assert box.put(batch(4)) is False  # the gap itself holds a place
    assert (box.take(), box.take(), box.take()) == (batch(1), 3, None)
    assert box.put(batch(5))
    box.put_gap()
    assert (box.take(), box.take()) == (batch(5), 1)
    assert box.dropped == 4


def test_outbox_is_empty_only_when_the_last_is_done() -> None:
    box = Outbox(2)
    box.put(batch(0))
    box.take()
    assert not box.wait_empty(0.0)
    box.done()
    assert box.wait_empty(0.0)
    box.put(batch(1))
    box.shut()
    assert not box.wait_empty(60.0)


def test_who_binds_is_vllms_rule() -> None:
    bound = ["tcp://*:5557", "tcp://[::]:5557", "ipc:///tmp/x", "inproc://x"]
    assert all(map(is_bound, bound))
    assert not is_bound("tcp://127.0.0.1:5557")


def test_ranks_have_endpoints_of_their_own() -> None:
    assert for_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert for_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert for_rank("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert for_rank("tcp://*:0", 3) == "tcp://*:0"
    assert for_rank("inproc://kv", 2) == "inproc://kv_dp2"
    assert for_rank("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"


@pytest.mark.parametrize(
    "bad", ["", "5557", "udp://x:1", "tcp://host", "tcp://host:port", "ipc://"]
)
def test_bad_endpoint_is_a_config_error(bad: str) -> None:
    with pytest.raises(ConfigError):
        for_rank(bad, 1)
    with pytest.raises(ConfigError):
        for_rank("tcp://*:1", -1)
