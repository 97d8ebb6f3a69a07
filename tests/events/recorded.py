"""The recorded streams of tests/golden, and events to compare them with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvcache.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    ReferenceIndex,
    decode_batch,
)

FOLDER = Path(__file__).resolve().parent.parent / "golden"


@cache
def index(folder: Path = FOLDER) -> dict[str, Any]:
    """Version, and what each case contains."""
    return json.loads((folder / "vllm_events.json").read_text(encoding="utf-8"))


def pools() -> list[str]:
    """Cases that come from vLLM's block manager."""
    return [name for name, about in index()["cases"].items() if "keys_after_batches" in about]


@cache
def payloads(name: str, folder: Path = FOLDER) -> tuple[bytes, ...]:
    """The batches of one case."""
    raw = (folder / f"{name}.bin").read_bytes()
    found, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
        found.append(raw[at + 4 : end])
        at = end
    return tuple(found)


def replayed(name: str, *, count_copies: bool, folder: Path = FOLDER) -> list[tuple[set, set]]:
    """Keys of an index and of vLLM's pool, wherever the latter were noted."""
    noted = index(folder)["cases"][name]["keys_after_batches"]
    told = ReferenceIndex(count_copies=count_copies)
    pairs = []
    for n, payload in enumerate(payloads(name, folder), 1):
        told.apply(decode_batch(payload).events)
        if str(n) in noted:
            pool = {
                (group, bytes.fromhex(key) if isinstance(key, str) else key)
                for group, key in noted[str(n)]
            }
            held = {(s.group, key) for s in told.shelves() for key in told.keys(s.group)}
            pairs.append((held, pool))
    assert pairs
    assert told.unknown_removals == 0 or not count_copies
    return pairs


def every_field() -> tuple[Event, ...]:
    """The events of the case of that name, written by hand."""
    return (
        BlockStored(
            block_hashes=(bytes(range(32)), 2**64 - 1, 5),
            parent_block_hash=bytes(32),
            token_ids=(0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 1),
            block_size=3,
            lora_id=7,
            medium="GPU",
            lora_name="adapter",
            extra_keys=(("adapter", ("image", 3), "salt"), None, (("image", -5),)),
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
            locality="LOCAL",
            ownership="tier",
            session_id="s-é",
            lookahead_token_ids=((1,), (), (3,)),
        ),
        BlockStored(block_hashes=(), parent_block_hash=None, token_ids=(), block_size=16),
        BlockRemoved(
            block_hashes=(bytes(32),) * 20,
            medium="CPU",
            group_idx=0,
            locality="REMOTE",
            ownership="x",
        ),
        BlockRemoved(block_hashes=()),
        AllBlocksCleared(),
    )
