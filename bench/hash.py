"""`kvcache bench hash`: how fast a prompt's block hashes are made, for several block sizes.

Ours in C++, a plain chain with Python's `hashlib` over the same bytes, and with `--peer vllm` the
functions that vLLM offers: `sha256` (pickle) and `sha256_cbor`. Each side starts from the tokens as
it holds them (an int32 array, a list) and ends with the hashes as it holds them. One thread, CPU seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.bench.machine import machine
from kvcache.bench.peer import PEER_SECONDS, check_peer, check_seconds, peer_python
from kvcache.bench.sides import OURS, PEER, Side, Sides, open_sides, summary
from kvcache.core.errors import ConfigError

BLOCK_TOKENS = (4, 16, 128, 256)
OUR_ALGORITHMS = ("kvcache", "hashlib")
PEER_ALGORITHMS = ("sha256", "sha256_cbor")
NAMES = (*OUR_ALGORITHMS, *(f"vllm_{algorithm}" for algorithm in PEER_ALGORITHMS))
LEAST_TOKENS = max(BLOCK_TOKENS)
MOST_TOKENS = 1 << 26
MOST_REPEATS = 1000

Progress = Callable[[str], None]


QUICK = {"tokens": 65_536, "repeats": 3}
"""Settings of a run that takes seconds: to see that it works, not what it costs."""


@dataclass(frozen=True, kw_only=True)
class HashBench:
    """What to measure. `tokens`: length of the prompt."""

    tokens: int = 1_000_000
    repeats: int = 5
    peer: str | None = None
    peer_python: str | None = None
    """With `peer`: the Python of an environment that has it. None: `KVCACHE_PEER_PYTHON` names it."""
    peer_seconds: float = PEER_SECONDS
    """The longest run."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_size("--tokens", self.tokens, LEAST_TOKENS, MOST_TOKENS)
        check_size("--repeats", self.repeats, 1, MOST_REPEATS)
        peer_python(self.peer, self.peer_python)
        check_seconds(self.peer_seconds)


def check_size(option: str, value: int, least: int, most: int) -> None:
    """`ConfigError` unless `value` is from `least` to `most`."""
    if not least <= value <= most:
        raise ConfigError(f"{option} is {value}: give a number from {least} to {most}")


def run_hash_bench(bench: HashBench, progress: Progress) -> dict[str, Any]:
    """Measure; the report as plain values. `ratios`: the other's time over ours, of medians.

    Raises:
        ConfigError: the peer's Python is none, or has no such module.
        KVCacheError: a program failed, was not done in time, or hashed another number of blocks.
    """
    python = peer_python(bench.peer, bench.peer_python)
    if bench.peer is not None:
        check_peer(python, bench.peer)
    rows: dict[tuple[str, int], list[float]] = {}
    with open_sides(
        python, tokens=bench.tokens, seed=bench.seed, deadline_seconds=bench.peer_seconds
    ) as sides:
        for block in BLOCK_TOKENS:
            for repeat in range(-1, bench.repeats):  # the first one warms up
                progress(f"blocks of {block} tokens, {repeat + 1} of {bench.repeats}")
                for name, seconds in _round(sides, bench.tokens, block):
                    if repeat >= 0:
                        rows.setdefault((name, block), []).append(seconds)
        environments = sides.environments
    rates = {
        f"{name}_b{block}": {
            **summary(rows[name, block]),
            "tokens_per_second": bench.tokens / summary(rows[name, block])["median"],
        }
        for name in NAMES
        for block in BLOCK_TOKENS
        if (name, block) in rows
    }
    return {
        "bench": "hash",
        "tokens": bench.tokens,
        "repeats": bench.repeats,
        "seed": bench.seed,
        "ratios": _ratios(rates),
        "rates": rates,
        "ours": environments[OURS],
        "peer": environments.get(PEER),
        "machine": machine(),
    }


def _round(sides: Sides, tokens: int, block: int) -> list[tuple[str, float]]:
    """Name and CPU seconds of every algorithm, once."""
    found = []
    for side in sides.in_turn():
        for algorithm in OUR_ALGORITHMS if side.name == OURS else PEER_ALGORITHMS:
            name = algorithm if side.name == OURS else f"vllm_{algorithm}"
            found.append((name, _seconds(side, tokens, block, algorithm)))
    return found


def _seconds(side: Side, tokens: int, block: int, algorithm: str) -> float:
    answer = side.ask("hash", first=0, count=tokens, block_tokens=block, algorithm=algorithm)
    side.require(answer, "blocks", tokens // block)
    return side.seconds(answer)


def _ratios(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    ours = {block: rates[f"{OUR_ALGORITHMS[0]}_b{block}"]["median"] for block in BLOCK_TOKENS}
    return {
        name: row["median"] / ours[int(name.rpartition("_b")[2])]
        for name, row in rates.items()
        if not name.startswith(f"{OUR_ALGORITHMS[0]}_b")
    }


# ---- for people ----------------------------------------------------------------------------------


def describe(report: dict[str, Any]) -> Sequence[str]:
    """A line for each algorithm: million tokens a second by block size, and how much slower it is."""
    names = list(dict.fromkeys(name.rpartition("_b")[0] for name in report["rates"]))
    about = report["machine"]
    settings = (
        f"{report['tokens']} tokens, median of {report['repeats']}, one thread,"
        f" {about['processor']}, {report['ours'].get('sha256')}; million tokens a CPU second"
    )
    head = f"{'':18}" + "".join(f"{f'block {block}':>20}" for block in BLOCK_TOKENS)
    lines = [settings, head]
    for name in names:
        cells = []
        for block in BLOCK_TOKENS:
            rate = report["rates"][f"{name}_b{block}"]["tokens_per_second"] / 1e6
            ratio = report["ratios"].get(f"{name}_b{block}")
            cells.append(f"{rate:10.2f}" + ("" if ratio is None else f" ({ratio:.1f}x)").rjust(10))
        lines.append(f"{name:18}" + "".join(cells))
    return lines
