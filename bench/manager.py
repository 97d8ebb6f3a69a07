"""`kvcache bench manager`: what the block manager costs, beside vLLM's own classes in the same run.

On the same tokens, in pools of equal bytes, one measurement of each side after the other:

    fill        16 prompts of N tokens fill a fresh pool of N blocks     allocate and commit, free
    look up     each of them again                                       with hashes known, and cold
    evict       new prompts, each page evicts a cached one               allocate and commit
    churn       256 requests that grow in turns: the free list is a shuffle
    evict       once more                                                free
    block       everything is held, and one request asks again and again

and with other geometries: chunked prefill of N tokens, decode steps of a batch, a pool of N blocks
built, the bytes it takes when it is full. N is 1,000,000 unless the settings say otherwise; the keys of
the report keep their names. What each measurement does: `kvcache.bench.manager_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.bench.agents_presets import comparison_model
from kvcache.bench.hash import check_size
from kvcache.bench.machine import machine
from kvcache.bench.manager_report import describe, missed_aims, report_of
from kvcache.bench.manager_work import ROOM_TOKENS
from kvcache.bench.peer import PEER_SECONDS, check_peer, check_seconds, peer_python
from kvcache.bench.sides import OURS, PEER, Side, Sides, open_sides
from kvcache.core.errors import ConfigError

__all__ = ["QUICK", "ManagerBench", "describe", "run_manager_bench"]

FULL = "full16"
DSV4 = "dsv4"
DECODE_PRESETS = ("gptoss", "gemma3", "kimi_k3", DSV4)
BLOCK_TOKENS = 16
PROMPTS = 16
"""Of N tokens each: so many fill N blocks of 16 tokens."""
CHUNK_TOKENS = 2048
CHURN_REQUESTS = 256
DECODE_TOKENS = 8192
DECODE_STAGGER = 128
"""Contexts of a batch differ by up to so many tokens, so that every step has its share of new pages."""
DECODE_STEPS = 8
"""Of one measurement."""
SPARE_BLOCKS = 8
"""Of each group and request, beside what its tokens take."""
MOST_SLOW_REPEATS = 3
MOST_BLOCKED_REPEATS = 14
"""One token each, which must not need a page."""
LEAST_TOKENS, MOST_TOKENS = 1024, 1 << 20
MOST_REQUESTS = 4096
MOST_REPEATS = 50

QUICK = {"tokens": 65_536, "requests": 64, "repeats": 3}
"""Settings of a run that takes seconds: to see that it works, not what it costs."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ManagerBench:
    """What to measure."""

    tokens: int = 1_000_000
    """N: of a prompt; and blocks of the pool."""
    requests: int = 256
    """Of a decode step."""
    repeats: int = 5
    """Of which the median counts; at most 3 where one takes seconds, and 16 for the first fill."""
    peer: str | None = None
    peer_python: str | None = None
    """With `peer`: the Python of an environment that has it. None: `KVCACHE_PEER_PYTHON` names it."""
    peer_seconds: float = PEER_SECONDS
    """The longest run."""
    seed: int = 0
    """Of the tokens."""

    def __post_init__(self) -> None:
        check_size("--tokens", self.tokens, LEAST_TOKENS, MOST_TOKENS)
        if self.tokens % BLOCK_TOKENS:
            raise ConfigError(f"--tokens is {self.tokens}: give a multiple of {BLOCK_TOKENS}")
        check_size("--requests", self.requests, 1, MOST_REQUESTS)
        check_size("--repeats", self.repeats, 1, MOST_REPEATS)
        peer_python(self.peer, self.peer_python)
        check_seconds(self.peer_seconds)

    @property
    def pool_blocks(self) -> int:
        """As many as 16 prompts fill."""
        return PROMPTS * (self.tokens // BLOCK_TOKENS)

    @property
    def slow_repeats(self) -> int:
        """Of what takes seconds."""
        return min(self.repeats, MOST_SLOW_REPEATS)

    @property
    def context(self) -> int:
        """Of a request that decodes, at most."""
        return min(DECODE_TOKENS, self.tokens)

    @property
    def stream_tokens(self) -> int:
        """Tokens of which all prompts are made."""
        prompts = (PROMPTS + 2 * self.repeats) * self.tokens
        return max(prompts, self.requests * self.context) + CHURN_REQUESTS


def run_manager_bench(bench: ManagerBench, progress: Progress) -> dict[str, Any]:
    """Measure everything; the report as plain values. `progress` takes a line now and then.

    Raises:
        ConfigError: the peer's Python is none, or has no such module.
        KVCacheError: a program failed or was not done in time, or the sides did different work.
    """
    python = peer_python(bench.peer, bench.peer_python)
    if bench.peer is not None:
        check_peer(python, bench.peer)
    run = _Run(bench, progress)

    def start() -> Any:
        return open_sides(
            python,
            tokens=bench.stream_tokens,
            seed=bench.seed,
            deadline_seconds=bench.peer_seconds,
        )

    progress("the programs start")
    with start() as sides:
        run.measure(sides)
        environments = sides.environments
    with start() as fresh:
        memory = run.memory(fresh)
    report = {
        "bench": "manager",
        "tokens": bench.tokens,
        "pool_blocks": bench.pool_blocks,
        "decode_requests": bench.requests,
        "decode_context": bench.context,
        "repeats": bench.repeats,
        "seed": bench.seed,
        **report_of(run.samples, memory, requests=bench.requests),
        "ours": environments[OURS],
        "peer": environments.get(PEER),
        "machine": machine(),
    }
    return report | {"missed": missed_aims(report)}


class _Run:
    """One run: all measurements, in their order. `samples[work][side]`: what was measured."""

    def __init__(self, bench: ManagerBench, progress: Progress) -> None:
        self.bench, self._progress = bench, progress
        self.samples: dict[str, dict[str, list[float]]] = {}

    def measure(self, sides: Sides) -> None:
        """Everything but memory."""
        self._warm_up(sides)
        self._build(sides)
        self._one_group(sides)
        self._blocked(sides)
        self._chunked(sides)
        for preset in DECODE_PRESETS:
            self._decode(sides, preset)

    def _note(self, work: str, side: Side, *seconds: float) -> None:
        self.samples.setdefault(work, {}).setdefault(side.name, []).extend(seconds)

    def _prompt(self, number: int, shift: int = 0) -> dict[str, int]:
        return {"first": number * self.bench.tokens + shift, "count": self.bench.tokens}

    def _warm_up(self, sides: Sides) -> None:
        self._progress("warming up")
        sides.ask("open_pool", preset=FULL, blocks=2 * LEAST_TOKENS // BLOCK_TOKENS)
        for what in ("prefill", "lookup", "prefill", "lookup"):
            sides.ask(what, first=0, count=LEAST_TOKENS)

    def _build(self, sides: Sides) -> None:
        for repeat in range(self.bench.slow_repeats):
            self._progress(f"building a pool of {self.bench.pool_blocks} blocks, {repeat + 1}")
            for side, answer in sides.ask("build", preset=FULL, blocks=self.bench.pool_blocks):
                self._note("build_pool_1m", side, side.seconds(answer))

    # ---- one full group, a pool of N blocks ----------------------------------------------------

    def _one_group(self, sides: Sides) -> None:
        repeats = self.bench.repeats
        sides.ask("open_pool", preset=FULL, blocks=self.bench.pool_blocks)
        for prompt in range(PROMPTS):
            self._progress(f"filling the pool, {prompt + 1} of {PROMPTS}")
            self._prefill(
                sides,
                prompt,
                {"allocate": "allocate_commit_1m_b16", "free": "free_1m_b16"},
                evicts=False,
            )
        for repeat in range(repeats):
            self._progress(f"looking up, {repeat + 1} of {repeats}")
            self._lookup(sides, repeat % PROMPTS)
        for repeat in range(repeats):
            self._progress(f"evicting, {repeat + 1} of {repeats}")
            self._prefill(
                sides, PROMPTS + repeat, {"allocate": "allocate_evict_1m_b16"}, evicts=True
            )
        self._progress("shuffling the pool")
        count = self.bench.pool_blocks // CHURN_REQUESTS * BLOCK_TOKENS
        sides.ask("churn", first=BLOCK_TOKENS // 2, count=count, requests=CHURN_REQUESTS)
        for repeat in range(repeats):
            self._progress(f"evicting from the shuffled pool, {repeat + 1} of {repeats}")
            self._prefill(
                sides,
                PROMPTS + repeats + repeat,
                {"allocate": "allocate_evict_1m_b16_churned", "free": "free_1m_b16_churned"},
                evicts=True,
            )

    def _prefill(self, sides: Sides, prompt: int, works: dict[str, str], *, evicts: bool) -> None:
        expected = self.bench.tokens // BLOCK_TOKENS if evicts else 0
        for side, answer in sides.ask("prefill", **self._prompt(prompt)):
            side.require(answer, "evicted", expected)
            for part, work in works.items():
                self._note(work, side, side.seconds(answer, f"{part}_seconds"))

    def _lookup(self, sides: Sides, prompt: int) -> None:
        expected = (self.bench.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for side, answer in sides.ask("lookup", **self._prompt(prompt)):
            side.require(answer, "hit_tokens", expected)
            opening = side.seconds(answer, "open_seconds")
            looking = side.seconds(answer, "lookup_seconds")
            self._note("lookup_hit_1m_b16", side, looking)
            self._note("lookup_cold_1m_b16", side, opening + looking)

    def _blocked(self, sides: Sides) -> None:
        """The last prompt of the churned pool; the others hold all but nine tenths of its blocks."""
        self._progress("looking up what is blocked")
        blocks = self.bench.tokens // BLOCK_TOKENS
        left = self.bench.pool_blocks - (blocks - blocks // 10)
        holders, first = [], BLOCK_TOKENS // 4
        for number in range(PROMPTS):
            size = left // (PROMPTS - number)
            left -= size
            holders.append((first, BLOCK_TOKENS * (size - 1) + 1))
            first += BLOCK_TOKENS * size
        prompt = self._prompt(PROMPTS + 2 * self.bench.repeats - 1)
        repeats = min(self.bench.repeats, MOST_BLOCKED_REPEATS)
        expected = BLOCK_TOKENS * (blocks - blocks // 10 - repeats)
        for side, answer in sides.ask("blocked", **prompt, holders=holders, repeats=repeats):
            side.require(answer, "hit_tokens", expected)
            for work, key in (
                ("lookup_blocked_1m", "seconds"),
                ("lookup_blocked_1m_evicting", "evicting_seconds"),
            ):
                self._note(work, side, *side.list_of_seconds(answer, key))

    # ---- other geometries ----------------------------------------------------------------------

    def _chunked(self, sides: Sides) -> None:
        """The peer, whose time is quadratic, is spared twice the tokens."""
        for repeat in range(-1, self.bench.slow_repeats):
            self._progress(f"prefill in chunks, {repeat + 1} of {self.bench.slow_repeats}")
            for side in sides.in_turn():
                for work, tokens in (
                    ("chunked_prefill_1m_dsv4", self.bench.tokens),
                    ("chunked_prefill_2m_dsv4", 2 * self.bench.tokens),
                ):
                    if side.name == PEER and tokens > self.bench.tokens:
                        continue
                    count = tokens if repeat >= 0 else LEAST_TOKENS
                    answer = side.ask(
                        "chunked",
                        preset=DSV4,
                        blocks=blocks_needed(DSV4, count),
                        first=0,
                        count=count,
                        chunk=CHUNK_TOKENS,
                    )
                    if repeat >= 0:
                        self._note(work, side, side.seconds(answer))

    def _decode(self, sides: Sides, preset: str) -> None:
        bench = self.bench
        self._progress(f"a batch of {preset} starts")
        contexts = [
            bench.context - (i % DECODE_STAGGER if bench.context > DECODE_STAGGER else 0)
            for i in range(bench.requests)
        ]
        steps = DECODE_STEPS * (bench.repeats + 1)
        sides.ask(
            "open_batch",
            preset=preset,
            blocks=max(
                bench.requests * blocks_needed(preset, bench.context + steps),
                blocks_needed(preset, bench.context + ROOM_TOKENS),
            ),
            prompts=[(i * bench.context, context) for i, context in enumerate(contexts)],
        )
        for repeat in range(-1, bench.repeats):
            self._progress(f"decode steps of {preset}, {repeat + 1} of {bench.repeats}")
            for side, answer in sides.ask("decode", steps=DECODE_STEPS):
                if repeat >= 0:
                    self._note(f"decode_step_{preset}", side, side.seconds(answer) / DECODE_STEPS)

    def memory(self, sides: Sides) -> dict[str, dict[str, float]]:
        """Bytes for each block of a pool, by side and part; in processes that did nothing before."""
        self._progress("filling a pool for its bytes")
        blocks = self.bench.pool_blocks
        prompts = [(i * self.bench.tokens, self.bench.tokens) for i in range(PROMPTS)]
        found = {}
        for side, answer in sides.ask("memory", preset=FULL, blocks=blocks, prompts=prompts):
            side.require(answer, "keys", blocks)
            parts = ("pool", "records", "keys_and_tables", "closed")
            found[side.name] = {part: side.number(answer, part) / blocks for part in parts}
        return found


def blocks_needed(preset: str, tokens: int) -> int:
    """Blocks of vLLM that a request of so many tokens takes, at most, if nothing falls behind."""
    groups: Sequence[dict[str, Any]] = comparison_model(preset).peer_groups
    return sum(-(-tokens // group["block_tokens"]) + SPARE_BLOCKS for group in groups)
