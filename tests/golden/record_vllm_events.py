r"""Records KV events of vLLM's own block manager, encoded by vLLM's own encoder. Run by hand.

    python3.11 -m venv v && v/bin/pip install torch==2.13.0
    v/bin/pip install --no-deps vllm==0.33.0
    v/bin/pip install numpy packaging psutil pyzmq urllib3 requests regex "transformers>=5.16.1,<5.21" \
        cbor2 aiohttp openai oss-harmony pillow pybase64 cachetools msgspec cloudpickle py-cpuinfo \
        prometheus_client "fastapi<0.137" partial-json-parser einops uvloop xgrammar==0.2.8 \
        "llguidance<1.8"
    v/bin/python tests/golden/record_vllm_events.py

Needs no GPU and no model. Writes beside itself, for each case, `NAME.bin` (payloads, each after its
length as 4 bytes, big endian) and `vllm_events.json` (versions; of each case what it contains and
the keys that vLLM's pool held after some of its batches).
"""

# ruff: noqa: T201  (run as a program)

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

HERE = Path(__file__).resolve().parent
FIRST_TS = 1_700_000_000.25
VOCABULARY = 150_000
ENCODER = msgspec.msgpack.Encoder()


# ---- geometries ----------------------------------------------------------------------------------


def group(name: str, spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([name], spec)


def full(block: int) -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    return group("full", spec)


def window(block: int, tokens: int) -> KVCacheGroupSpec:
    spec = SlidingWindowSpec(
        block_size=block, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=tokens
    )
    return group("window", spec)


def latent(block: int, ratio: int = 1) -> KVCacheGroupSpec:
    spec = MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        tokens_per_state=ratio,
    )
    return group("latent", spec)


def latent_window(name: str, block: int, tokens: int) -> KVCacheGroupSpec:
    spec = SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=tokens
    )
    return group(name, spec)


def state(block: int) -> KVCacheGroupSpec:
    spec = MambaSpec(
        block_size=block, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    return group("state", spec)


# ---- vLLM's manager, step by step ----------------------------------------------------------------


class Recorder:
    """Requests through vLLM's KVCacheManager; a batch for each step that had events."""

    def __init__(self, groups: list[KVCacheGroupSpec], blocks: int, interval: int | None) -> None:
        sizes = [g.kv_cache_spec.block_size for g in groups]
        self.grid, self.unit = math.lcm(*sizes), math.gcd(*sizes)
        self.manager = KVCacheManager(
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=interval,
            ),
            max_model_len=1 << 16,
            scheduler_block_size=self.grid,
            hash_block_size=self.unit,
            max_in_flight_tokens=4 * self.grid,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(self.unit, hash_function)
        self.payloads: list[bytes] = []
        self.keys: dict[int, list[list[Any]]] = {}

    def take(self) -> None:
        """End a step: its events become a payload."""
        self.manager.take_new_block_ids()
        self.manager.take_boundary_state_offloads()
        _, retained = self.manager.take_kv_cache_block_copies()
        if retained:
            self.manager.block_pool.free_blocks(retained)
        events = self.manager.take_events()
        if events:
            batch = KVEventBatch(
                ts=FIRST_TS + len(self.payloads), events=events, data_parallel_rank=0
            )
            self.payloads.append(ENCODER.encode(batch))

    def checkpoint(self) -> None:
        """Note the keys that the pool holds now, as [group, hash]."""
        held = self.manager.block_pool.cached_block_hash_to_block._cache
        self.keys[len(self.payloads)] = sorted(
            [get_group_id(key), external(get_block_hash(key))] for key in held
        )

    def run(self, name: str, tokens: list[int], reply: list[int], **request: Any) -> None:
        """One request from lookup to free: chunks of two grid units, then the reply."""
        session = request.pop("session", None)
        made = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1 << 12),
            pooling_params=None,
            block_hasher=self.hasher,
            **request,
        )
        made.session_id = session
        manager = self.manager
        manager.new_step_starts()
        blocks, hit, _ = manager.get_computed_blocks(made)
        done = hit
        while done < len(tokens):
            step = min(2 * self.grid - done % self.grid, len(tokens) - done)
            first = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
            if manager.allocate_slots(made, step, **(first if done == hit else {})) is None:
                raise RuntimeError(f"{name}: the pool is too small")
            done += step
            made.num_computed_tokens = done
            self.take()
            manager.new_step_starts()
        for token in reply:
            made.append_output_token_ids(token)
            if manager.allocate_slots(made, 1) is None:
                raise RuntimeError(f"{name}: the pool is too small")
            made.num_computed_tokens += 1
            self.take()
            manager.new_step_starts()
        manager.free(made)
        self.take()
        self.checkpoint()


def external(key: bytes) -> Any:
    made = maybe_convert_block_hash(key)
    return made.hex() if isinstance(made, bytes) else made


def sessions(recorder: Recorder, *, units: int, seed: int, clear: bool = False) -> None:
    """Three sessions of two turns that share a system prompt, then strangers that evict them."""
    draw = random.Random(seed)

    def text(n: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(n)]

    grid = recorder.grid
    system = text(units * grid + 3)
    spoken = {s: system + text(grid + 5) for s in range(3)}
    for turn in range(2):
        for s, said in spoken.items():
            reply = text(min(grid, 24) + 1)
            recorder.run(f"{s}/{turn}", said, reply, session=f"session-{s}")
            spoken[s] = said + reply + text(grid // 2 + 1)
    for stranger in range(4):
        recorder.run(f"x{stranger}", text((units + 2) * grid), text(2), cache_salt="tenant")
    if clear:
        if not recorder.manager.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")
        recorder.take()
        recorder.checkpoint()
        recorder.run("after", spoken[0], text(2))


# ---- cases ---------------------------------------------------------------------------------------

POOLS: dict[str, dict[str, Any]] = {
    "full_dense": {"groups": [full(16)], "blocks": 40, "interval": None, "clear": True},
    "window_dense": {"groups": [full(16), window(16, 32)], "blocks": 60, "interval": None},
    "window_sparse": {"groups": [full(16), window(16, 32)], "blocks": 60, "interval": 0},
    "window_interval": {"groups": [full(16), window(16, 32)], "blocks": 60, "interval": 64},
    "state_sparse": {"groups": [latent(32), state(32)], "blocks": 40, "interval": 0},
    "compressed_sparse": {
        "groups": [
            latent(64, 4),
            latent_window("window", 16, 32),
            latent_window("pooling", 4, 8),
        ],
        "blocks": 72,
        "interval": 0,
    },
}
UNITS = {"full_dense": 6, "compressed_sparse": 2}


def pool_case(name: str) -> tuple[list[bytes], dict[str, Any]]:
    setting = POOLS[name]
    recorder = Recorder(setting["groups"], setting["blocks"], setting["interval"])
    sessions(recorder, units=UNITS.get(name, 5), seed=1, clear=setting.get("clear", False))
    return recorder.payloads, {
        "contains": "vLLM's KVCacheManager with events on: shared system prompt, evictions",
        "groups": [type(g.kv_cache_spec).__name__ for g in setting["groups"]],
        "block_sizes": [g.kv_cache_spec.block_size for g in setting["groups"]],
        "retention_interval": setting["interval"],
        "keys_after_batches": thinned(recorder.keys),
    }


def thinned(keys: dict[int, Any]) -> dict[int, Any]:
    """Every fourth checkpoint, and the last: the file stays small."""
    return {n: keys[n] for i, n in enumerate(keys) if i % 4 == 1 or i == len(keys) - 1}


def every_field() -> list[Any]:
    """Events with every field set, and with none."""
    return [
        BlockStored(
            block_hashes=[bytes(range(32)), 2**64 - 1, 5],
            parent_block_hash=bytes(32),
            token_ids=[0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 1],
            block_size=3,
            lora_id=7,
            medium="GPU",
            lora_name="adapter",
            extra_keys=[("adapter", ("image", 3), "salt"), None, (("image", -5),)],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
            locality="LOCAL",
            ownership="tier",
            session_id="s-\u00e9",
            lookahead_token_ids=[[1], [], [3]],
        ),
        BlockStored(
            block_hashes=[],
            parent_block_hash=None,
            token_ids=[],
            block_size=16,
            lora_id=None,
            medium=None,
            lora_name=None,
        ),
        BlockRemoved(
            block_hashes=[bytes(32)] * 20,
            medium="CPU",
            group_idx=0,
            locality="REMOTE",
            ownership="x",
        ),
        BlockRemoved(block_hashes=[], medium=None),
        AllBlocksCleared(),
    ]


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch of the older form."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def as_array(event: Any) -> list[Any]:
    """An event as vLLM wrote it before its events became maps: tag, then fields by position."""
    return [type(event).__name__, *(getattr(event, f) for f in event.__struct_fields__)]


def old_stored(fields: int) -> list[Any]:
    """BlockStored of a publisher that knew the first `fields` fields."""
    return as_array(every_field()[0])[: fields + 1]


def main() -> None:
    cases: dict[str, tuple[list[bytes], dict[str, Any]]] = {}
    fields = KVEventBatch(ts=1.5, events=every_field(), data_parallel_rank=3)
    plain = KVEventBatch(ts=2.0, events=[AllBlocksCleared()])
    cases["every_field"] = (
        [ENCODER.encode(fields), ENCODER.encode(plain)],
        {"contains": "all fields set, and none; a batch without rank"},
    )
    arrays = [
        ArrayBatch(ts=1.5, events=[as_array(e) for e in every_field()], data_parallel_rank=3),
        ArrayBatch(ts=2.5, events=[old_stored(5), ["BlockRemoved", [1, 2]], ["AllBlocksCleared"]]),
        ArrayBatch(ts=3.5, events=[old_stored(6), ["BlockRemoved", [1, 2], "GPU"]]),
    ]
    cases["array_form"] = (
        [ENCODER.encode(batch) for batch in arrays],
        {
            "contains": "events as arrays: all fields, then the first 5 and the first 6 of BlockStored"
        },
    )
    for hashes in ("bytes", "ints"):
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = str(int(hashes == "ints"))
        for name in POOLS if hashes == "bytes" else ("full_dense",):
            cases[name if hashes == "bytes" else f"{name}_ints"] = pool_case(name)
    index: dict[str, Any] = {
        "vllm": vllm.__version__,
        "msgspec": msgspec.__version__,
        "made_by": "tests/golden/record_vllm_events.py",
        "cases": {},
    }
    for name, (payloads, about) in cases.items():
        framed = b"".join(len(p).to_bytes(4, "big") + p for p in payloads)
        (HERE / f"{name}.bin").write_bytes(framed)
        index["cases"][name] = {"batches": len(payloads), "bytes": len(framed), **about}
    text = json.dumps(index, separators=(",", ":")).replace('"cases":', '"cases":\n')
    (HERE / "vllm_events.json").write_text(text.replace('},"', '},\n"') + "\n")
    for name, about in index["cases"].items():
        print(name, about["batches"], "batches", about["bytes"], "bytes")


if __name__ == "__main__":
    main()
