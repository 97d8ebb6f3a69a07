"""What the demo says: figures of each mode, and whether the outputs agree."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import kvcache
from kvcache.bench.demo.play import Played
from kvcache.bench.demo.script import DemoSettings, Kit
from kvcache.engine.tokenizer import decode

TIE_GAP = 1e-3
"""Greedy outputs may part where the reference's two best logits are closer than this: sums of
fp32 products depend in their last bits on how a prompt is cut into chunks."""


def compare(reference: Played, other: Played) -> dict[str, Any]:
    """Outputs turn by turn: `equal`, a `tie` (see `TIE_GAP`), or a difference that is a fault."""
    ties: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    for wanted, got in zip(reference.turns, other.turns, strict=True):
        at = next((i for i, t in enumerate(wanted.output) if got.output[i] != t), None)
        if at is None:
            continue
        entry = {
            "session": wanted.session + 1,
            "turn": wanted.number + 1,
            "token": at,
            "reference_gap": wanted.gaps[at],
        }
        (ties if wanted.gaps[at] < TIE_GAP else faults).append(entry)
    return {
        "mode": other.mode,
        "identical": not ties and not faults,
        "ties": ties,
        "differences": faults,
    }


def summarize(played: Played) -> dict[str, Any]:
    """The figures of one mode; times are medians in seconds."""
    first = [t.first_token_seconds for t in played.turns if t.number == 0]
    returning = [t.first_token_seconds for t in played.turns if t.number > 0]
    outputs = sum(t.usage.output_tokens for t in played.turns)
    return {
        "first_turn_ttft_seconds": median(first),
        "returning_ttft_seconds": median(returning) if returning else None,
        "returning_ttft_worst_seconds": max(returning, default=None),
        "prompt_tokens": sum(t.usage.prompt_tokens for t in played.turns),
        "recomputed_tokens": sum(t.recomputed_tokens for t in played.turns),
        "restored_tokens": sum(t.usage.host_tokens for t in played.turns),
        "device_hit_tokens": sum(t.usage.device_tokens for t in played.turns),
        "output_tokens": outputs,
        "output_tokens_per_second": outputs / played.seconds,
        "wall_seconds": played.seconds,
        "device_pool_bytes": played.device_bytes,
        "host_pool_bytes": played.host_bytes,
        "host_used_bytes": played.host_used_bytes,
    }


def speedups(recompute: Played, offload: Played) -> list[float]:
    """Time to first token, recomputed over restored, for each turn that was restored."""
    return [
        a.first_token_seconds / b.first_token_seconds
        for a, b in zip(recompute.turns, offload.turns, strict=True)
        if b.usage.host_tokens > 0 and a.recomputed_tokens > 0
    ]


def record(settings: DemoSettings, kit: Kit, modes: Sequence[Played]) -> dict[str, Any]:
    """Everything, as it goes into `demo.json`."""
    by_mode = {p.mode: p for p in modes}
    gains = speedups(by_mode["recompute"], by_mode["offload"])
    shared = [t.shared_tokens for t in modes[0].turns if t.number > 0]
    return {
        "schema": "kvcache/demo/1",
        "version": kvcache.__version__,
        "model": kit.model.name,
        "note": kit.note,
        "how": "time to first token at the engine, from add_request to the first token; one request"
        " at a time, no transfer in flight; each turn in all modes one after the other; medians",
        "sessions": settings.sessions,
        "turns": settings.turns,
        "seed": settings.seed,
        "context_tokens": settings.sessions * settings.session_tokens,
        "session_tokens": settings.session_tokens,
        "new_tokens": settings.new_tokens,
        "shared_tokens": {"least": min(shared, default=0), "most": max(shared, default=0)},
        "restored_over_recomputed": {
            "turns": len(gains),
            "median": median(gains) if gains else None,
            "least": min(gains, default=None),
        },
        "outputs": [compare(modes[0], other) for other in modes[1:]],
        "modes": {p.mode: summarize(p) | {"turns": _turn_rows(p, kit)} for p in modes},
    }


def _turn_rows(played: Played, kit: Kit) -> list[dict[str, Any]]:
    return [
        {
            "session": t.session + 1,
            "turn": t.number + 1,
            "prompt_tokens": t.usage.prompt_tokens,
            "shared_tokens": t.shared_tokens,
            "device_hit_tokens": t.usage.device_tokens,
            "restored_tokens": t.usage.host_tokens,
            "recomputed_tokens": t.recomputed_tokens,
            "ttft_seconds": t.first_token_seconds,
            "output": decode(kit.tokenizer, t.output),
        }
        for t in played.turns
    ]
