"""Far more requests than a pool holds: what scheduler and manager take of a step then.

All come at once, with random lengths and priorities, to a device pool of a twentieth of what they need
together; now and then one of them is aborted. No tier. All must end, and no page stay held.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache.bench.pools import STATES_PER_TURN, pages_for, slabs_for
from kvcache.bench.sessions_way import Stopwatch
from kvcache.core.manager import Manager
from kvcache.engine.engine import Engine, EngineSettings
from kvcache.engine.model import Model
from kvcache.engine.request import Finished, Reason
from kvcache.engine.runner import TorchRunner
from kvcache.retention import Sparse

REQUESTS = 64
PROMPT_TOKENS = (32, 97)
OUTPUT_TOKENS = (4, 13)
"""Drawn from these ranges."""
PRIORITIES = 3
POOL_SHARE = 0.05
"""Of what all requests need; one request at least."""
ABORTS = 0.02
"""How likely an abort is before a step."""


def measure_overload(model: Model, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Serve them all; the figures as plain values."""
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, model.vocab_size, n).astype(np.int32)
        for n in rng.integers(*PROMPT_TOKENS, REQUESTS)
    ]
    outputs = rng.integers(*OUTPUT_TOKENS, REQUESTS).tolist()
    lengths = [len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True)]
    geometry, pool_tokens = model.geometry, int(POOL_SHARE * sum(lengths))
    slabs = max(
        slabs_for(geometry, pages_for(geometry, pool_tokens, STATES_PER_TURN)),
        geometry.slabs_needed(max(lengths)),
    )
    runner = Stopwatch(TorchRunner(model, slabs))
    manager = Manager(
        geometry, slabs=slabs, movable=True, retention=Sparse(), fingerprint=model.fingerprint()
    )
    engine = Engine(runner, manager, settings=EngineSettings())
    left = [
        engine.add_request(prompt, max_new_tokens=output, priority=int(rng.integers(0, PRIORITIES)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    ended: Counter[str] = Counter()
    steps, cpu, begin = 0, 0.0, time.perf_counter()
    while engine.busy:
        progress(f"overload: {sum(ended.values())} of {REQUESTS} requests have ended")
        if left and rng.random() < ABORTS:
            engine.abort(left[int(rng.integers(len(left)))])
        started = time.thread_time()
        events = engine.step()
        cpu += time.thread_time() - started
        steps += 1
        for event in events:
            if isinstance(event, Finished):
                ended[event.reason.value] += 1
                left.remove(event.request)
    return {
        "requests": REQUESTS,
        "need_tokens": sum(lengths),
        "pool_bytes": slabs * geometry.slab_bytes,
        "ended": dict(ended),
        "preemptions": engine.counters.preemptions,
        "recomputed_tokens": engine.counters.recomputed_tokens,
        "steps": steps,
        "seconds": time.perf_counter() - begin,
        "scheduler_and_manager_cpu_seconds": cpu - runner.cpu_seconds,
        "scheduler_and_manager_share": 1.0 - runner.cpu_seconds / cpu,
        "held_pages": sum(size.held for size in manager.arena_stats().classes),
    }


def failed_overload(found: dict[str, Any]) -> list[str]:
    """What must not be: a request that came to no proper end, a page that is held by nobody."""
    proper = (Reason.LENGTH.value, Reason.ABORT.value)
    wrong = found["requests"] - sum(found["ended"].get(reason, 0) for reason in proper)
    failed = (
        [f"overload: {wrong} requests came to no proper end: {found['ended']}"] if wrong else []
    )
    if found["held_pages"]:
        failed.append(f"overload: {found['held_pages']} pages stayed held")
    return failed


def describe_overload(found: dict[str, Any]) -> list[str]:
    """For people."""
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(found["ended"].items()))
    return [
        "",
        (
            f"overload: {found['requests']} requests of {found['need_tokens']:,} tokens over"
            f" {found['pool_bytes'] >> 10:,} KiB ended ({ended}) in {found['steps']} steps,"
            f" {found['seconds']:.1f} s, with {found['preemptions']} preemptions"
        ),
    ]
