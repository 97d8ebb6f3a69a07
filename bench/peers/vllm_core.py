"""Replays an agent trace through vLLM's own `KVCacheManager`, on a CPU, with no model.

Run by `kvcache bench agents --peer vllm --peer-python PATH` in an environment that has vLLM (0.33.0
is what its figures were checked with) and needs nothing of kvcache. One JSON object on stdin:

    {"trace": [[session, [prompt tokens], [output tokens]], ...],
     "max_running": 4, "step_tokens": 8192,
     "runs": [{"preset": "gemma3", "groups": [...], "blocks": 11933, "interval": null}, ...]}

What a group is: see `vllm_pool`. Stdout has one JSON object a line: the environment first, then one
for each run.

The driver is a scheduler with nothing around it: one step at a time, first come, first served, a
budget of tokens for each step, running requests before waiting ones, a turn arrives when the one
before it has finished. Chunks are cut by vLLM's own scheduler code.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from kvcache.bench.peers.vllm_pool import Pool, Vllm
else:  # run as a program
    from vllm_pool import Pool, Vllm

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


class Replay:
    """One pool, one retention interval, one trace."""

    def __init__(self, vllm: Vllm, run: dict[str, Any], trace: list[Any], limits: Any) -> None:
        self.pool = Pool(vllm, run["groups"], run["blocks"], run["interval"], limits.step_tokens)
        self.vllm, self.limits, self.manager = vllm, limits, self.pool.manager
        self.figures = Figures()
        self.waiting: deque[Item] = deque()
        self.running: list[Item] = []
        self.sessions: dict[int, deque[Any]] = {}
        for number, row in enumerate(trace):
            self.sessions.setdefault(row[0], deque()).append((number, row))
        self.figures.hits = [0] * len(trace)
        for session in self.sessions:
            self._arrive(session)

    def _arrive(self, session: int) -> None:
        if self.sessions[session]:
            number, (_, prompt, output) = self.sessions[session].popleft()
            request = self.pool.request(str(number), prompt)
            self.waiting.append(Item(session, request, output))

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
            chunk = self.pool.chunk(request, chunk)
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
            chunk = self.pool.chunk(
                request, min(request.num_tokens - hit_tokens, budget), hit_tokens
            )
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
        idle, figures, pool = 0, self.figures, self.pool
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
            self.pool.drain()
            used = pool.blocks - pool.free_blocks
            figures.peak_used_blocks = max(figures.peak_used_blocks, used)
            for item, chunk in batch:
                self._compute(item, chunk)
        return {
            **figures.__dict__,
            "hit_rate": figures.hit_tokens / max(1, figures.prompt_tokens),
            "grid_tokens": pool.grid,
            "block_bytes": pool.block_bytes,
            "leaked_blocks": pool.blocks - 1 - pool.free_blocks,
            "cpu_seconds": time.process_time() - started,
        }


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer the request on stdin."""
    asked = json.load(sys.stdin)
    vllm = Vllm()
    _say(vllm.environment())
    limits = SimpleNamespace(max_running=asked["max_running"], step_tokens=asked["step_tokens"])
    for run in asked["runs"]:
        result = Replay(vllm, run, asked["trace"], limits).run()
        named = {key: run[key] for key in ("preset", "blocks", "interval")}
        _say({**named, **result})


if __name__ == "__main__":
    main()
