"""Lets vLLM's own decoder and replay endpoint talk with our events. Run by hand.

    PYTHONPATH=. v/bin/python tests/golden/check_with_vllm.py

`v` is the environment of record_vllm_events.py, plus msgpack. vLLM's decoder reads our bytes and
gives equal fields; its encoder writes the very same bytes again; its compressors have the windows
that we tell; our subscriber reads vLLM's publisher, gap and replay included, and a plain ZeroMQ
client of vLLM's kind reads ours.
"""

# ruff: noqa: T201  (run as a program)

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import msgspec
import numpy as np
import torch
import vllm
import zmq
from vllm.distributed import kv_events as theirs
from vllm.models.deepseek_v4 import compressor
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvcache.core import events as ours
from kvcache.core.events.publisher import EventPublisher
from kvcache.core.events.subscriber import EventSubscriber, Lost, Received
from kvcache.core.specs import PoolingState
from kvcache.presets import preset

DECODER = msgspec.msgpack.Decoder(theirs.KVEventBatch)
ENCODER = msgspec.msgpack.Encoder()
BLOCK = 4
DEADLINE = 20.0


def keys(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + 32 * n, dtype=np.uint32).astype(np.uint8).reshape(n, 32)


def stream() -> list[ours.Event]:
    """What a hybrid with sparse retention reports, through `to_events`."""
    labels = ours.Labels(
        groups=[
            ours.GroupLabel(BLOCK, "full_attention"),
            ours.GroupLabel(BLOCK, "sliding_window", 8),
            ours.GroupLabel(2 * BLOCK, "mamba"),
        ],
        namespaces={
            1: ours.NamespaceLabel(lora_name="adapter", salt="tenant"),
            2: ours.NamespaceLabel(foreign=b"n" * 32),
        },
        requests={5: ours.RequestLabel("session", (ours.MediaSpan("image", 2, 4),))},
    )

    def stored(group: int, namespace: int, start: int, n: int, block: int) -> ours.StoredRun:
        return ours.StoredRun(
            group,
            5,
            namespace,
            None if start == 0 else b"p" * 32,
            keys(start, n),
            start + block * np.arange(1, n + 1),
            np.arange(n * block, dtype=np.int32) * 99,
        )

    runs: list[ours.Run] = [
        stored(0, 1, 0, 4, BLOCK),
        stored(1, 1, 8, 2, BLOCK),
        stored(2, 1, 8, 1, 2 * BLOCK),
        stored(0, 2, 0, 2, BLOCK),
        ours.RemovedRun(0, 1, keys(0, 3)),
        ours.RemovedRun(1, 1, keys(8, 1)),
        ours.RemovedRun(0, 2, keys(0, 1)),
        ours.ClearedRun(),
    ]
    return ours.to_events(runs, labels)


def plain(value: Any) -> Any:
    """Tuples as lists, as msgspec gives them."""
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def check_bytes() -> None:
    batch = ours.EventBatch(ts=12.5, events=tuple(stream()), data_parallel_rank=1)
    payload = ours.encode_batch(batch)
    read = DECODER.decode(payload)
    assert (read.ts, read.data_parallel_rank) == (12.5, 1)
    assert len(read.events) == len(batch.events) > 0
    for mine, his in zip(batch.events, read.events, strict=True):
        assert type(mine).__name__ == type(his).__name__
        for field in fields(mine):
            if field.name != "namespace":
                assert plain(getattr(mine, field.name)) == plain(getattr(his, field.name)), field
    native = ours.EventBatch(
        ts=batch.ts,
        data_parallel_rank=1,
        events=tuple(e for e in batch.events if getattr(e, "namespace", None) is None),
    )
    payload = ours.encode_batch(native)
    assert ENCODER.encode(DECODER.decode(payload)) == payload
    print(f"bytes: vLLM reads and rewrites {len(batch.events)} of our events")


def check_windows() -> None:
    """Those of DeepSeek V4's pooling states, which vLLM describes as windows."""
    compressor.get_current_vllm_config = lambda: SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={})
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
    ours_by_ratio = {
        spec.ratio: spec
        for spec in preset("deepseek-v4-pro").groups
        if isinstance(spec, PoolingState)
    }
    assert sorted(ours_by_ratio) == [4, 128]
    for ratio, spec in ours_by_ratio.items():
        state = compressor.CompressorStateCache(8, torch.float32, ratio, f"state{ratio}")
        theirs_of_it = state.get_kv_cache_spec(config)
        assert spec.window_tokens == get_kv_cache_spec_sliding_window(theirs_of_it)
        assert spec.kind == get_kv_cache_spec_kind(theirs_of_it).value
    print("windows: those of pooling states are vLLM's")


def their_batch(n: int) -> theirs.KVEventBatch:
    event = theirs.BlockRemoved(block_hashes=[bytes([n]) * 32], medium="GPU", group_idx=0)
    return theirs.KVEventBatch(ts=float(n), events=[event])


def check_their_publisher(folder: str) -> None:
    live, replay = f"ipc://{folder}/their-live", f"ipc://{folder}/their-replay"
    publisher = theirs.ZmqEventPublisher(0, live, replay, buffer_steps=6)
    for n in range(8):  # nobody listens: 0 to 7 are missed, 2 to 7 can be replayed
        publisher.publish(their_batch(n))
    queue = publisher._event_queue
    with queue.all_tasks_done:
        assert queue.all_tasks_done.wait_for(lambda: not queue.unfinished_tasks, DEADLINE)
    with EventSubscriber(live, replay_endpoint=replay, probe_seconds=0.5) as subscriber:
        got = []
        while not any(isinstance(d, Received) and d.seq == 7 for d in got):
            delivery = subscriber.receive(DEADLINE)
            assert delivery is not None
            got.append(delivery)
        assert got[0] == Lost(0, 1, got[0].reason)
        assert [d.seq for d in got[1:]] == [2, 3, 4, 5, 6, 7]
        publisher.publish(their_batch(8))
        last = subscriber.receive(DEADLINE)
        assert isinstance(last, Received)
        assert (last.seq, last.replayed) == (8, False)
    publisher.shutdown()
    print("vLLM's publisher: our subscriber sees the gap, the replay, and the loss")


def check_our_publisher(folder: str) -> None:
    live, replay = f"ipc://{folder}/our-live", f"ipc://{folder}/our-replay"
    context = zmq.Context.instance()
    events = stream()
    with EventPublisher(live, replay_endpoint=replay, topic="kv") as publisher:
        for _ in range(3):
            publisher.publish(events)
        assert publisher.flush(DEADLINE)
        request = context.socket(zmq.DEALER)
        request.connect(replay)
        request.send_multipart((b"", (1).to_bytes(8, "big")))
        seen = []
        while request.poll(int(DEADLINE * 1000)):
            empty, topic, seq, payload = request.recv_multipart()
            assert empty == b""
            if seq == theirs.ZmqEventPublisher.END_SEQ:
                assert (topic, payload) == (b"", b"")
                break
            assert topic == b"kv"
            seen.append(int.from_bytes(seq, "big"))
            assert len(DECODER.decode(payload).events) == len(events)
        assert seen == [1, 2]
        request.close(linger=0)
    print("our publisher: a client of vLLM's kind reads the replay")


def main() -> None:
    check_bytes()
    check_windows()
    with tempfile.TemporaryDirectory() as folder:
        check_their_publisher(folder)
        check_our_publisher(folder)
    print(f"all good with vLLM {vllm.__version__}")


if __name__ == "__main__":
    main()
