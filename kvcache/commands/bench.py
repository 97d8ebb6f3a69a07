"""`kvcache bench NAME`: one part of the library measured on this machine."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcache.bench import aims
from kvcache.commands.bench_options import add_options
from kvcache.commands.output import (
    Progress,
    also_in,
    emit_json,
    require_apart,
    require_writable,
)
from kvcache.core.errors import ConfigError
from kvcache.engine.model_file import find_model_file

HELP = "Measures one part of the library on this machine, beside a baseline in the same run."

Run = Callable[[dict[str, Any], int, Callable[[str], None]], tuple[dict[str, Any], Sequence[str]]]
"""Given options, seed and a progress sink: the report, and its lines for people."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which benchmark, and its options; what is not given is left to the benchmark."""
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--output", metavar="FILE", help="write the JSON to a file too")
    owners: dict[str, tuple[str, ...]] = {}
    parser.set_defaults(owners=owners)
    add_options(parser, owners)


def _engine(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    # Read by OpenMP when torch loads it: idle threads that spin starve other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    bench = importlib.import_module("kvcache.bench.engine")
    given = {**(bench.QUICK if given.pop("quick", False) else {}), **given}
    threads = given.pop("threads", len(os.sched_getaffinity(0)))
    own = {name: given.pop(name) for name in bench.OWN_SETTINGS if name in given}
    sessions = bench.SessionsBench(seed=seed, **given)
    settings = bench.EngineBench(seed=seed, threads=threads, sessions=sessions, **own)
    report = bench.run_engine_bench(settings, progress)
    return report, bench.describe(report)


def _agents(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    bench = importlib.import_module("kvcache.bench.agents")
    names = {"trace": "traces", "preset": "presets", "interval": "intervals"}
    settings = {names.get(name, name): value for name, value in given.items()}
    if "traces" in settings:
        trace = settings.pop("traces")
        settings |= {} if trace == "both" else {"traces": (trace,)}
    if "declare" in settings:
        settings["declare"] = (settings["declare"],)
    report = bench.run_agents_bench(bench.AgentsBench(seed=seed, **settings), progress)
    return report, bench.describe(report)


def _inputs(bench: str, given: dict[str, Any]) -> list[str | Path]:
    """Files that a benchmark reads or runs."""
    if bench in {"copy", "disk"}:
        return []
    if bench in {"engine", "offload"}:
        model = find_model_file()
        return [] if model is None else [model]
    peer = importlib.import_module("kvcache.bench.peer")
    python = given.get("peer_python") or os.environ.get(peer.PYTHON_VARIABLE, "")
    return [*peer.SCRIPTS.glob("*.py"), shutil.which(python) or python]


def _hash(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    bench = importlib.import_module("kvcache.bench.hash")
    settings = {**(bench.QUICK if given.pop("quick", False) else {}), **given}
    report = bench.run_hash_bench(bench.HashBench(seed=seed, **settings), progress)
    return report, bench.describe(report)


def _manager(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    bench = importlib.import_module("kvcache.bench.manager")
    settings = {**(bench.QUICK if given.pop("quick", False) else {}), **given}
    report = bench.run_manager_bench(bench.ManagerBench(seed=seed, **settings), progress)
    return report, bench.describe(report)


def _disk(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    bench = importlib.import_module("kvcache.bench.disk")
    report = bench.run_disk_bench(bench.DiskBench(seed=seed, **given), progress)
    return report, bench.describe(report)


def _copy(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in _engine
    bench = importlib.import_module("kvcache.bench.copy")
    if "size" in given:
        given["sizes"] = tuple(given.pop("size"))
    settings = {**(bench.QUICK if given.pop("quick", False) else {}), **given}
    report = bench.run_copy_bench(bench.CopyBench(seed=seed, **settings), progress)
    return report, bench.describe(report)


def _offload(
    given: dict[str, Any], seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, Any], Sequence[str]]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in _engine
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    bench = importlib.import_module("kvcache.bench.offload")
    settings = {**(bench.QUICK if given.pop("quick", False) else {}), **given}
    names = {"tier": "tiers", "size": "page_bytes", "count": "counts"}
    settings = {names.get(name, name): value for name, value in settings.items()}
    report = bench.run_offload_bench(bench.OffloadBench(seed=seed, **settings), progress)
    return report, bench.describe(report)


BENCHES: dict[str, Run] = {
    "agents": _agents,
    "copy": _copy,
    "disk": _disk,
    "engine": _engine,
    "hash": _hash,
    "manager": _manager,
    "offload": _offload,
}
"""By name; what a benchmark needs is imported when it runs."""


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0, or 1: something came out wrong, or `--require` and an aim missed."""
    if args.output is not None:
        require_writable(args.output)
    given = {name: value for name, value in vars(args).items() if name in args.owners}
    for name in given:
        if args.name not in args.owners[name]:
            owners = " and ".join(f"`bench {owner}`" for owner in args.owners[name])
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of {owners}, not of `bench {args.name}`"
            )
    if args.output is not None:
        require_apart(args.output, _inputs(args.name, given))
    require, quick = given.pop("require", False), given.get("quick", False)
    if require and quick:
        raise ConfigError("--require: aims hold at full size only, leave out --quick")
    with Progress() as progress:
        report, lines = BENCHES[args.name](given, args.seed, progress.update)
    if quick and report.pop("missed", None) is not None:
        lines = [*lines, "With --quick nothing is held against the aims: they are for full size."]
    with also_in(args.output, report):
        if args.json:
            emit_json(report)
        else:
            sys.stdout.write("\n".join([*lines, *aims.describe(report)]) + "\n")
            sys.stdout.flush()
    return 0 if aims.verdict(report, require=require) else 1
