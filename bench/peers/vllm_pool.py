"""vLLM's `KVCacheManager` over one pool, with what a scheduler does around it. On a CPU, no model.

Imported by the programs beside it, under a Python that has vLLM (0.33.0 is what they were checked
with); needs nothing of kvcache. A group is

    {"kind": "full" | "latent" | "window" | "latent_window" | "state", "block_tokens": N}

with `kv_heads`, `head_dim`, `element_bytes`, `window`, `tokens_per_entry`, `state_elements` where the
kind has them. Bytes are those of the specs themselves: a block holds the largest page of any group.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class Vllm:
    """The names that are used of vLLM. The manager comes first: its imports go round in circles."""

    def __init__(self) -> None:
        load, started = importlib.import_module, time.perf_counter()
        self.manager: Any = load("vllm.v1.core.kv_cache_manager").KVCacheManager
        self.torch: Any = load("torch")
        self.version: str = load("vllm").__version__
        self.specs: Any = load("vllm.v1.kv_cache_interface")
        self.request: Any = load("vllm.v1.request").Request
        self.status: Any = load("vllm.v1.request").RequestStatus
        self.sampling: Any = load("vllm.sampling_params").SamplingParams(max_tokens=1 << 20)
        scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
        self.split: Any = scheduler._mamba_block_aligned_split  # noqa: SLF001
        self.hash_function: Any = load("vllm.utils.hashing").get_hash_fn_by_name
        utils = load("vllm.v1.core.kv_cache_utils")
        self.init_hash: Any = utils.init_none_hash
        self.init_hash(self.hash_function("sha256"))
        self.block_hasher: Any = utils.get_request_block_hasher
        self.import_seconds = time.perf_counter() - started

    def environment(self) -> dict[str, Any]:
        """What a report says of this side."""
        return {
            "vllm": self.version,
            "torch": self.torch.__version__,
            "python": sys.version.split()[0],
            "import_seconds": self.import_seconds,
        }

    def new_request(self, name: str, tokens: list[int], hasher: Any) -> Any:
        """A request with the hashes of all full blocks; with none if `hasher` is None."""
        return self.request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=self.sampling,
            pooling_params=None,
            cache_salt=None,
            block_hasher=hasher,
        )

    def spec(self, group: dict[str, Any]) -> Any:
        """One group as vLLM describes it."""
        torch, specs, block = self.torch, self.specs, group["block_tokens"]
        if group["kind"] == "state":
            return specs.MambaSpec(
                block_size=block,
                shapes=((group["state_elements"],),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=0,
            )
        names = {
            "full": specs.FullAttentionSpec,
            "latent": specs.MLAAttentionSpec,
            "window": specs.SlidingWindowSpec,
            "latent_window": specs.SlidingWindowMLASpec,
        }
        fields = {
            "block_size": block,
            "num_kv_heads": group["kv_heads"],
            "head_size": group["head_dim"],
            "dtype": {2: torch.bfloat16, 4: torch.float32}[group["element_bytes"]],
        }
        if "window" in group:
            fields["sliding_window"] = group["window"]
        if "tokens_per_entry" in group:
            fields["tokens_per_state"] = group["tokens_per_entry"]
        return names[group["kind"]](**fields)


class Pool:
    """One pool of `blocks` blocks. `interval`: vLLM's retention interval, None: dense."""

    def __init__(
        self,
        vllm: Vllm,
        groups: list[dict[str, Any]],
        blocks: int,
        interval: int | None,
        step_tokens: int,
    ) -> None:
        specs = [vllm.spec(group) for group in groups]
        sizes = [spec.block_size for spec in specs]
        self.vllm, self.blocks, self._step_tokens = vllm, blocks, step_tokens
        self.grid, self.unit = math.lcm(*sizes), math.gcd(*sizes)
        self.block_bytes = max(spec.page_size_bytes for spec in specs)
        config = vllm.specs.KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                vllm.specs.KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)
            ],
            prefix_cache_retention_interval=interval,
        )
        self.manager = vllm.manager(
            kv_cache_config=config,
            max_model_len=1 << 21,
            scheduler_block_size=self.grid,
            hash_block_size=self.unit,
            max_in_flight_tokens=step_tokens,
            enable_caching=True,
            use_eagle=False,
            log_stats=True,
            enable_kv_cache_events=False,
            watermark=0.0,
        )
        self._splitter = self._what_a_split_reads() if config.has_mamba_layers else None
        self._hasher = vllm.block_hasher(self.unit, vllm.hash_function("sha256"))

    def _what_a_split_reads(self) -> Any:
        """The fields of a scheduler that its `_mamba_block_aligned_split` uses."""
        partial = self.unit < self.grid and self.manager.coordinator.enable_partial_hash_hits
        return SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.grid),
            block_size=self.grid,
            hash_block_size=self.unit,
            mamba_partial_cache_hit=partial,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            max_num_scheduled_tokens=self._step_tokens,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            mamba_shared_prefix_checkpoint=False,
        )

    def request(self, name: str, tokens: list[int]) -> Any:
        """A new request, hashed as this pool needs it."""
        return self.vllm.new_request(name, tokens, self._hasher)

    def chunk(self, request: Any, tokens: int, hit_tokens: int = 0) -> int:
        """How many of the next `tokens` tokens vLLM's scheduler would compute in one step."""
        if self._splitter is None:
            return tokens
        chunk: int = self.vllm.split(self._splitter, request, tokens, hit_tokens, 0)
        return chunk

    def drain(self) -> None:
        """What a scheduler takes out of the manager in each step."""
        self.manager.take_new_block_ids()
        self.manager.take_boundary_state_offloads()
        _, retained = self.manager.take_kv_cache_block_copies()
        if retained:
            self.manager.block_pool.free_blocks(retained)
        self.manager.take_events()

    @property
    def free_blocks(self) -> int:
        """Those that no request holds, cached ones among them."""
        free: int = self.manager.block_pool.get_num_free_blocks()
        return free
