"""What the sessions of `kvcache bench engine` say: ratios, outputs compared, where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.bench.medium import describe_medium
from kvcache.bench.paged import Paged
from kvcache.bench.sessions_settings import SessionsBench
from kvcache.bench.sessions_way import Played, Turn
from kvcache.engine.model import Model

TIE_GAPS = {"fp32": 1e-3, "bf16": 0.05, "fp8": 0.5}
"""Greedy outputs may part where the reference's two best logits are closer than this, by the format of
K and V: sums of fp32 products depend in their last bits on how a prompt is cut into chunks, and on the
batch; what is stored shorter is rounded by them to one neighbour or the other."""


def sessions_report(
    bench: SessionsBench,
    model: Model,
    asked: Sequence[Sequence[NDArray[np.int32]]],
    played: Sequence[Played],
    found: dict[str, Any],
) -> dict[str, Any]:
    """The figures of all ways, as plain values. `found`: the medium of the disk tier."""
    reference, *others = played
    by_way = {p.way: p for p in played}
    seconds = {p.way: sum(p.round_seconds) for p in played}
    latency = {p.way: mean(turn.seconds for turn in _turns(p)) for p in played}
    outputs = [compare(model, asked, reference, other) for other in others]
    host = by_way["host"]
    return {
        "throughput_vs_recompute": seconds["recompute"] / seconds["host"],
        "latency_vs_recompute": latency["host"] / latency["recompute"],
        "host_vs_unlimited": seconds["unlimited"] / seconds["host"],
        "disk_vs_unlimited": seconds["unlimited"] / seconds["disk"],
        "host_vs_unthrottled": seconds["unthrottled"] / seconds["host"],
        "disk_throughput_vs_recompute": seconds["recompute"] / seconds["disk"],
        "disk_latency_vs_recompute": latency["disk"] / latency["recompute"],
        "outputs_equal": not any(o["differences"] for o in outputs),
        "scheduler_and_manager_share": max(_share(p) for p in played),
        "outputs": outputs,
        "rounds": {
            "throughput_vs_recompute": _by_round(by_way["recompute"], host),
            "host_vs_unlimited": _by_round(reference, host),
            "disk_vs_unlimited": _by_round(reference, by_way["disk"]),
        },
        "ways": {p.way: _figures(p) for p in played},
        "medium": found,
        "sessions": bench.sessions,
        "turns": bench.turns,
        "start_tokens": bench.start_tokens,
        "turn_tokens": bench.turn_tokens,
        "output_tokens": bench.output_tokens,
        "working_set_tokens": bench.working_set_tokens,
        "pool_tokens": bench.pool_tokens,
        "running": bench.running,
        "kv_dtype": model.kv_dtype,
        "draft_layers": bench.draft,
        "sessions_budget_tokens": bench.budget_tokens,
    }


def _turns(played: Played) -> Iterator[Turn]:
    return (turn for turns in played.rounds for turn in turns)


def _by_round(slow: Played, fast: Played) -> list[float]:
    return [a / b for a, b in zip(slow.round_seconds, fast.round_seconds, strict=True)]


def _share(played: Played) -> float:
    """Of the CPU time of steps that computed: what was not the runner's."""
    return 1.0 - played.runner_cpu_seconds / played.step_cpu_seconds


def _figures(played: Played) -> dict[str, Any]:
    turns = list(_turns(played))
    seconds = sum(played.round_seconds)
    output = sum(len(turn.output) for turn in turns)
    prompt = sum(turn.usage.prompt_tokens for turn in turns)
    hit = sum(turn.usage.cached_tokens for turn in turns)
    return {
        "seconds": seconds,
        "output_tokens_per_second": output / seconds,
        "mean_latency_seconds": mean(turn.seconds for turn in turns),
        "median_first_token_seconds": median(turn.first_token_seconds for turn in turns),
        "prompt_tokens": prompt,
        "device_tokens": sum(turn.usage.device_tokens for turn in turns),
        "restored_tokens": sum(turn.usage.host_tokens for turn in turns),
        "hit_rate": hit / prompt,
        "computed_tokens": prompt - hit,
        "output_tokens": output,
        "round_seconds": played.round_seconds,
        "steps": played.steps,
        "cpu_seconds": played.cpu_seconds,
        "runner_seconds": played.runner_seconds,
        "scheduler_and_manager_cpu_seconds": played.step_cpu_seconds - played.runner_cpu_seconds,
        "scheduler_and_manager_share": _share(played),
        "idle_seconds": played.idle_seconds,
        "settle_seconds": played.settle_seconds,
        "preemptions": played.preemptions,
        "failed_loads": played.failed_loads,
        "proposed_tokens": played.proposed_tokens,
        "accepted_tokens": played.accepted_tokens,
        "device_pool_bytes": played.device_bytes,
        "tier": played.tier,
    }


def compare(
    model: Model,
    asked: Sequence[Sequence[NDArray[np.int32]]],
    reference: Played,
    other: Played,
) -> dict[str, Any]:
    """Outputs turn by turn: equal, a tie (see `TIE_GAPS`), or a difference that is a fault.

    The reference's gap at a first difference is computed anew, from its own tokens up to there.
    """
    ties: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for number, turns in enumerate(zip(reference.rounds, other.rounds, strict=True)):
        for wanted, given in zip(*turns, strict=True):
            pairs = zip(wanted.output, given.output, strict=True)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is None:
                continue
            prompt = asked[number][wanted.session]
            text = np.concatenate([prompt, np.array(wanted.output[:at], np.int32)])
            entry = {
                "session": wanted.session + 1,
                "turn": number + 1,
                "token": at,
                "reference_gap": reference_gap(model, text),
            }
            (ties if entry["reference_gap"] < TIE_GAPS[model.kv_dtype] else differences).append(
                entry
            )
    return {"way": other.way, "ties": ties, "differences": differences}


def reference_gap(model: Model, tokens: NDArray[np.int32]) -> float:
    """By how much the best next token after these beats the second best."""
    with torch.inference_mode():
        paged = Paged(model, 1, len(tokens), np.random.default_rng(0))
        best = paged.prefill(tokens, 512)[0].topk(2).values
    return float(best[0] - best[1])


def describe_sessions(report: dict[str, Any]) -> list[str]:
    """The figures for people."""
    ways = report["ways"]
    lines = [
        "",
        (
            f"{report['sessions']} sessions of {report['turns']} turns: {report['start_tokens']} tokens,"
            f" then {report['turn_tokens']} more a turn, {report['output_tokens']} out;"
            f" {report['working_set_tokens']:,} tokens at the end, small pool"
            f" {report['pool_tokens']:,}, {report['running']} run at a time;"
            f" {describe_medium(report['medium'])}"
        ),
        f"{'':26}" + "".join(f"{way:>12}" for way in ways),
    ]
    for label, key, form in (
        ("output tokens/s", "output_tokens_per_second", "{:.2f}"),
        ("mean latency, s", "mean_latency_seconds", "{:.2f}"),
        ("median first token, s", "median_first_token_seconds", "{:.2f}"),
        ("hit rate", "hit_rate", "{:.3f}"),
        ("tokens computed", "computed_tokens", "{:,}"),
        ("tokens restored", "restored_tokens", "{:,}"),
        ("tokens on the device", "device_tokens", "{:,}"),
        ("seconds", "seconds", "{:.1f}"),
        ("  in the model", "runner_seconds", "{:.1f}"),
        ("  waiting for loads", "idle_seconds", "{:.2f}"),
        ("  transfers at the end", "settle_seconds", "{:.2f}"),
        ("CPU seconds", "cpu_seconds", "{:.1f}"),
        ("scheduler, manager: CPU s", "scheduler_and_manager_cpu_seconds", "{:.2f}"),
        ("  ... of a step", "scheduler_and_manager_share", "{:.2%}"),
        ("preemptions", "preemptions", "{:,}"),
    ):
        lines.append(f"{label:26}" + "".join(f"{form.format(w[key]):>12}" for w in ways.values()))
    verdicts = ["reference"] + [
        f"{len(o['differences'])} DIFFER"
        if o["differences"]
        else (f"{len(o['ties'])} ties" if o["ties"] else "equal")
        for o in report["outputs"]
    ]
    lines.append(f"{'outputs':26}" + "".join(f"{verdict:>12}" for verdict in verdicts))
    lines.append(
        f"host_vs_unthrottled {report['host_vs_unthrottled']:.3f}: beside a pool for all that runs all"
        " at a time; no aim"
    )
    return lines
