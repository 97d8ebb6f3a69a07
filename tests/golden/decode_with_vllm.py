"""Reads batches with vLLM's own decoder and answers which keys they leave. For test_with_vllm.py.

    echo '[[3, 7]]' | python tests/golden/decode_with_vllm.py FILE...

A file has payloads, each after its length as 4 bytes, big endian. Standard input: for each file,
after how many of them to note the keys. Standard output, one JSON object: vLLM's version, and for
each file the keys each time as [group, hex], and how many stores and removals did not fit what was
there. Needs vLLM alone.
"""

# ruff: noqa: T201  (run as a program)

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import msgspec
import vllm
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def read(raw: bytes, noted: list[int]) -> dict[str, Any]:
    """One stream."""
    keys: set[tuple[int, str]] = set()
    found: dict[int, list[tuple[int, str]]] = {}
    at = batches = misfits = stored = removed = cleared = 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
        for event in DECODER.decode(raw[at + 4 : end]).events:
            if isinstance(event, AllBlocksCleared):
                keys.clear()
                cleared += 1
                continue
            named = {(event.group_idx, key.hex()) for key in event.block_hashes}
            assert event.medium == "GPU"
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                misfits += len(named & keys)
                keys |= named
                stored += len(named)
            else:
                assert isinstance(event, BlockRemoved)
                misfits += len(named - keys)
                keys -= named
                removed += len(named)
        at, batches = end, batches + 1
        if batches in noted:
            found[batches] = sorted(keys)
    return {
        "keys": [found[n] for n in noted],
        "misfits": misfits,
        "stored": stored,
        "removed": removed,
        "cleared": cleared,
    }


def main() -> None:
    streams = zip(sys.argv[1:], json.load(sys.stdin), strict=True)
    answers = [read(Path(file).read_bytes(), noted) for file, noted in streams]
    print(json.dumps({"vllm": vllm.__version__, "streams": answers}))


if __name__ == "__main__":
    main()
