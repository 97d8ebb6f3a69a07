"""`kvcache bench offload`: a tier by itself, through the real connector and driver.

For each tier, page size and number of pages: a request's pages are stored, the device forgets them,
another request with the same prompt looks them up and loads them. Beside it, in the same rounds, the
same number of bytes is copied plainly: from memory to memory in one piece, and through one file that
is synced and then read with a cold cache. And a prompt of a million tokens is looked up again and
again, as a scheduler does while a request waits. Last, a model loads or computes what a tier has: see
`kvcache.bench.loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvcache.bench.folder import temporary_folder
from kvcache.bench.machine import machine
from kvcache.bench.medium import describe_medium, medium
from kvcache.bench.offload_rig import BLOCK_TOKENS, PAGE_UNIT, Rig, Seconds
from kvcache.bench.plain_copies import PlainCopies
from kvcache.core.errors import ConfigError

TIERS = ("host", "disk", "chain")
QUICK = {
    "model": "tiny",
    "size": [4 << 10, 64 << 10],
    "count": [1, 16],
    "repeats": 2,
    "tokens": 16_384,
    "allow_tmpfs": True,
}
MODELS = ("auto", "smollm2", "tiny", "none")
LOOKUPS = 32
LOOKUP_PAGE_BYTES = 64
MOST_LOOKUP_SECONDS = 200e-6
"""Of a repeated lookup of up to 1M tokens, the aim. vLLM 0.33's offloading connectors take 53 to 197 ms."""
MOST_LOOKUP_TOKENS = 1_000_000
MOST_BYTES = 8 << 30
MOST_TOKENS = 16 << 20
MOST_REPEATS = 1000

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class OffloadBench:
    """What to measure: each tier with each page size and each number of pages."""

    tiers: Sequence[str] = TIERS
    page_bytes: Sequence[int] = (4 << 10, 64 << 10, 720 << 10)
    """720 KiB: 16 tokens of SmolLM2-135M in float32."""
    counts: Sequence[int] = (1, 16, 256)
    tokens: int = 1_000_000
    """Of the prompt that is looked up again and again."""
    model: str = "auto"
    """That loads or computes: `smollm2`, `tiny`, `auto` (the first where it is installed), `none`."""
    repeats: int = 3
    folder: str | None = None
    """None: a temporary one."""
    allow_tmpfs: bool = False
    """The folder may be in memory."""
    seed: int = 0

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier not in TIERS:
                raise ConfigError(f"--tier is {tier!r}: choose from {', '.join(TIERS)}")
        if self.model not in MODELS:
            raise ConfigError(f"--model is {self.model!r}: choose from {', '.join(MODELS)}")
        for size in self.page_bytes:
            if size < PAGE_UNIT or size % PAGE_UNIT:
                raise ConfigError(f"--size is {size} bytes: give a multiple of {PAGE_UNIT}")
        for name, values, most in (
            ("count", self.counts, MOST_BYTES // PAGE_UNIT),
            ("repeats", (self.repeats,), MOST_REPEATS),
            ("tokens", (self.tokens,), MOST_TOKENS),
        ):
            for value in values:
                if not 1 <= value <= most:
                    raise ConfigError(f"--{name} is {value}: it must be 1 to {most:,}")
        largest = max(self.page_bytes) * max(self.counts)
        if largest > MOST_BYTES:
            raise ConfigError(
                f"--count {max(self.counts)} of --size {max(self.page_bytes)} are {largest} bytes:"
                f" at most {MOST_BYTES}"
            )
        if self.tokens < 2 * BLOCK_TOKENS:
            raise ConfigError(f"--tokens is {self.tokens}: at least {2 * BLOCK_TOKENS}")


def run_offload_bench(bench: OffloadBench, progress: Progress) -> dict[str, Any]:
    """Measure; the report as plain values.

    Raises:
        ConfigError: less memory or disk than is asked for, or a folder that cannot be used.
    """
    transfers: list[dict[str, Any]] = []
    lookups: dict[str, dict[str, float]] = {}
    with temporary_folder(bench.folder) as folder:
        found = medium(folder, allow_tmpfs=bench.allow_tmpfs or set(bench.tiers) == {"host"})
        for size in bench.page_bytes:
            for count in bench.counts:
                transfers += _transfers(bench, size, count, folder, progress)
        for tier in bench.tiers:
            progress(f"lookups of {bench.tokens:,} tokens, {tier}")
            lookups[tier] = _lookups(bench, tier, folder / f"lookup-{tier}")
        choices, slower = _loads(bench, folder, progress)
    return {
        "bench": "offload",
        "transfers": transfers,
        "lookup_tokens": bench.tokens,
        "lookups": lookups,
        "limits": {"repeated_lookup_seconds": MOST_LOOKUP_SECONDS},
        "loads": choices,
        "missed": _missed_lookups(bench.tokens, lookups) + slower,
        "medium": found,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "machine": machine(),
    }


def _loads(
    bench: OffloadBench, folder: Path, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    """Loads beside computing, and what of them misses its aim."""
    if bench.model == "none":
        return {"rows": []}, []
    from kvcache.bench import loads  # noqa: PLC0415  (it loads torch)

    tiers = [tier for tier in loads.TIERS if tier in bench.tiers]
    choices = loads.measure_loads(
        loads.load_model(bench.model), tiers, bench.repeats, folder, bench.seed, progress
    )
    return choices, loads.missed_loads(choices)


def _missed_lookups(tokens: int, lookups: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"{tier}: repeated lookup of {tokens:,} tokens {taken['repeated_seconds'] * 1e6:.0f} us,"
        f" aim: at most {MOST_LOOKUP_SECONDS * 1e6:.0f}"
        for tier, taken in lookups.items()
        if tokens <= MOST_LOOKUP_TOKENS and taken["repeated_seconds"] > MOST_LOOKUP_SECONDS
    ]


def _transfers(
    bench: OffloadBench, size: int, count: int, folder: Path, progress: Progress
) -> list[dict[str, Any]]:
    """One row for each tier: medians of all rounds. The rounds of all tiers take turns."""
    plain = PlainCopies(size * count, folder / "plain")
    rigs: dict[str, Rig] = {}
    taken: dict[str, list[Seconds]] = {tier: [] for tier in bench.tiers}
    copied: list[dict[str, float]] = []
    try:
        for tier in bench.tiers:
            rigs[tier] = Rig(tier, folder / f"{tier}-{size}-{count}", size, count, bench.seed)
        for repeat in range(-1, bench.repeats):  # the one before the first touches all memory
            progress(f"{count} pages of {size:,} bytes, round {repeat + 1} of {bench.repeats}")
            for tier, rig in rigs.items():
                seconds = rig.round()
                if repeat >= 0:
                    taken[tier].append(seconds)
            times = plain.round()
            if repeat >= 0:
                copied.append(times)
    finally:
        for rig in rigs.values():
            rig.close()
    plainly = {name: median(times[name] for times in copied) for name in copied[0]}
    return [_row(tier, size, count, taken[tier], plainly) for tier in bench.tiers]


def _row(
    tier: str, size: int, count: int, rounds: Sequence[Seconds], plainly: dict[str, float]
) -> dict[str, Any]:
    total = size * count
    seconds = {
        name: median(values)
        for name in Seconds._fields
        if (values := [v for r in rounds if (v := getattr(r, name)) is not None])
    }
    plain_store, plain_load = ("memcpy", "memcpy")
    if tier == "disk":
        plain_store, plain_load = ("file_write", "file_read")
    row: dict[str, Any] = {
        "tier": tier,
        "page_bytes": size,
        "pages": count,
        "store_bytes_per_second": total / seconds["store"],
        "load_bytes_per_second": total / seconds["load"],
        "store_vs_plain": plainly[plain_store] / seconds["store"],
        "load_vs_plain": plainly[plain_load] / seconds["load"],
        "plain": [plain_store, plain_load],
        "seconds": seconds,
        "plain_seconds": plainly,
        "per_page_seconds": {
            name: seconds[name] / count for name in ("lookup", "plan_load", "plan_store")
        },
    }
    if "load_below" in seconds:
        row["load_below_bytes_per_second"] = total / seconds["load_below"]
        row["load_below_vs_file"] = plainly["file_read"] / seconds["load_below"]
    return row


def _lookups(bench: OffloadBench, tier: str, folder: Path) -> dict[str, float]:
    pages = -(-bench.tokens // BLOCK_TOKENS)
    rig = Rig(tier, folder, LOOKUP_PAGE_BYTES, pages, bench.seed, spare=4 * LOOKUPS)
    try:
        first, *again = rig.lookups(bench.tokens, 1 + LOOKUPS, beside_stores=LOOKUPS)
    finally:
        rig.close()
    again, beside = again[:LOOKUPS], again[LOOKUPS:]
    return {
        "first_seconds": first[0],
        "first_cpu_seconds": first[1],
        "repeated_seconds": median(seconds for seconds, _ in again),
        "repeated_cpu_seconds": median(cpu for _, cpu in again),
        "repeated_seconds_worst": max(seconds for seconds, _ in again),
        "repeated_beside_stores_seconds": median(seconds for seconds, _ in beside),
    }


def describe(report: dict[str, Any]) -> Sequence[str]:
    """The report for people."""
    machine = report["machine"]
    lines = [
        (
            f"{machine['processor']}, {machine['cpus']} CPUs, load {machine['load_average']:.1f};"
            f" medians of {report['repeats']}; x: beside the plain copy of the same bytes (host, chain:"
            f" memory; disk: a synced file, and a cold read); {describe_medium(report['medium'])}"
        ),
        (
            f"{'tier':6}{'page KiB':>9}{'pages':>7}{'store GB/s':>12}{'x':>6}{'load GB/s':>11}{'x':>6}"
            f"{'from below':>12}{'load, ms':>10}{'CPU us a page: lookup':>23}{'plan load':>11}{'plan store':>12}"
        ),
    ]
    for row in report["transfers"]:
        below = row.get("load_below_bytes_per_second")
        each = row["per_page_seconds"]
        lines.append(
            f"{row['tier']:6}{row['page_bytes'] / 1024:9g}{row['pages']:7}"
            f"{row['store_bytes_per_second'] / 1e9:12.3f}{row['store_vs_plain']:6.2f}"
            f"{row['load_bytes_per_second'] / 1e9:11.3f}{row['load_vs_plain']:6.2f}"
            f"{'' if below is None else format(below / 1e9, '.3f'):>12}"
            f"{row['seconds']['load'] * 1e3:10.3f}{each['lookup'] * 1e6:23.2f}"
            f"{each['plan_load'] * 1e6:11.2f}{each['plan_store'] * 1e6:12.2f}"
        )
    most = report["limits"]["repeated_lookup_seconds"]
    lines += [
        f"lookup of {report['lookup_tokens']:,} tokens, {tier}: first {t['first_seconds'] * 1e3:.2f}"
        f" ms ({t['first_cpu_seconds'] * 1e3:.2f} of CPU), again {t['repeated_seconds'] * 1e3:.3f} ms"
        f" ({t['repeated_cpu_seconds'] * 1e3:.3f}; aim at 1M: at most {most * 1e3:g}), when others"
        f" have stored {t['repeated_beside_stores_seconds'] * 1e3:.3f} ms"
        for tier, t in report["lookups"].items()
    ]
    if report["loads"]["rows"]:
        from kvcache.bench import loads  # noqa: PLC0415  (it loads torch)

        lines += loads.describe_loads(report["loads"])
    return lines
