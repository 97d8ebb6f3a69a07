"""`kvcache bench agents`: two agent traces through our block manager, and through vLLM's in the same run.

For each trace, model and pool size: our hit rates at each retention interval, with and without the
system prompt declared; beside them the peer's at its own intervals (dense, 0, N), and what a cache
without eviction could hit on our grid. Pools have equal bytes on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvcache.bench.agents_driver import AgentDriver
from kvcache.bench.agents_peer import ask_peer
from kvcache.bench.agents_presets import PRESETS, STATE_BYTES, AgentPreset
from kvcache.bench.agents_trace import TRACES, AgentRequest, AgentTrace, ideal_hit_tokens
from kvcache.bench.peer import PEER_SECONDS, check_peer, check_seconds, peer_python
from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.native_manager import most_slabs
from kvcache.core.records import MOST_TOKENS
from kvcache.retention import Sparse

STEP_TOKENS = 8192
"""Token budget of one step, on both sides."""

PEER_RUNS = ("None", "0", "N")
"""Retention intervals of the peer, in the order of its runs; N: the preset's own for this trace."""

_CHECK_EVERY_STEPS = 500

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AgentsBench:
    """What to run. Empty `presets`: all. Empty `blocks`: the pool sizes of each preset."""

    traces: Sequence[str] = tuple(TRACES)
    presets: Sequence[str] = ()
    intervals: Sequence[int] = (0, 4096)
    declare: Sequence[bool] = (True, False)
    blocks: Sequence[int] = ()
    """Pool sizes in vLLM blocks of the preset."""
    state_bytes: str = "block"
    peer: str | None = None
    peer_python: str | None = None
    """With `peer`: the Python of an environment that has it. None: `KVCACHE_PEER_PYTHON` names it."""
    peer_seconds: float = PEER_SECONDS
    """Most that the peer may take for one trace."""
    check: bool = False
    seed: int = 0
    """Of the manager's index. The traces have seeds of their own."""

    def __post_init__(self) -> None:
        _known("--trace", self.traces, TRACES)
        _known("--preset", self.presets, PRESETS)
        _known("--state-bytes", (self.state_bytes,), STATE_BYTES)
        peer_python(self.peer, self.peer_python)
        check_seconds(self.peer_seconds)
        for interval in self.intervals:
            if interval > MOST_TOKENS:
                raise ConfigError(f"--interval is {interval}: at most {MOST_TOKENS} are possible")
        for count in self.blocks:
            if count < 2:
                raise ConfigError(f"--blocks is {count}: it must be above 1")
        for name in self.presets or PRESETS:
            grid = PRESETS[name].geometry(self.state_bytes).grid_tokens
            for interval in self.intervals:
                if interval < 0 or interval % grid:
                    raise ConfigError(
                        f"--interval is {interval}: it must be 0 or a multiple of {name}'s hit grid"
                        f" of {grid} tokens"
                    )

    @property
    def python_of_peer(self) -> str:
        """As given, else by the environment; empty without a peer."""
        return peer_python(self.peer, self.peer_python)

    def cases(self, trace: str) -> Iterator[_Case]:
        """Models and pool sizes of one trace; a preset without pools for it is left out."""
        for name in self.presets or PRESETS:
            preset = PRESETS[name]
            if trace in preset.pools:
                for blocks in self.blocks or preset.pools[trace].blocks:
                    yield _Case(name, preset, blocks)


class _Case(NamedTuple):
    name: str
    preset: AgentPreset
    blocks: int


def _known(option: str, given: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{option} is {name!r}{alike(name, known)}: choose from {', '.join(known)}"
            )


def run_agents_bench(bench: AgentsBench, progress: Progress) -> dict[str, Any]:
    """Run everything; the report as plain values. `progress` takes a line now and then.

    The peer's Python is asked first, so that a wrong one costs a second and not our whole run; then
    all pools are looked at.

    Raises:
        ConfigError: the peer's Python has no peer, or a pool has no room for a request.
    """
    if bench.peer is not None:
        check_peer(bench.python_of_peer, bench.peer)
    report: dict[str, Any] = {
        "bench": "agents",
        "step_tokens": STEP_TOKENS,
        "state_bytes": bench.state_bytes,
        "seed": bench.seed,
        "peer": None,
        "traces": {},
    }
    sides = [
        _Traced(bench, name, TRACES[name], TRACES[name].generate(), progress)
        for name in bench.traces
    ]
    for side in sides:
        side.require_room()
    for side in sides:
        name = side.name
        rows = [side.row(case) for case in bench.cases(name)]
        if bench.peer is not None and rows:
            report["peer"] = side.add_peer(rows)
        report["traces"][name] = {
            **asdict(side.trace),
            "requests": len(side.requests),
            "prompt_tokens": side.prompt_tokens,
            "pools": rows,
        }
    return report


@dataclass(frozen=True)
class _Traced:
    """One trace, and both sides on it."""

    bench: AgentsBench
    name: str
    trace: AgentTrace
    requests: list[AgentRequest]
    progress: Progress

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)

    def require_room(self) -> None:
        """`ConfigError` for a pool without room for the longest request, or too large to number."""
        longest = max(len(r.prompt) + len(r.output) for r in self.requests)
        for case in self.bench.cases(self.name):
            geometry, block = case.preset.geometry(self.bench.state_bytes), case.preset.block_bytes
            least = geometry.slabs_needed(longest) * geometry.slab_bytes
            above = (most_slabs(geometry) + 1) * geometry.slab_bytes
            if not least <= case.blocks * block < above:
                raise ConfigError(
                    f"--blocks is {case.blocks}: {case.name} on the trace {self.name}, with requests"
                    f" of up to {longest} tokens, can have from {-(-least // block)} to"
                    f" {(above - 1) // block} blocks of {block} bytes"
                )

    def row(self, case: _Case) -> dict[str, Any]:
        """One model and pool size: the geometry, then a run for each interval and declaration."""
        geometry = case.preset.geometry(self.bench.state_bytes)
        pool_bytes = case.blocks * case.preset.block_bytes
        slabs = geometry.slabs_in(pool_bytes)
        ours = []
        for interval in self.bench.intervals:
            for declared in self.bench.declare:
                self.progress(f"{self.name}: {case.name}, {case.blocks} blocks, {interval}")
                ours.append(self.play(geometry, slabs, interval, declared=declared))
        return {
            "preset": case.name,
            "blocks": case.blocks,
            "block_bytes": case.preset.block_bytes,
            "pool_bytes": pool_bytes,
            "slabs": slabs,
            "slab_bytes": geometry.slab_bytes,
            "grid_tokens": geometry.grid_tokens,
            "ideal_declared": self._ideal(geometry, declared=True),
            "ideal_undeclared": self._ideal(geometry, declared=False),
            "ours": ours,
            "peer": [],
        }

    def _ideal(self, geometry: Geometry, *, declared: bool) -> float:
        grid = geometry.grid_tokens
        hit = ideal_hit_tokens(self.requests, declared=declared, grid_tokens=grid)
        return hit / self.prompt_tokens

    def play(
        self, geometry: Geometry, slabs: int, interval: int, *, declared: bool
    ) -> dict[str, Any]:
        """The trace through a fresh manager of ours."""
        manager = Manager(
            geometry,
            slabs=slabs,
            retention=Sparse(interval),
            movable=True,
            journal=False,
            seed=self.bench.seed,
        )
        figures = AgentDriver(
            manager,
            self.requests,
            boundaries=(self.trace.system_tokens,) if declared else (),
            max_running=self.trace.max_running,
            step_tokens=STEP_TOKENS,
            check_every=_CHECK_EVERY_STEPS if self.bench.check else 0,
        ).run()
        if self.bench.check:
            manager.check()
        rate = {"interval": interval, "declared": declared, "hit_rate": figures.hit_rate}
        return {**rate, **asdict(figures), "lost": dict(figures.lost)}

    def add_peer(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The trace through the peer, for the pools of `rows`; returns its environment."""
        bench = self.bench
        runs = [
            {
                "preset": row["preset"],
                "groups": PRESETS[row["preset"]].peer_groups,
                "blocks": row["blocks"],
                "interval": interval,
            }
            for row in rows
            for interval in (None, 0, PRESETS[row["preset"]].pools[self.name].interval_tokens)
        ]
        self.progress(f"{self.name}: {bench.peer} is loading")
        environment, results = ask_peer(
            bench.python_of_peer,
            self.requests,
            runs,
            max_running=self.trace.max_running,
            step_tokens=STEP_TOKENS,
            deadline_seconds=bench.peer_seconds,
            progress=lambda done: self.progress(
                f"{self.name}: {bench.peer}, {done['preset']}, {done['blocks']} blocks,"
                f" {done['interval']}"
            ),
        )
        by_pool = {(row["preset"], row["blocks"]): row for row in rows}
        for result in results:
            row = by_pool[result.pop("preset"), result.pop("blocks")]
            if result["block_bytes"] != row["block_bytes"]:
                raise ConfigError(
                    f"{bench.peer}'s block of {row['preset']} has {result['block_bytes']} bytes,"
                    f" ours {row['block_bytes']}: the pools would not be equal; use the version"
                    f" of {bench.peer} that bench/peers/vllm_core.py names"
                )
            if result.get("stalled"):  # of a part of the trace: nothing to compare with
                result["hit_rate"] = None
            row["peer"].append(result)
        return environment


# ---- for people ----------------------------------------------------------------------------------


def describe(report: dict[str, Any]) -> Sequence[str]:
    """The report as a table for each trace: hit rates in percent."""
    lines: list[str] = []
    for name, trace in report["traces"].items():
        lines.append(
            f"{name}: {trace['requests']} requests, {trace['prompt_tokens']} prompt tokens,"
            f" {trace['max_running']} running; hit rates in %; ideal: nothing evicted"
        )
        rows = trace["pools"]
        if rows:
            lines.append(_headings(rows[0]))
            lines += map(_line, rows)
            lines += [text for row in rows for text in _stalls(row, trace["requests"])]
    return lines


def _headings(row: dict[str, Any]) -> str:
    ours = [f"{'decl' if r['declared'] else 'undecl'} {r['interval']}" for r in row["ours"]]
    peer = [f"vLLM {name}" for name in PEER_RUNS] if row["peer"] else []
    return (
        f"{'model':10}{'blocks':>7}{'MiB':>6}{'grid':>5} {'ideal':>6}{'undecl':>7} "
        + "".join(f"{text:>12}" for text in ours)
        + "".join(f"{text:>10}" for text in peer)
    )


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['preset']:10}{row['blocks']:7}{row['pool_bytes'] >> 20:6}{row['grid_tokens']:5}"
        f" {100 * row['ideal_declared']:6.2f}{100 * row['ideal_undeclared']:7.2f} "
        + "".join(f"{100 * run['hit_rate']:12.2f}" for run in row["ours"])
        + "".join(f"{_percent(run['hit_rate']):>10}" for run in row["peer"])
    )


def _percent(rate: float | None) -> str:
    return "stalled" if rate is None else f"{100 * rate:.2f}"


def _stalls(row: dict[str, Any], requests: int) -> Iterator[str]:
    """A line for each run that the peer could not end in this pool: it has no hit rate."""
    for name, run in zip(PEER_RUNS, row["peer"], strict=False):
        if run["hit_rate"] is None:
            yield (
                f"  {row['preset']}, {row['blocks']} blocks: vLLM {name} stalled after"
                f" {run['requests']} of {requests} requests: no rate to compare"
            )
