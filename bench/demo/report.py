"""What the demo says: figures of each mode, and whether the outputs agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import Any

import kvcache
from kvcache.bench.demo.play import RESTARTED, Played
from kvcache.bench.demo.restart import Restart
from kvcache.bench.demo.script import DemoSettings, Kit
from kvcache.bench.demo.turn import Turn
from kvcache.engine.chat import end_of_answer
from kvcache.engine.tokenizer import StreamDecoder

TIE_GAP = 1e-3
"""Greedy outputs may part where the reference's two best logits are closer than this: sums of
fp32 products depend in their last bits on how a prompt is cut into chunks."""


def compare(mode: str, reference: Sequence[Turn], others: Sequence[Turn]) -> dict[str, Any]:
    """Outputs turn by turn: `equal`, a `tie` (see `TIE_GAP`), or a difference that is a fault."""
    ties: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    for wanted, other in zip(reference, others, strict=True):
        pairs = zip(wanted.output, other.output, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
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
        "mode": mode,
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


def speedups(recomputed: Sequence[Turn], restored: Sequence[Turn]) -> list[float]:
    """Time to first token, recomputed over restored, for each turn that was restored."""
    return [
        a.first_token_seconds / b.first_token_seconds
        for a, b in zip(recomputed, restored, strict=True)
        if b.usage.host_tokens > 0 and a.recomputed_tokens > 0
    ]


def _gains(recomputed: Sequence[Turn], restored: Sequence[Turn]) -> dict[str, Any]:
    gains = speedups(recomputed, restored)
    return {
        "turns": len(gains),
        "median": median(gains) if gains else None,
        "least": min(gains, default=None),
    }


def _restart(restart: Restart, kit: Kit) -> dict[str, Any]:
    """The turns after the restart: in the new process, and recomputed."""
    turns = restart.restarted
    return {
        "process": restart.process,
        "first_process": os.getpid(),
        "start_seconds": restart.start_seconds,
        "disk_bytes": restart.disk_bytes,
        "device_pool_bytes": restart.device_bytes,
        "prompt_tokens": sum(t.usage.prompt_tokens for t in turns),
        "restored_tokens": sum(t.usage.host_tokens for t in turns),
        "device_tokens": sum(t.usage.device_tokens for t in turns),
        "computed_tokens": sum(t.usage.prompt_tokens - t.usage.cached_tokens for t in turns),
        "ttft_seconds": median(t.first_token_seconds for t in turns),
        "recomputed_ttft_seconds": median(t.first_token_seconds for t in restart.recomputed),
        "restored_over_recomputed": _gains(restart.recomputed, turns),
        "turns": _turn_rows(turns, kit),
    }


def record(
    settings: DemoSettings, kit: Kit, modes: Sequence[Played], restart: Restart | None
) -> dict[str, Any]:
    """Everything, as it goes into the file of `--output`."""
    by_mode = {p.mode: p for p in modes}
    shared = [t.shared_tokens for t in modes[0].turns if t.number > 0]
    return {
        "schema": "kvcache/demo/2",
        "version": kvcache.__version__,
        "model": kit.model.name,
        "note": kit.note,
        "how": "turns of all sessions alternate; time to first token at the engine, from"
        " add_request to the first token; one request at a time, no transfer in flight; each turn"
        " in all modes one after the other; medians; restart: one turn more of each session, in a new"
        " process that has the folder of the first one's disk, and recomputed in the first one",
        "sessions": settings.sessions,
        "turns": settings.turns,
        "seed": settings.seed,
        "context_tokens": settings.sessions * settings.session_tokens,
        "session_tokens": settings.session_tokens,
        "new_tokens": settings.new_tokens,
        "shared_tokens": {"least": min(shared, default=0), "most": max(shared, default=0)},
        "restored_over_recomputed": _gains(by_mode["recompute"].turns, by_mode["offload"].turns),
        "outputs": [
            *(compare(mode.mode, modes[0].turns, mode.turns) for mode in modes),
            *([compare(RESTARTED, restart.recomputed, restart.restarted)] if restart else []),
        ],
        "modes": {p.mode: summarize(p) | {"turns": _turn_rows(p.turns, kit)} for p in modes},
        "restart": _restart(restart, kit) if restart else None,
    }


def answer(kit: Kit, output: Sequence[int]) -> str:
    """Text of an output up to the end of the answer, without a character that is cut in two."""
    ends = end_of_answer(kit.tokenizer)
    shown = takewhile(lambda token: token not in ends, output)
    return "".join(map(StreamDecoder(kit.tokenizer).push, shown))


def _turn_rows(turns: Sequence[Turn], kit: Kit) -> list[dict[str, Any]]:
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
            "output": answer(kit, t.output),
        }
        for t in turns
    ]
