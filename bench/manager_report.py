"""The figures of `kvcache bench manager`: medians, the peer's over ours, and what is aimed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.bench.aims import missed
from kvcache.bench.sides import OURS, PEER, summary

TARGETS = {
    "lookup_hit_1m_b16": 20.0,
    "lookup_cold_1m_b16": 15.0,
    "allocate_commit_1m_b16": 30.0,
    "allocate_evict_1m_b16": 15.0,
    "free_1m_b16": 20.0,
    "free_1m_b16_churned": 10.0,
    "chunked_prefill_1m_dsv4": 100.0,
    "decode_step_256": 40.0,
    "build_pool_1m": 50.0,
    "bytes_per_cached_block": 3.5,
}
"""The least that the peer's time (or bytes) over ours should be."""

FULL_TOKENS = 1_000_000
FULL_REQUESTS = 256
"""N, and the batch, for which `TARGETS` and `LIMITS` are set; smaller runs are to see that it works."""

LIMITS = {"linearity": 2.2, "lookup_blocked_1m_ms": 0.2}
"""The most that figures of ours alone should be."""

ABOUT = {
    "lookup_hit_1m_b16": "full-hit lookup of N tokens, block 16, hashes known",
    "lookup_cold_1m_b16": "hash and look up N tokens",
    "lookup_blocked_1m": "look up again while blocked",
    "lookup_blocked_1m_evicting": "the same, pages go meanwhile",
    "allocate_commit_1m_b16": "allocate and commit N tokens, fresh pool",
    "allocate_evict_1m_b16": "the same, every page evicts one",
    "allocate_evict_1m_b16_churned": "the same, shuffled pool",
    "free_1m_b16": "free N tokens",
    "free_1m_b16_churned": "the same, shuffled pool",
    "chunked_prefill_1m_dsv4": "prefill N tokens in chunks of 2,048, DeepSeek V4",
    "chunked_prefill_2m_dsv4": "the same, 2N tokens",
    "decode_step_gptoss": "decode step of the batch, gpt-oss",
    "decode_step_gemma3": "the same, Gemma 3",
    "decode_step_kimi_k3": "the same, Kimi K3",
    "decode_step_dsv4": "the same, DeepSeek V4",
    "build_pool_1m": "build a pool of N blocks",
    "bytes_per_cached_block": "bytes for each cached block, all in",
    "bytes_per_held_block": "the same, held by open requests",
}
"""What the figures are of, in the order of the table."""

_OF_OURS = {
    "linearity": "2N tokens in chunks take {:.2f} times as long as N",
    "lookup_blocked_1m_ms": "a blocked request is looked up again in {:.3f} ms",
}
"""Those of `LIMITS`."""

_DECODE = "decode_step_"
_BYTES = {
    "bytes_per_cached_block": ("closed",),
    "bytes_per_held_block": ("pool", "records", "keys_and_tables"),
}
"""The parts of what `manager_work.Work.memory` measures that are in a figure."""


def report_of(
    samples: dict[str, dict[str, list[float]]],
    memory: dict[str, dict[str, float]],
    *,
    requests: int,
) -> dict[str, Any]:
    """The measured part of the report.

    Args:
        samples: seconds, by work and side.
        memory: bytes for each block, by side and part; see `manager_work.Work.memory`.
        requests: of a decode step.
    """
    work: dict[str, Any] = {
        name: {"unit": "seconds", **{side: summary(found) for side, found in by_side.items()}}
        for name, by_side in samples.items()
    }
    for name, of in _BYTES.items():
        sums = {side: sum(parts[part] for part in of) for side, parts in memory.items()}
        work[name] = {"unit": "bytes", **{side: summary([total]) for side, total in sums.items()}}
    ratios = {
        name: row[PEER]["median"] / row[OURS]["median"] for name, row in work.items() if PEER in row
    }
    if ratios:
        ratios[f"{_DECODE}256"] = min(r for n, r in ratios.items() if n.startswith(_DECODE))
    chunked = [work[f"chunked_prefill_{n}m_dsv4"][OURS]["median"] for n in (1, 2)]
    slowest = max(row[OURS]["median"] for name, row in work.items() if name.startswith(_DECODE))
    return {
        "ratios": ratios,
        "targets": TARGETS,
        "limits": LIMITS,
        "linearity": chunked[1] / chunked[0],
        "lookup_blocked_1m_ms": 1000 * work["lookup_blocked_1m"][OURS]["median"],
        "decode_us_per_request": 1e6 * slowest / requests,
        "work": work,
        "bytes_per_block": memory,
    }


def missed_aims(report: dict[str, Any]) -> list[str]:
    """What misses its target or limit; at a smaller size than theirs nothing does."""
    if report["tokens"] < FULL_TOKENS:
        return []
    targets = dict(TARGETS)
    if report["decode_requests"] < FULL_REQUESTS:
        del targets[f"{_DECODE}256"]
    return missed(report["ratios"], targets, {}) + missed(report, {}, LIMITS)


# ---- for people ----------------------------------------------------------------------------------


def describe(report: dict[str, Any]) -> Sequence[str]:
    """A table: work, ours, the peer's, their ratio, and the ratio that is aimed at."""
    about, peer = report["machine"], report["peer"]
    settings = (
        f"N = {report['tokens']}, pool of {report['pool_blocks']} blocks, batch of"
        f" {report['decode_requests']} at {report['decode_context']} tokens; medians of CPU seconds,"
        f" one thread, {about['processor']}, load {about['load_average']:.1f}"
    )
    full = report["tokens"] >= FULL_TOKENS  # what is aimed at holds there
    full_batch = full and report["decode_requests"] >= FULL_REQUESTS
    beside = f"{_peer_title(peer):>14}{'ratio':>9}{'at least' if full else '':>10}" if peer else ""
    lines = [settings, f"{'':52}{'ours':>12}{beside}"]
    ratios, targets = report["ratios"], report["targets"]
    for name, text in ABOUT.items():
        row = report["work"][name]
        target = targets.get(name)
        if name.startswith(_DECODE):
            target = targets["decode_step_256"] if full_batch else None
        line = f"{text:52}{_cell(row, OURS):>12}"
        if peer:
            line += f"{_cell(row, PEER):>14}"
            line += f"{ratios[name]:9.1f}" if name in ratios else f"{'':9}"
            if full and target:
                line += f"{target:10g}" + ("  missed" if ratios.get(name, target) < target else "")
        lines.append(line.rstrip())
    for name, text in _OF_OURS.items():
        value, limit = report[name], report["limits"][name]
        aim = f"at most {limit:g}" if full else "no aim at this size"
        verdict = ", missed" if full and value > limit else ""
        lines.append(f"{text.format(value)} ({aim}{verdict})")
    for side, parts in report["bytes_per_block"].items():
        named = ", ".join(f"{part.replace('_', ' ')} {size:.1f}" for part, size in parts.items())
        lines.append(f"bytes for each block, {side}: {named}")
    return lines


def _peer_title(peer: dict[str, Any]) -> str:
    return f"vLLM {peer.get('vllm')}"


def _cell(row: dict[str, Any], side: str) -> str:
    if side not in row:
        return ""
    value = row[side]["median"]
    if row["unit"] == "bytes":
        return f"{value:.1f} B"
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
