"""Random traces, and naive models of the cache that a replay of them is compared with."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.bench.replay import Replay
from kvcache.bench.replay_settings import ReplaySettings
from kvcache.bench.traces import TraceRequest
from kvcache.core.layout import Geometry

BLOCK = 512  # of a Mooncake trace
MOST_BLOCKS = 12  # of a random prompt: with its reply it fits in one step of 8,192 tokens


def random_trace(seed: int, count: int = 60) -> list[TraceRequest]:
    """Requests that continue, cut and repeat each other's prompts."""
    draw = random.Random(seed)
    paths: list[list[int]] = [[]]
    made = 0
    requests = []
    for line in range(1, count + 1):
        known = draw.choice(paths[-8:])
        path = known[: draw.choice((len(known), draw.randint(0, len(known))))]
        grown = draw.randint(0 if path else 1, MOST_BLOCKS - len(path))
        path = path + list(range(made, made + grown))
        made += grown
        paths.append(path)
        prompt = len(path) * BLOCK + draw.choice((0, 1, draw.randrange(BLOCK)))
        blocks = np.array(path, np.int64)
        output = draw.choice((0, 1, 2, 300, 1500))
        requests.append(TraceRequest(line, float(line), "", 0, prompt, output, blocks))
    return requests


def serve_all(
    requests: Iterable[TraceRequest],
    settings: ReplaySettings,
    trace_block: int = BLOCK,
    geometry: Geometry | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """Hit tokens of each request, and the report at the end."""
    replay = Replay(Path("trace"), trace_block, settings, geometry=geometry)
    hits, before = [], 0
    for request in requests:
        replay.serve(request)
        total = replay.report()["hit_tokens"]
        hits.append(total - before)
        before = total
    return hits, replay.report()


def naive_lru(requests: Iterable[TraceRequest], merge: int, pages: int) -> list[int]:
    """An LRU cache of `pages` blocks: one request at a time, its pages pinned, tail evicted first."""
    cached: OrderedDict[int, None] = OrderedDict()
    block, hits = BLOCK * merge, []
    for request in requests:
        keys, prompt = request.blocks.tolist()[merge - 1 :: merge], request.prompt_tokens
        run = 0
        while run < (prompt - 1) // block and keys[run] in cached:
            run += 1
        held = keys[:run]
        for key in held:
            del cached[key]
        while len(cached) + -(-prompt // block) > pages:
            cached.popitem(last=False)
        for key in keys[run:]:  # computed again: the older page is freed
            cached.pop(key, None)
        held = list(keys)
        while len(cached) + -(-(prompt + max(0, request.output_tokens - 1)) // block) > pages:
            cached.popitem(last=False)
        for key in reversed(held):
            cached[key] = None
        hits.append(run * block)
    return hits


def naive_states(
    requests: Iterable[TraceRequest], interval: int | None
) -> tuple[list[int], int, int]:
    """An infinite cache of attention and recurrent states: hits, and states written.

    Those that a policy wants, and those that only the end of a turn leaves.
    """
    blocks: set[int] = set()
    states: set[int] = set()
    hits, at_end = [], 0
    for request in requests:
        keys, prompt = request.blocks.tolist(), request.prompt_tokens
        run = 0
        while run < (prompt - 1) // BLOCK and keys[run] in blocks:
            run += 1
        hit = max(p for p in range(run + 1) if p == 0 or keys[p - 1] in states)
        keep = {(prompt - 1) // BLOCK, run}
        if interval != 0:
            step = (interval or BLOCK) // BLOCK
            keep |= set(range(step, len(keys) + 1, step))
        states |= {keys[p - 1] for p in keep if hit < p <= len(keys)}
        if hit < len(keys) and keys[-1] not in states:
            states.add(keys[-1])
            at_end += 1
        blocks |= set(keys)
        hits.append(hit * BLOCK)
    return hits, len(states) - at_end, at_end


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> Path:
    """A Mooncake file; the partial last block gets an id of its own."""
    with path.open("w") as stream:
        for r in requests:
            ids = r.blocks.tolist() + ([10**6 + r.line] if r.prompt_tokens % BLOCK else [])
            fields = {
                "timestamp": r.line,
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": ids,
            }
            stream.write(json.dumps(fields) + "\n")
    return path
