"""Replays an agent trace through vLLM's own `KVCacheManager`, on a CPU, with no model.

Run by `kvcache bench agents --peer vllm --peer-python PATH` in an environment that has vLLM (0.33.0
is what its figures were checked with) and needs nothing of kvcache. One JSON object on stdin:

    {"trace": [[session, [prompt tokens], [output tokens]], ...],
     "max_running": 4, "step_tokens": 8192,
     "runs": [{"preset": "gemma3", "groups": [...], "blocks": 11933, "interval": null}, ...]}

A group is `{"kind": "full" | "latent" | "window" | "latent_window" | "state", "block_tokens": N}`
with `kv_heads`, `head_dim`, `element_bytes`, `window`, `tokens_per_entry`, `state_elements` where the
kind has them. Stdout has one JSON object a line: the environment first, then one for each run. Bytes
are those of the specs themselves: a block holds the largest page of any group.

The driver is a scheduler with nothing around it: one step at a time, first come, first served, a
budget of tokens for each step, running requests before waiting ones, a turn arrives when the one
before it has finished. Chunks are cut by vLLM's own scheduler code.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

STALLED_STEPS = 4
"""So many steps in which nobody computes anything: the pool is too small for the trace."""


@dataclass
class Item:
    """One request of the trace, from its arrival to its end."""

    session: int
    request: Any
    output: list[int]
    given: int = 0
    counted: bool = False


@dataclass
class Figures:
    """What a run counts, in tokens but for the first three."""

    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    peak_used_blocks: int = 0
    stalled: bool = False
    hits: list[int] = field(default_factory=list)


class Vllm:
    """The names that are used of vLLM. The manager comes first: its imports go round in circles."""

    def __init__(self) -> None:
        load = importlib.import_module
        self.manager: Any = load("vllm.v1.core.kv_cache_manager").KVCacheManager
        self.torch: Any = load("torch")
        self.version: str = load("vllm").__version__
        self.specs: Any = load("vllm.v1.kv_cache_interface")
        self.request: Any = load("vllm.v1.request").Request
        self.status: Any = load("vllm.v1.request").RequestStatus
        self.sampling: Any = load("vllm.sampling_params").SamplingParams(max_tokens=1 << 20)
        scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
        self.split: Any = scheduler._mamba_block_aligned_split  # noqa: SLF001
        self.hash_function: Any = load("vllm.utils.hashing").get_hash_fn_by_name("sha256")
        utils = load("vllm.v1.core.kv_cache_utils")
        utils.init_none_hash(self.hash_function)
        self.block_hasher: Any = utils.get_request_block_hasher

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


class Replay:
    """One pool, one retention interval, one trace."""

    def __init__(self, vllm: Vllm, run: dict[str, Any], trace: list[Any], limits: Any) -> None:
        specs = [vllm.spec(group) for group in run["groups"]]
        sizes = [spec.block_size for spec in specs]
        self.vllm, self.limits, self.blocks = vllm, limits, run["blocks"]
        self.grid, self.unit = math.lcm(*sizes), math.gcd(*sizes)
        self.block_bytes = max(spec.page_size_bytes for spec in specs)
        config = vllm.specs.KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                vllm.specs.KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)
            ],
            prefix_cache_retention_interval=run["interval"],
        )
        self.manager = vllm.manager(
            kv_cache_config=config,
            max_model_len=1 << 21,
            scheduler_block_size=self.grid,
            hash_block_size=self.unit,
            max_in_flight_tokens=limits.step_tokens,
            enable_caching=True,
            use_eagle=False,
            log_stats=True,
            enable_kv_cache_events=False,
            watermark=0.0,
        )
        self.splitter = self._splitter() if config.has_mamba_layers else None
        self.hasher = vllm.block_hasher(self.unit, vllm.hash_function)
        self.figures = Figures()
        self.waiting: deque[Item] = deque()
        self.running: list[Item] = []
        self.sessions: dict[int, deque[Any]] = {}
        for number, row in enumerate(trace):
            self.sessions.setdefault(row[0], deque()).append((number, row))
        self.figures.hits = [0] * len(trace)
        for session in self.sessions:
            self._arrive(session)

    def _splitter(self) -> Any:
        """What `Scheduler._mamba_block_aligned_split` reads of a scheduler."""
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
            max_num_scheduled_tokens=self.limits.step_tokens,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            mamba_shared_prefix_checkpoint=False,
        )

    def _arrive(self, session: int) -> None:
        if self.sessions[session]:
            number, (_, prompt, output) = self.sessions[session].popleft()
            request = self.vllm.request(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=self.vllm.sampling,
                pooling_params=None,
                cache_salt=None,
                block_hasher=self.hasher,
            )
            self.waiting.append(Item(session, request, output))

    def _chunk(self, request: Any, tokens: int, hit_tokens: int = 0) -> int:
        if self.splitter is None:
            return tokens
        chunk: int = self.vllm.split(self.splitter, request, tokens, hit_tokens, 0)
        return chunk

    def _preempt(self, item: Item) -> None:
        self.manager.free(item.request)
        item.request.status = self.vllm.status.PREEMPTED
        item.request.num_computed_tokens = 0
        item.request.num_preemptions += 1
        self.figures.preemptions += 1
        self.waiting.appendleft(item)

    # ---- one step ------------------------------------------------------------------------------

    def _schedule_running(self, batch: list[tuple[Item, int]], budget: int) -> int:
        """Chunks for running requests, the oldest first; returns the budget that is left."""
        i = 0
        while i < len(self.running) and budget > 0:
            item = self.running[i]
            request = item.request
            chunk = min(request.num_tokens - request.num_computed_tokens, budget)
            chunk = self._chunk(request, chunk)
            if chunk:
                while self.manager.allocate_slots(request, chunk) is None:
                    victim = self.running.pop()
                    self._preempt(victim)
                    if victim is item:
                        return budget
                batch.append((item, chunk))
                budget -= chunk
            i += 1
        return budget

    def _admit(self, batch: list[tuple[Item, int]], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            item = self.waiting[0]
            request = item.request
            blocks, hit_tokens, junction = self.manager.get_computed_blocks(request)
            request.shared_prefix_boundary = junction
            chunk = self._chunk(request, min(request.num_tokens - hit_tokens, budget), hit_tokens)
            if not chunk:
                return
            granted = self.manager.allocate_slots(
                request,
                chunk,
                hit_tokens,
                blocks,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(self.running),
            )
            if granted is None:
                return
            self.waiting.popleft()
            request.status = self.vllm.status.RUNNING
            request.num_computed_tokens = hit_tokens
            self.running.append(item)
            batch.append((item, chunk))
            budget -= chunk
            self._count(item, hit_tokens)

    def _count(self, item: Item, hit_tokens: int) -> None:
        """The first admission counts; what a preempted request finds again does not."""
        if not item.counted:
            item.counted = True
            self.figures.requests += 1
            self.figures.prompt_tokens += item.request.num_prompt_tokens
            self.figures.hit_tokens += hit_tokens
            self.figures.hits[int(item.request.request_id)] = hit_tokens

    def _drain(self) -> None:
        """What a scheduler takes out of the manager in each step."""
        self.manager.take_new_block_ids()
        self.manager.take_boundary_state_offloads()
        _, retained = self.manager.take_kv_cache_block_copies()
        if retained:
            self.manager.block_pool.free_blocks(retained)
        self.manager.take_events()

    def _compute(self, item: Item, chunk: int) -> None:
        request = item.request
        if request.status != self.vllm.status.RUNNING:
            return
        request.num_computed_tokens += chunk
        self.figures.computed_tokens += chunk
        if request.num_computed_tokens < request.num_tokens:
            return
        if item.given < len(item.output):
            request.append_output_token_ids(item.output[item.given])
            item.given += 1
        if item.given >= len(item.output):
            request.status = self.vllm.status.FINISHED_STOPPED
            self.running.remove(item)
            self.manager.free(request)
            self._arrive(item.session)

    def run(self) -> dict[str, Any]:
        """Play the whole trace."""
        idle, figures, pool = 0, self.figures, self.manager.block_pool
        started = time.process_time()
        while self.waiting or self.running:
            figures.steps += 1
            self.manager.new_step_starts()
            batch: list[tuple[Item, int]] = []
            preemptions = figures.preemptions
            budget = self._schedule_running(batch, self.limits.step_tokens)
            if figures.preemptions == preemptions:  # after one, vLLM admits nobody in that step
                self._admit(batch, budget)
            idle = 0 if batch else idle + 1
            if idle == STALLED_STEPS:
                figures.stalled = True
                break
            self._drain()
            used = self.blocks - pool.get_num_free_blocks()
            figures.peak_used_blocks = max(figures.peak_used_blocks, used)
            for item, chunk in batch:
                self._compute(item, chunk)
        return {
            **figures.__dict__,
            "hit_rate": figures.hit_tokens / max(1, figures.prompt_tokens),
            "grid_tokens": self.grid,
            "block_bytes": self.block_bytes,
            "leaked_blocks": self.blocks - 1 - pool.get_num_free_blocks(),
            "cpu_seconds": time.process_time() - started,
        }


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer the request on stdin."""
    asked = json.load(sys.stdin)
    started = time.perf_counter()
    vllm = Vllm()
    environment = {
        "vllm": vllm.version,
        "torch": vllm.torch.__version__,
        "python": sys.version.split()[0],
        "import_seconds": time.perf_counter() - started,
    }
    _say(environment)
    limits = SimpleNamespace(max_running=asked["max_running"], step_tokens=asked["step_tokens"])
    for run in asked["runs"]:
        result = Replay(vllm, run, asked["trace"], limits).run()
        named = {key: run[key] for key in ("preset", "blocks", "interval")}
        _say({**named, **result})


if __name__ == "__main__":
    main()
