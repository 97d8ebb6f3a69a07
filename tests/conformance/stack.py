"""vLLM's own scheduler, cache manager and connector driver on a CPU, over a model that only checks.

The model's "KV" at a position is a number made of all tokens up to there, so whatever a step reads is
either what the prefix asks for or wrong. It is checked at every position that attention would read,
and at every state that a step goes on from.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

UnspecifiedPlatform.support_hybrid_kv_cache = classmethod(lambda _: True)

MODEL = Path(__file__).parent / "tinymodel"
MODULE = "kvcache.connectors.adapters.vllm"
HASH = "sha256_cbor"
VOCABULARY = 200
MAX_TOKENS = 2048
IDLE_SECONDS = 0.05
"""An engine with nothing to compute looks up so often."""


def full(block: int = 16, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=16, dtype=torch.float32
    )


def window(tokens: int = 32, block: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def chunked(tokens: int = 64, block: int = 16) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


def state(block: int = 16, page_bytes: int = 4096) -> MambaSpec:
    return MambaSpec(
        block_size=block,
        shapes=((4, 16),),
        dtypes=(torch.float32,),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


@dataclass(kw_only=True)
class Setup:
    """One run's model, pool and connector."""

    specs: Sequence[KVCacheSpec] = field(default_factory=lambda: [full()])
    """Of the groups."""
    layers: int = 1
    """Of each group."""
    blocks: int = 40
    blocks_first: bool = False
    """A block has the pages of all layers, instead of a layer all blocks."""
    connector: str = "KVCacheConnector"
    module: str | None = MODULE
    extra: Mapping[str, Any] = field(
        default_factory=lambda: {"tiers": [{"connector": "cpu", "capacity_bytes": 1 << 24}]}
    )
    policy: str = "recompute"
    batch_tokens: int = 64
    requests: int = 8
    retention: int | None = None
    match_unit: int | None = None
    asynchronous: bool = False
    """Steps are scheduled one ahead of their results."""
    events: bool = False


class StaleError(AssertionError):
    """A step read something that is not the KV of its prefix."""


class Stack:
    """One engine, stepped by hand."""

    def __init__(self, setup: Setup | None = None, **changes: Any) -> None:
        self.setup = setup = setup or Setup(**changes)
        self.config = vllm_config(setup)
        self.kv_config = kv_cache_config(setup)
        block, unit = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self.kv_config.hash_block_size = unit
        self.config.cache_config.num_gpu_blocks = setup.blocks
        hash_fn = get_hash_fn_by_name(HASH)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(unit, hash_fn)
        self.model = CheckedModel(setup, self.kv_config)
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.kv_config
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.driver = ActiveKVConnector(self.config, self.model.caches)
        kind = AsyncScheduler if setup.asynchronous else Scheduler
        self.scheduler = kind(self.config, self.kv_config, MagicMock(), block, unit, log_stats=True)
        self.connector = self.scheduler.connector
        self.external: dict[str, list[int]] = {}
        """Tokens that the connector was to bring, by request, each time that it was admitted."""
        self.local: dict[str, int] = {}
        """Tokens that the device had, when it was last admitted."""
        self._watch()
        self.requests: dict[str, Request] = {}
        self.stats: list[Any] = []
        self.events: list[Any] = []
        self._ahead: deque[tuple[Any, Any]] = deque()
        self.scheduler.kv_event_publisher.publish = self.events.append

    def _watch(self) -> None:
        asked, told = (
            self.connector.get_num_new_matched_tokens,
            self.connector.update_state_after_alloc,
        )

        def ask(request: Request, local: int) -> tuple[int | None, bool]:
            self.local[request.request_id] = local
            return asked(request, local)

        def tell(request: Request, blocks: Any, tokens: int) -> None:
            if tokens:
                self.external.setdefault(request.request_id, []).append(tokens)
            told(request, blocks, tokens)

        self.connector.get_num_new_matched_tokens = ask
        self.connector.update_state_after_alloc = tell

    @property
    def tiers(self) -> list[Any]:
        """Of the connectors that are ours."""
        children = getattr(self.worker, "sub_connectors", [self.worker])
        return [child._tier for child in children if hasattr(child, "_tier")]

    @property
    def pool(self) -> Any:
        """vLLM's blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free(self) -> int:
        """Blocks that nobody holds, of `blocks - 1`: one is the null block."""
        return int(self.pool.get_num_free_blocks())

    def add(self, name: str, tokens: Iterable[int], most: int = 4, **options: Any) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=most, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            **options,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """One step of the engine: scheduled, run, its output taken. Tokens that it computes."""
        if self._ahead and not self._wanted:  # nothing to schedule: the last output is taken
            self._settle()
            return 1
        output = self.scheduler.schedule()
        self._ahead.append((output, self._run(output)))
        if not self.setup.asynchronous or len(self._ahead) > 1:
            self._settle()
        return int(output.total_num_scheduled_tokens)

    def _settle(self) -> None:
        output, made = self._ahead.popleft()
        told = self.scheduler.update_from_output(output, made)
        for outputs in told.values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)

    def _run(self, output: Any) -> ModelRunnerOutput:
        self.model.prepare(output)
        self.driver.pre_forward(output)
        names = list(output.num_scheduled_tokens)
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in names}
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            self.model.forward(
                self.requests[name], starts[name], output.num_scheduled_tokens[name], tables[name]
            )
            for name in names
        ]
        self.driver.finish_forward()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.driver.post_forward(output.finished_req_ids),
        )

    @property
    def busy(self) -> bool:
        """Whether an engine would go on stepping."""
        return bool(self._ahead) or self._wanted

    @property
    def _wanted(self) -> bool:
        connector = self.connector
        return bool(
            self.scheduler.has_requests()
            or (connector is not None and connector.has_pending_push_work())
        )

    def run(self, most: int = 2000, until: Callable[[], bool] | None = None) -> int:
        """Steps until nothing is left to do."""
        for count in range(most):
            if not self.busy or (until is not None and until()):
                return count
            if not self.step():
                for tier in self.tiers:
                    tier.worker.wait(IDLE_SECONDS)
        raise AssertionError(
            f"{most} steps, and there is more to do:"
            f" {[(r.request_id, r.status.name) for r in self.scheduler.requests.values()]}"
        )

    def serve(self, name: str, tokens: Iterable[int], most: int = 4) -> Request:
        request = self.add(name, tokens, most)
        self.run()
        return request

    def forget(self) -> None:
        """The device's prefix cache is empty, and its memory is other bytes."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.model.fill(0xEE)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self.close()


def expected_outputs(request: Request) -> list[int]:
    """What the model says to the prompt, whatever is cached."""
    chain, out = 0, []
    for token in request.prompt_token_ids:
        chain = _link(chain, token)
    for _ in range(request.num_output_tokens):
        out.append(chain % VOCABULARY)
        chain = _link(chain, out[-1])
    return out


def _link(chain: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), chain)


class CheckedModel:
    """Memory of the KV cache, and a forward pass that checks what it reads."""

    def __init__(self, setup: Setup, config: KVCacheConfig) -> None:
        self._specs = list(setup.specs)
        self.raw = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.uint8)
        memory = self.raw.numpy()
        self.caches: dict[str, Any] = {}
        self._layers: list[list[np.ndarray]] = [[] for _ in config.kv_cache_groups]
        self._tensors = config.kv_cache_tensors
        self._blocks = config.num_blocks
        for tensor in config.kv_cache_tensors:
            for i, name in enumerate(tensor.layers):
                (group,) = [
                    g for g, it in enumerate(config.kv_cache_groups) if name in it.layer_names
                ]
                offset = tensor.offset + i * tensor.layer_stride
                page = self._specs[group].page_size_bytes
                view = np.lib.stride_tricks.as_strided(
                    memory[offset:].view(np.int64),
                    (config.num_blocks, page // 8),
                    (tensor.block_stride, 8),
                )
                self._layers[group].append(view)
                self.caches[name] = torch.as_strided(
                    self.raw, (config.num_blocks, page), (tensor.block_stride, 1), offset
                )
        self._tokens: dict[str, list[int]] = {}
        self._chains: dict[str, list[int]] = {}
        self.checks = 0
        self.lenient = setup.extra.get("load") == "sync"
        """vLLM throws away a step whose own load failed: what it reads wrong, it writes and says wrong."""

    def fill(self, byte: int) -> None:
        self.raw.fill_(byte)

    def prepare(self, output: Any) -> None:
        """What a worker does before the forward pass: zeros, and copies of blocks."""
        for block in output.new_block_ids_to_zero or ():
            for layers in self._layers:
                for layer in layers:
                    layer[block] = 0
        for copy in output.kv_cache_block_copies or ():
            for layers in self._layers:
                for layer in layers:
                    layer[copy.dst_block_id] = layer[copy.src_block_id]
        self._sync = output.has_sync_kv_loads

    def forward(
        self, request: Request, start: int, count: int, tables: Sequence[Sequence[int]]
    ) -> list[int]:
        """Reads and writes the KV of `count` tokens behind `start`; the next token, if it is known."""
        name, end = request.request_id, start + count
        tokens = self._tokens.setdefault(name, list(request.prompt_token_ids))
        if self.lenient:
            del tokens[request.num_tokens :]  # what vLLM has thrown away
        chains = self._chains.setdefault(name, [])
        for token in tokens[len(chains) : end]:
            chains.append(_link(chains[-1] if chains else 0, token))
        values = np.array(chains[:end], np.int64)
        self._wrong = False
        for group, spec in enumerate(self._specs):
            table = np.array(tables[group], np.int64)
            for number, layer in enumerate(self._layers[group]):
                mine = values * 64 + group * 8 + number
                if isinstance(spec, MambaSpec):
                    self._state(name, spec, layer, table, mine, start, end)
                else:
                    self._attention(name, spec, layer, table, mine, start, end)
        if end < len(tokens):
            return []
        tokens.append((chains[end - 1] + self._wrong) % VOCABULARY)
        return [tokens[-1]]

    def _attention(
        self,
        name: str,
        spec: Any,
        layer: np.ndarray,
        table: np.ndarray,
        values: np.ndarray,
        start: int,
        end: int,
    ) -> None:
        written = np.arange(start, end)
        layer[table[written // spec.block_size], written % spec.block_size] = values[start:end]
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        positions = np.arange(first, end)
        blocks = table[positions // spec.block_size]
        read = layer[blocks, positions % spec.block_size]
        wrong = np.flatnonzero((read != values[first:end]) | (blocks == 0))
        self.checks += len(positions)
        if not len(wrong):
            return
        if not (self._sync and self.lenient):
            raise StaleError(
                f"{name}: position {first + wrong[0]} of {end} ({type(spec).__name__})"
            )
        self._wrong = True
        layer[table[written // spec.block_size], written % spec.block_size] = -1

    def _state(
        self,
        name: str,
        spec: MambaSpec,
        layer: np.ndarray,
        table: np.ndarray,
        values: np.ndarray,
        start: int,
        end: int,
    ) -> None:
        if start:
            block = table[(start - 1) // spec.block_size]
            self.checks += 1
            if block == 0 or layer[block, 0] != values[start - 1]:
                raise StaleError(f"{name}: the state after {start} tokens")
        layer[table[(end - 1) // spec.block_size], 0] = values[end - 1]


def vllm_config(setup: Setup) -> VllmConfig:
    """As the engine would be started."""
    mamba = any(isinstance(spec, MambaSpec) for spec in setup.specs)
    return VllmConfig(
        model_config=ModelConfig(
            model=str(MODEL),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_TOKENS,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=setup.batch_tokens,
            max_num_seqs=setup.requests,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=setup.asynchronous,
        ),
        cache_config=CacheConfig(
            block_size=setup.specs[0].block_size,
            enable_prefix_caching=True,
            prefix_caching_hash_algo=HASH,
            **({"mamba_cache_mode": "align"} if mamba else {}),
            **({"prefix_match_unit": setup.match_unit} if setup.match_unit else {}),
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=setup.connector,
            kv_connector_module_path=setup.module,
            kv_role="kv_both",
            kv_buffer_device="cpu",
            kv_connector_extra_config=dict(setup.extra),
            kv_load_failure_policy=setup.policy,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if setup.events
        else None,
    )


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    """The groups overlay each other: layer i of each has the same bytes of a block."""
    page = max(spec.page_size_bytes for spec in setup.specs)
    total = page * setup.blocks * setup.layers
    names = [[f"g{g}.l{i}" for i in range(setup.layers)] for g in range(len(setup.specs))]
    layer, block = (
        (page, page * setup.layers) if setup.blocks_first else (page * setup.blocks, page)
    )
    return KVCacheConfig(
        num_blocks=setup.blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=total, layers=own, layer_stride=layer, block_stride=block)
            for own in names
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(own, spec) for own, spec in zip(names, setup.specs, strict=True)
        ],
        prefix_cache_retention_interval=setup.retention,
    )
