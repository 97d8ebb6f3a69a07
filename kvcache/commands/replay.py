"""`kvcache replay TRACE`: a trace through the real block manager, at once or in simulated time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvcache.bench.replay import Replay, play
from kvcache.bench.replay_settings import (
    DEFAULT_PRESET,
    STEP_TOKENS,
    ReplaySettings,
    fitting_block,
)
from kvcache.bench.replay_timed import TimedReplay
from kvcache.bench.replay_timing import (
    MAX_REQUESTS,
    MAX_SPEED,
    TimingSettings,
    pool_tokens_beside,
)
from kvcache.bench.traces import Arrivals, LaneSettings, TraceFile, TraceRequest, open_trace
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
from kvcache.commands.replay_words import describe
from kvcache.core.errors import ConfigError
from kvcache.engine.simulated_hardware import HARDWARE, parse_hardware
from kvcache.presets import names
from kvcache.presets.find import config_files
from kvcache.presets.serving import KV_DTYPES
from kvcache.presets.weights import parse_weights

UNSET = object()
"""Of `--pool-tokens`: not given, which is not the same as `inf`."""

HELP = (
    "Runs a request trace through the block manager: hit rate against an infinite cache, and where"
    " the other tokens went. Without --hardware there is no scheduler: each request is served alone, at"
    " once, in order, so that no hit rate shows queueing, preemption, or pages that running requests"
    " hold. With --hardware the engine's own scheduler serves them in simulated time: these show, and"
    " latencies, and a host tier."
)

TIMED_FLAGS = ("weights", "token_budget", "max_requests", "host_tokens", "speed")
"""That say nothing without `--hardware`."""


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
    add_timing_arguments(parser)


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """How time passes."""
    group = parser.add_argument_group(
        "simulated time",
        "With --hardware the engine's scheduler serves the trace; without it nothing below counts.",
    )
    group.add_argument(
        "--hardware",
        metavar="NAME|FIGURES",
        help=f"device of each rank: {', '.join(HARDWARE)}, or figures such as"
        " flops=989T,memory=3.35T,capacity=80G,link=53G, or both: h100,link=25G",
    )
    group.add_argument(
        "--weights",
        metavar="FIGURES",
        help="of a model that is no preset, or in its place: parameters=8.03G,query_heads=32, with"
        " active=, experts= and chosen= for routed experts",
    )
    group.add_argument(
        "--token-budget",
        type=token_count,
        metavar="N",
        help=f"most tokens of a step (default: {STEP_TOKENS})",
    )
    group.add_argument(
        "--max-requests",
        type=whole_number,
        metavar="N",
        help=f"most requests that run at a time (default: {MAX_REQUESTS})",
    )
    group.add_argument(
        "--host-tokens",
        type=token_count,
        metavar="N",
        help="a host tier of the size of so many tokens of KV (default: none)",
    )
    group.add_argument(
        "--speed",
        type=float,
        metavar="X",
        help="without --lanes: arrivals X times as fast as recorded (default: 1)",
    )


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
        default=UNSET,
        metavar="N|inf",
        help="size of the pool as tokens of KV, such as 2.56M or 512Ki; states and windows share its"
        " bytes (default: inf; of replay --hardware what its memory holds beside the weights);"
        f" {SUFFIXES}",
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


def read_settings(
    args: argparse.Namespace, trace: TraceFile, *, oracle: bool = False, check: bool = False
) -> ReplaySettings:
    """What `add_trace_arguments` describes; the pool unbounded where it is not given."""
    serving = {"preset": args.preset, "tp": args.tp, "dcp": args.dcp, "kv_dtype": args.kv_dtype}
    block_tokens = args.block_tokens
    if block_tokens is None:
        block_tokens = fitting_block(trace.block_tokens, **serving)
    return ReplaySettings(
        block_tokens=block_tokens,
        pool_tokens=None if args.pool_tokens is UNSET else args.pool_tokens,
        **serving,
        retention_tokens=args.retention,
        movable=not args.no_moves,
        oracle=oracle,
        check=check,
        seed=args.seed,
    )


def open_replay(
    args: argparse.Namespace, *, oracle: bool = False, check: bool = False
) -> tuple[Replay, Iterator[TraceRequest]]:
    """A replay as `add_trace_arguments` describes it, and the requests to serve."""
    lanes = lane_settings(args)
    trace = open_trace(args.trace)
    settings = read_settings(args, trace, oracle=oracle, check=check)
    return Replay(trace.path, trace.block_tokens, settings), iter(trace.requests(lanes))


def open_timed(args: argparse.Namespace) -> tuple[TimedReplay, Arrivals]:
    """A replay in simulated time, and who comes when."""
    lanes = lane_settings(args)
    if args.oracle is not None:
        raise ConfigError(
            f"--oracle {args.oracle} serves one request at a time: not with --hardware"
        )
    if args.speed is not None and (lanes is not None or not 0 < args.speed <= MAX_SPEED):
        raise ConfigError(
            f"--speed is {args.speed}: it must be above 0, up to {MAX_SPEED:g}, and without --lanes,"
            " whose sessions wait for their answers"
        )
    given = {n: getattr(args, n) for n in TIMED_FLAGS[1:4] if getattr(args, n) is not None}
    timing = TimingSettings(
        hardware=parse_hardware(args.hardware),
        hardware_name=args.hardware,
        weights=None if args.weights is None else parse_weights(args.weights),
        **given,
    )
    trace = open_trace(args.trace)
    settings = read_settings(args, trace, check=args.check)
    if args.pool_tokens is UNSET:
        pool_tokens = pool_tokens_beside(timing.roofline(settings))
        settings = replace(settings, pool_tokens=pool_tokens)
    replay = TimedReplay(trace.path, trace.block_tokens, settings, timing)
    return replay, trace.arrivals(lanes, speed=1.0 if args.speed is None else args.speed)


def run(args: argparse.Namespace) -> int:
    """Replay; 0 if no block leaked, else 1."""
    if args.output is not None:
        require_writable(args.output)
        require_apart(args.output, [args.trace, *config_files(args.preset)])
    started, used = time.perf_counter(), time.process_time()
    report = _timed(args, started) if args.hardware is not None else _at_once(args, started)
    lanes = lane_settings(args)
    report |= {
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


def _at_once(args: argparse.Namespace, started: float) -> dict[str, Any]:
    given = [f"--{n.replace('_', '-')}" for n in TIMED_FLAGS if getattr(args, n) is not None]
    if given:
        raise ConfigError(f"{given[0]} needs --hardware: without it no time passes")
    replay, requests = open_replay(args, oracle=args.oracle is not None, check=args.check)
    count = 0
    with Progress() as progress:
        for count, _ in enumerate(play(replay, requests), 1):
            progress.update(f"replay: {count} requests, {time.perf_counter() - started:.0f} s")
    return replay.report() | {"played_requests": count}


def _timed(args: argparse.Namespace, started: float) -> dict[str, Any]:
    replay, arrivals = open_timed(args)
    played = 0
    with Progress() as progress:

        def told(count: int) -> None:
            nonlocal played
            played = count
            wall = time.perf_counter() - started
            progress.update(
                f"replay: {count} requests, {replay.clock.now:,.0f} s simulated, {wall:.0f} s"
            )

        replay.run(arrivals, told)
    return replay.report() | {"played_requests": played}


def lane_settings(args: argparse.Namespace) -> LaneSettings | None:
    """What `--lanes` and `--hours` ask for."""
    if args.lanes is None:
        if args.hours is not None:
            raise ConfigError(f"--hours {args.hours} needs --lanes: it is how long lanes live")
        return None
    hours = 1.0 if args.hours is None else args.hours
    return LaneSettings(lanes=args.lanes, hours=hours, seed=args.seed)
