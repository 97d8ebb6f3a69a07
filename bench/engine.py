"""`kvcache bench engine`: what tiers are worth to the engine, and what paging costs it.

*Sessions* return to a device pool too small for them: see `kvcache.bench.sessions`. *Floors*: the
paged engine against a plain dense forward of the same weights (`kvcache.bench.dense`), which takes
prompts in one piece and pads decoding requests to the longest; the engine's runner is driven as its
scheduler drives it. Both sides take turns; a ratio is the median over the pairs. *Overload*: see
`kvcache.bench.overload`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.bench.aims import missed
from kvcache.bench.dense import Dense
from kvcache.bench.machine import machine
from kvcache.bench.overload import describe_overload, failed_overload, measure_overload
from kvcache.bench.paged import Paged
from kvcache.bench.sessions import play_sessions
from kvcache.bench.sessions_report import describe_sessions, sessions_report
from kvcache.bench.sessions_settings import SessionsBench
from kvcache.core.errors import ConfigError
from kvcache.engine import smollm2, tiny
from kvcache.engine.model import Model

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
OWN_SETTINGS = ("kv_dtype", "model", "part", "repeats", "tokens")
"""Of `EngineBench` on the command line; the others are those of its sessions."""
TARGETS = {
    "throughput_vs_recompute": 1.82,
    "host_vs_unlimited": 0.95,
    "disk_vs_unlimited": 0.90,
    "prefill_vs_dense": 0.85,
    "decode_vs_padded": 0.8,
}
"""At least. The first one, and the latency below, are what vLLM reports for its CPU offload against
recomputing: +81.7 % output throughput, 46.6 % less mean end-to-end latency."""
LIMITS = {
    "latency_vs_recompute": 0.53,
    "scheduler_and_manager_share": 0.02,
    "overload_share": 0.02,
}
"""At most; the shares are those of scheduler and manager, of sessions and under overload."""
PARTS = ("all", "sessions", "floors", "overload")
QUICK = {
    "model": "tiny",
    "tokens": 128,
    "repeats": 2,
    "sessions": 6,
    "turns": 3,
    "start_tokens": 192,
    "turn_tokens": 32,
    "output_tokens": 8,
    "allow_tmpfs": True,
}
"""Seconds, to see that it works."""


def _option(name: str) -> str:
    """A setting as the command line has it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """What to measure."""

    model: str = "smollm2"
    part: str = "all"
    """Or one alone: `sessions`, `floors`, `overload`."""
    kv_dtype: str = "fp32"
    """Of K and V in the pages of the sessions; the dense forward has fp32 alone."""
    sessions: SessionsBench = field(default_factory=SessionsBench)
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
        if self.part not in PARTS:
            raise ConfigError(f"--part is {self.part!r}: choose from {', '.join(PARTS)}")
        if self.kv_dtype != "fp32" and self.part in {"all", "floors"}:
            raise ConfigError(
                f"--kv-dtype is {self.kv_dtype}: the dense forward keeps fp32, so give --part sessions or overload"
            )
        for name in ("threads", "tokens", "budget_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_option(name)} is {getattr(self, name)}: it must be above 0")
        for name, most in (("threads", MOST_THREADS), ("repeats", MOST_REPEATS)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{_option(name)} is {getattr(self, name)}: at most {most} make sense"
                )


def run_engine_bench(bench: EngineBench, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure; the report as plain values. `progress` takes a line now and then."""
    before = torch.get_num_threads()
    torch.set_num_threads(bench.threads)
    try:
        progress(f"loading {bench.model}")
        model = MODELS[bench.model]()
        if bench.kv_dtype != model.kv_dtype:
            model = Model(model.weights, kv_dtype=bench.kv_dtype)
        report: dict[str, Any] = {
            "bench": "engine",
            "model": model.name,
            "kv_dtype": model.kv_dtype,
            "seed": bench.seed,
        }
        if bench.part in {"all", "floors"}:
            report |= _floors(bench, model, progress)
        if bench.part in {"all", "overload"}:
            overload = measure_overload(model, bench.seed, progress)
            report |= {
                "overload": overload,
                "overload_share": overload["scheduler_and_manager_share"],
            }
        if bench.part in {"all", "sessions"}:
            played = play_sessions(bench.sessions, model, progress)
            report |= sessions_report(bench.sessions, model, *played)
    finally:
        torch.set_num_threads(before)
    return report | {
        "targets": TARGETS,
        "limits": LIMITS,
        "failed": _failed(report),
        "missed": missed(report, TARGETS, LIMITS),
        "machine": _machine(bench.threads),
    }


def _failed(report: dict[str, Any]) -> list[str]:
    """Outputs that differ, where they must not."""
    failed = [
        f"{part}: the paged engine has other next tokens than the dense forward, logits differ by up"
        f" to {report[part]['max_logit_difference']:.1e}"
        for part in ("prefill", "decode")
        if part in report and not report[part]["same_next_tokens"]
    ]
    if "overload" in report:
        failed += failed_overload(report["overload"])
    return failed + [
        f"{len(outputs['differences'])} outputs over {outputs['way']} differ from those of the"
        " reference"
        for outputs in report.get("outputs", ())
        if outputs["differences"]
    ]


@torch.inference_mode()
def _floors(bench: EngineBench, model: Model, progress: Callable[[str], None]) -> dict[str, Any]:
    if bench.tokens > model.context_tokens:
        raise ConfigError(
            f"--tokens is {bench.tokens}: the model's context has {model.context_tokens}"
        )
    rng = np.random.default_rng(bench.seed)
    prefill = _measure_prefill(bench, model, rng, progress)
    decode = _measure_decode(bench, model, rng, progress)
    return {
        "prompt_tokens": bench.tokens,
        "budget_tokens": bench.budget_tokens,
        "decode_requests": DECODE_REQUESTS,
        "repeats": bench.repeats,
        "prefill_vs_dense": prefill["ratio"],
        "decode_vs_padded": decode["ratio"],
        "prefill": prefill,
        "decode": decode,
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
    lines = [
        (
            f"{report['model']}, {report['kv_dtype']}, {machine['threads']} of {machine['cpus']} CPUs,"
            f" {machine['processor']}, load {machine['load_average']:.1f}"
        )
    ]
    if "prefill" in report:
        lines.append(
            f"{'':12}{'paged tok/s':>14}{'dense tok/s':>14}{'ratio':>8}   max logit difference"
        )
        lines += [
            f"{name:12}{part['paged_tokens_per_second']:14.1f}"
            f"{part['dense_tokens_per_second']:14.1f}{part['ratio']:8.3f}"
            f"   {part['max_logit_difference']:.1e}"
            + ("" if part["same_next_tokens"] else "  (next tokens differ)")
            for name, part in ((n, report[n]) for n in ("prefill", "decode"))
        ]
    if "overload" in report:
        lines += describe_overload(report["overload"])
    if "ways" in report:
        lines += describe_sessions(report)
    aims = {name: f"at least {value}" for name, value in report["targets"].items()}
    aims |= {name: f"at most {value}" for name, value in report["limits"].items()}
    return [*lines, ""] + [
        f"{name:30}{report[name]:8.3f}   aim: {aim}" for name, aim in aims.items() if name in report
    ]
