"""The paged engine against a plain dense forward of the same weights, in the same run.

The baseline (`kvcache.bench.dense`) takes prompts in one piece and pads decoding requests to the
longest; the engine's runner is driven as its scheduler drives it. Both sides take turns; a ratio is
the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from kvcache.bench.dense import Dense
from kvcache.bench.machine import machine
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.records import StatePlan
from kvcache.engine import smollm2, tiny
from kvcache.engine.chunk import Chunk
from kvcache.engine.kv_format import Rows
from kvcache.engine.layers.recurrence import States
from kvcache.engine.model import Model
from kvcache.engine.runner import TorchRunner

MODELS: dict[str, Callable[[], Model]] = {
    "smollm2": smollm2.load_model,
    "tiny": tiny.build_model,
}
DECODE_REQUESTS = 16
DECODE_CONTEXTS = (224, 289)
"""Decoding requests have contexts from this range: 256 on average, so that there is padding."""
DECODE_STEPS_PER_REPEAT = 4
MOST_THREADS = 256
"""Far beyond this, thread pools fail in ways that cannot be caught."""
MOST_REPEATS = 1000


def _option(name: str) -> str:
    """A setting as the command line has it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """What to measure."""

    model: str = "smollm2"
    threads: int = 1
    tokens: int = 1024
    """Length of the prompt."""
    budget_tokens: int = 512
    """The paged engine computes the prompt in chunks of this many, as under a scheduler."""
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"--model is {self.model!r}: choose from {', '.join(MODELS)}")
        for name in ("threads", "tokens", "budget_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_option(name)} is {getattr(self, name)}: it must be above 0")
        for name, most in (("threads", MOST_THREADS), ("repeats", MOST_REPEATS)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{_option(name)} is {getattr(self, name)}: at most {most} make sense"
                )


def hand_out(geometry: Geometry, pages: Sequence[int]) -> tuple[int, list[NDArray[np.int32]]]:
    """For a runner without a manager: how many slabs, and the page numbers of each group in them.

    `pages[g]` of group g, ascending; no two pages share a byte.
    """
    slabs, numbers = 0, [np.empty(0, np.int32)] * len(pages)
    for c, pages_per_slab in enumerate(geometry.pages_per_slab):
        page = slabs * pages_per_slab
        for group, of in enumerate(geometry.class_of_group):
            if of == c:
                numbers[group] = np.arange(page, page + pages[group], dtype=np.int32)
                page += pages[group]
        slabs = -(-page // pages_per_slab)
    return slabs, numbers


class Paged:
    """The engine's runner with pages in random order, driven as a scheduler drives it."""

    def __init__(self, model: Model, requests: int, context: int, rng: np.random.Generator) -> None:
        self.geometry = model.geometry
        need = [
            requests * (1 if rules.kind == "state" else -(-context // rules.block_tokens))
            for rules in self.geometry.rules
        ]
        slabs, numbers = hand_out(self.geometry, need)
        self.runner = TorchRunner(model, slabs)
        self._pages = [rng.permutation(pages).reshape(requests, -1) for pages in numbers]

    def chunk(self, request: int, tokens: NDArray[np.int32], start: int) -> Chunk:
        """A chunk that keeps the request's state in one page, in place."""
        end = np.array([start + len(tokens)])
        tables, states = [], []
        for group, rules in enumerate(self.geometry.rules):
            pages = self._pages[group][request]
            state = rules.kind == "state"
            tables.append(None if state else pages)
            source = -1 if start == 0 else int(pages[0])
            states.append(StatePlan(source, end, pages[:1]) if state else None)
        return Chunk(tokens, start, tables, states)

    def copy(self, dense: Dense) -> None:
        """Take over the K, V and states of the baseline."""
        model = self.runner.model
        caches = model.caches(self.runner.storage)
        for cache, memory, groups in zip(caches, dense.memory, model.groups, strict=True):
            pages = torch.from_numpy(self._pages[groups[0]]).long()
            if isinstance(cache, Rows):
                kv, block = torch.stack(memory), cache.pages.shape[2]
                padded = F.pad(kv, (0, 0, 0, pages.shape[1] * block - dense.context))
                blocks = padded.view(*padded.shape[:3], -1, block, padded.shape[4])
                cache.write((pages,), blocks.permute(1, 3, 0, 4, 2, 5).flatten(4))
            else:
                assert isinstance(cache, States)
                cache.matrix[pages[:, 0]] = memory[0]
                cache.tail[pages[:, 0]] = memory[1].transpose(1, 2)

    def prefill(self, tokens: NDArray[np.int32], budget: int) -> Tensor:
        """Logits after a prompt, computed in chunks of at most `budget` tokens."""
        for start in range(0, len(tokens), budget):
            self.runner.run([self.chunk(0, tokens[start : start + budget], start)])
        return self.runner.last_logits

    def decode(self, tokens: NDArray[np.int32], lengths: NDArray[np.int64]) -> Tensor:
        """Logits after one more token for each request."""
        steps = zip(tokens.reshape(-1, 1), lengths.tolist(), strict=True)
        self.runner.run([self.chunk(r, token, length) for r, (token, length) in enumerate(steps)])
        return self.runner.last_logits


@torch.inference_mode()
def run_engine_bench(bench: EngineBench, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure both sides; the report as plain values. `progress` takes a line now and then."""
    before = torch.get_num_threads()
    torch.set_num_threads(bench.threads)
    try:
        progress(f"loading {bench.model}")
        model = MODELS[bench.model]()
        if bench.tokens > model.context_tokens:
            raise ConfigError(
                f"--tokens is {bench.tokens}: the model's context has {model.context_tokens}"
            )
        rng = np.random.default_rng(bench.seed)
        prefill = _measure_prefill(bench, model, rng, progress)
        decode = _measure_decode(bench, model, rng, progress)
    finally:
        torch.set_num_threads(before)
    return {
        "bench": "engine",
        "model": model.name,
        "prompt_tokens": bench.tokens,
        "budget_tokens": bench.budget_tokens,
        "decode_requests": DECODE_REQUESTS,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "prefill_vs_dense": prefill["ratio"],
        "decode16_vs_padded": decode["ratio"],
        "prefill": prefill,
        "decode16": decode,
        "machine": _machine(bench.threads),
    }


def _measure_prefill(
    bench: EngineBench, model: Model, rng: np.random.Generator, progress: Callable[[str], None]
) -> dict[str, Any]:
    tokens = rng.integers(0, model.vocab_size, bench.tokens).astype(np.int32)
    paged, dense = Paged(model, 1, bench.tokens, rng), Dense(model, 1, bench.tokens)
    return _compare(
        lambda: paged.prefill(tokens, bench.budget_tokens),
        lambda: dense.prefill(torch.from_numpy(tokens)),
        tokens=bench.tokens,
        repeats=bench.repeats,
        progress=lambda i: progress(f"prefill of {bench.tokens} tokens, {i} of {bench.repeats}"),
    )


def _measure_decode(
    bench: EngineBench, model: Model, rng: np.random.Generator, progress: Callable[[str], None]
) -> dict[str, Any]:
    lengths = rng.integers(*DECODE_CONTEXTS, DECODE_REQUESTS)
    context = int(lengths.max()) + 1
    paged = Paged(model, DECODE_REQUESTS, context, rng)
    dense = Dense(model, DECODE_REQUESTS, context)
    dense.fill(bench.seed)
    paged.copy(dense)
    tokens = rng.integers(0, model.vocab_size, DECODE_REQUESTS).astype(np.int32)
    return _compare(
        lambda: paged.decode(tokens, lengths),
        lambda: dense.decode(torch.from_numpy(tokens), torch.from_numpy(lengths)),
        tokens=DECODE_REQUESTS,
        repeats=bench.repeats * DECODE_STEPS_PER_REPEAT,
        progress=lambda i: progress(f"decode step {i}"),
    )


def _compare(
    paged: Callable[[], Tensor],
    dense: Callable[[], Tensor],
    *,
    tokens: int,
    repeats: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Time both in turns, each first in every other pair; compare what they compute."""
    seconds: dict[str, list[float]] = {"paged": [], "dense": []}
    differences, agree = [], True
    for repeat in range(-1, repeats):
        logits = {}
        sides = [("paged", paged), ("dense", dense)]
        for name, call in sides if repeat % 2 else reversed(sides):
            start = time.perf_counter()
            logits[name] = call()
            taken = time.perf_counter() - start
            if repeat >= 0:  # the pair before the first warms up
                seconds[name].append(taken)
        ours, theirs = logits["paged"], logits["dense"]
        differences.append(float((ours - theirs).abs().max()))
        agree = agree and bool((ours.argmax(-1) == theirs.argmax(-1)).all())
        progress(repeat + 1)
    ratios = [d / p for p, d in zip(seconds["paged"], seconds["dense"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "paged_tokens_per_second": tokens / statistics.median(seconds["paged"]),
        "dense_tokens_per_second": tokens / statistics.median(seconds["dense"]),
        "max_logit_difference": float(np.max(differences)),
        "same_next_tokens": agree,
    }


def _machine(threads: int) -> dict[str, Any]:
    return {
        **machine(),
        "threads": threads,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def describe(report: dict[str, Any]) -> Sequence[str]:
    """The report as lines for people."""
    machine = report["machine"]
    machine_line = (
        f"{report['model']}, fp32, {machine['threads']} of {machine['cpus']} CPUs,"
        f" {machine['processor']}, load {machine['load_average']:.1f}"
    )
    head = f"{'':12}{'paged tok/s':>14}{'dense tok/s':>14}{'ratio':>8}   max logit difference"
    lines = [machine_line, head]
    lines += [
        f"{name:12}{part['paged_tokens_per_second']:14.1f}{part['dense_tokens_per_second']:14.1f}"
        f"{part['ratio']:8.3f}   {part['max_logit_difference']:.1e}"
        + ("" if part["same_next_tokens"] else "  (next tokens differ)")
        for name, part in ((n, report[n]) for n in ("prefill", "decode16"))
    ]
    return lines
