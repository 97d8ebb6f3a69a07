"""`kvcache replay TRACE`: a trace through the real block manager, one request after the other."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvcache.bench.replay import Replay, play
from kvcache.bench.replay_settings import DEFAULT_PRESET, ReplaySettings, fitting_block
from kvcache.bench.traces import LaneSettings, TraceRequest, open_trace
from kvcache.commands.numbers import (
    SUFFIXES,
    hours,
    pool_size,
    retention,
    token_count,
    whole_number,
)
from kvcache.commands.output import (
    Progress,
    also_in,
    emit_json,
    require_apart,
    require_writable,
)
from kvcache.core.errors import ConfigError
from kvcache.presets import names
from kvcache.presets.find import config_files
from kvcache.presets.serving import KV_DTYPES

HELP = (
    "Runs a request trace through the block manager: hit rate against an infinite cache, and where"
    " the other tokens went."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, how to replay it, and what else to do."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--oracle",
        choices=("bytes",),
        help="also play every request on a page-exact LRU of as many bytes, without slabs",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the manager's invariants as it goes; `checks` in the result says how often",
    )
    parser.add_argument("--output", metavar="FILE", help="write the JSON to a file too")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace and how to replay it."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="Mooncake .jsonl or .jsonl.gz (512-token blocks), or prefix-tree .csv or .csv.gz"
        " (64-token blocks)",
    )
    parser.add_argument(
        "--preset",
        default=DEFAULT_PRESET,
        metavar="NAME",
        help=f"KV geometry: {', '.join(names())} (default: {DEFAULT_PRESET}, one full-attention"
        " group), or the path of a config.json or of its folder",
    )
    parser.add_argument(
        "--tp",
        type=whole_number,
        default=1,
        metavar="N",
        help="tensor-parallel ranks: pages are those of one of them (default: 1)",
    )
    parser.add_argument(
        "--dcp",
        type=whole_number,
        default=1,
        metavar="N",
        help="context-parallel ranks: a page spans so many times --block-tokens (default: 1)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="format of K, V and latent rows (default: auto, bf16 where the model has no own one)",
    )
    parser.add_argument(
        "--block-tokens",
        type=token_count,
        metavar="N",
        help="tokens per page, a multiple of the trace's block (default: that block, or the smallest"
        f" multiple that the model can have); {SUFFIXES}",
    )
    parser.add_argument(
        "--pool-tokens",
        type=pool_size,
        metavar="N|inf",
        help="size of the pool as tokens of KV, such as 2.56M or 512Ki; states and windows share its"
        f" bytes (default: inf); {SUFFIXES}",
    )
    parser.add_argument(
        "--retention",
        type=retention,
        default=0,
        metavar="dense|0|N",
        help="recurrent states and windows to keep: all, the reusable ones, or also every N tokens"
        " (default: 0, the reusable ones)",
    )
    parser.add_argument(
        "--lanes",
        type=whole_number,
        metavar="N",
        help="live sessions side by side, of a prefix-tree trace (default: file order, one session"
        " after another)",
    )
    parser.add_argument(
        "--hours",
        type=hours,
        metavar="H",
        help="with --lanes: simulated hours after 10 minutes of warm-up (default: 1)",
    )
    parser.add_argument(
        "--no-moves",
        action="store_true",
        help="an engine that cannot copy pages: cached ones stay where they are",
    )


def open_replay(
    args: argparse.Namespace, *, oracle: bool = False, check: bool = False
) -> tuple[Replay, Iterator[TraceRequest]]:
    """A replay as `add_trace_arguments` describes it, and the requests to serve."""
    lanes = lane_settings(args)
    trace = open_trace(args.trace)
    serving = {"preset": args.preset, "tp": args.tp, "dcp": args.dcp, "kv_dtype": args.kv_dtype}
    block_tokens = args.block_tokens
    if block_tokens is None:
        block_tokens = fitting_block(trace.block_tokens, **serving)
    settings = ReplaySettings(
        block_tokens=block_tokens,
        pool_tokens=args.pool_tokens,
        **serving,
        retention_tokens=args.retention,
        movable=not args.no_moves,
        oracle=oracle,
        check=check,
        seed=args.seed,
    )
    return Replay(trace.path, trace.block_tokens, settings), iter(trace.requests(lanes))


def run(args: argparse.Namespace) -> int:
    """Replay; 0 if no block leaked, else 1."""
    if args.output is not None:
        require_writable(args.output)
        require_apart(args.output, [args.trace, *config_files(args.preset)])
    started, used = time.perf_counter(), time.process_time()
    replay, requests = open_replay(args, oracle=args.oracle is not None, check=args.check)
    count = 0
    with Progress() as progress:
        for count, _ in enumerate(play(replay, requests), 1):
            progress.update(f"replay: {count} requests, {time.perf_counter() - started:.0f} s")
    lanes = lane_settings(args)
    report = replay.report() | {
        "played_requests": count,
        "lanes": args.lanes,
        "hours": None if lanes is None else lanes.hours,
        "wall_seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
    }
    with also_in(args.output, report):
        if args.json:
            emit_json(report)
        else:
            sys.stdout.write("\n".join(describe(report)) + "\n")
            sys.stdout.flush()
    return 1 if report["leaked_blocks"] else 0


def lane_settings(args: argparse.Namespace) -> LaneSettings | None:
    """What `--lanes` and `--hours` ask for."""
    if args.lanes is None:
        if args.hours is not None:
            raise ConfigError(f"--hours {args.hours} needs --lanes: it is how long lanes live")
        return None
    hours = 1.0 if args.hours is None else args.hours
    return LaneSettings(lanes=args.lanes, hours=hours, seed=args.seed)


def _describe_preset(report: dict[str, Any]) -> str:
    ranks = f"TP {report['tp']}" + (f", DCP {report['dcp']}" if report["dcp"] > 1 else "")
    return f"{report['preset']}, {ranks}, KV {report['kv_dtype']}, retention {report['retention']}"


def _describe_pool(report: dict[str, Any]) -> str:
    tokens, blocks = report["pool_tokens"], report["block_tokens"]
    pages = ", ".join(f"{count:,} {name}" for name, count in report["pages_per_slab"].items())
    grid = (
        ""
        if report["grid_tokens"] == blocks
        else f", hits on multiples of {report['grid_tokens']:,}"
    )
    if tokens == "inf":
        return f"without bound, blocks of {blocks} tokens{grid}"
    return (
        f"{tokens:,} tokens in blocks of {blocks}{grid}: {report['pool_slabs']:,} slabs of"
        f" {report['slab_bytes'] / 2**20:,.1f} MiB, pages in one: {pages}"
    )


def _describe_requests(report: dict[str, Any]) -> str:
    text = f"{report['requests']:,}"
    if report["lanes"] is None:
        return text
    warm_up = report["played_requests"] - report["requests"]
    return (
        f"{text} in {report['lanes']} lanes and {report['hours']:g} hours, lines played again among"
        f" them; {warm_up:,} before, as warm-up"
    )


def _describe_rates(report: dict[str, Any]) -> str:
    text = f"{report['hit_rate']:.4f}  (ideal {report['ideal_hit_rate']:.4f}"
    if report["oracle_hit_rate"] is not None:
        text += f", page-exact LRU {report['oracle_hit_rate']:.4f}"
    return text + ")"


def describe(report: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    prompt = report["prompt_tokens"]
    rows = [
        ("trace", report["trace"]),
        ("preset", _describe_preset(report)),
        ("pool", _describe_pool(report)),
        ("requests", _describe_requests(report)),
        ("prompt tokens", f"{prompt:,}"),
        ("hit rate", _describe_rates(report)),
    ]
    rows += [
        (f"lost: {cause.replace('_', ' ')}", f"{tokens / max(1, prompt):.4f}  ({tokens:,} tokens)")
        for cause, tokens in report["lost_tokens_by_cause"].items()
        if tokens
    ]
    policy = report["checkpoints_per_request"]
    end = report["end_of_turn_checkpoints_per_request"]
    if policy or end:
        rows.append(("states kept", f"{policy:.2f} per request, {end:.2f} at the end of the turn"))
    if report["reclaimed_slabs"]:
        rows.append(
            (
                "slabs reclaimed",
                f"{report['reclaimed_slabs']:,}, {report['moved_pages']:,} pages moved",
            )
        )
    rows += [
        ("peak used", f"{report['peak_used_bytes'] / 2**30:,.1f} GiB"),
        ("leaked blocks", str(report["leaked_blocks"])),
        *([("checks", f"{report['checks']:,}")] if report["checks"] else []),
        ("wall time", f"{report['wall_seconds']:.1f} s"),
        ("processor time", f"{report['cpu_seconds']:.1f} s"),
        (
            "of that",
            "{manager_seconds:.1f} s manager, {explain_seconds:.1f} s causes".format(**report),
        ),
    ]
    rows += [("note", text) for text in report["notes"]]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]
