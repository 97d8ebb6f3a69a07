"""Replay in simulated time: against queueing theory, against the instant replay, and its own laws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.simulations import prefill_seconds
from replays.naive import BLOCK, random_trace, serve_all

from kvcache.bench.replay_settings import ReplaySettings
from kvcache.bench.replay_timed import TimedReplay
from kvcache.bench.replay_timing import TimingSettings, pool_tokens_beside, spread
from kvcache.bench.traces import LaneSettings, TraceRequest
from kvcache.bench.traces.live import LiveSessions, OpenLoop
from kvcache.bench.traces.prefix_tree import Row, Session
from kvcache.core.errors import CapacityError, ConfigError, InvariantError
from kvcache.engine.simulated_hardware import HARDWARE, Hardware, parse_hardware

FAST = Hardware(flops=1e18, memory=1e16, capacity=1e12, link=1e12)


def timing(hardware: Hardware = FAST, **limits: Any) -> TimingSettings:
    return TimingSettings(hardware=hardware, hardware_name="x", **limits)


def replayed(
    requests: list[TraceRequest], settings: ReplaySettings, times: TimingSettings
) -> tuple[dict[str, Any], TimedReplay]:
    replay = TimedReplay(Path("trace"), BLOCK, settings, times)
    replay.run(OpenLoop(iter(requests)))
    return replay.report(), replay


def shorter(requests: list[TraceRequest], gap: float, most: int = 30) -> list[TraceRequest]:
    """Arrivals `gap` seconds apart, replies of up to `most` tokens."""
    return [
        r._replace(arrival_seconds=gap * i, output_tokens=r.output_tokens % most)
        for i, r in enumerate(requests)
    ]


# ---- queueing theory -----------------------------------------------------------------------------------


def poisson(count: int, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Prompts of 1,000 tokens with nothing in common, one token out."""
    draw = random.Random(seed)
    now = 0.0
    for i in range(count):
        now += draw.expovariate(rate)
        yield TraceRequest(i + 1, now, "", 0, 1000, 1, np.array([i], np.int64))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_queues_as_theory_says(load: float) -> None:
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=10 * BLOCK)
    slow = timing(HARDWARE["h100"], token_budget=1000, max_requests=8)
    service = prefill_seconds(slow.roofline(settings), 1000, 1000)
    count = 900
    requests = list(poisson(count, load / service, seed=1))
    report, replay = replayed(requests, settings, slow)

    waits, free_at = [], 0.0  # Lindley: each waits for the end of the one before it
    for request in requests:
        begun = max(request.arrival_seconds, free_at)
        waits.append(begun - request.arrival_seconds)
        free_at = begun + service
    assert replay._times.queue == pytest.approx(waits, abs=1e-9)
    assert replay._times.first_token == pytest.approx([w + service for w in waits], abs=1e-9)

    expected = load * service / (2 * (1 - load))  # M/D/1, Pollaczek and Khinchine
    assert report["queue_seconds"]["mean"] == pytest.approx(expected, rel=0.35)
    assert report["busy_share"] == pytest.approx(load, rel=0.1)
    length = report["requests_in_system"]  # Little's law
    assert length == pytest.approx(
        report["latency_seconds"]["mean"] * count / report["simulated_seconds"], rel=1e-9
    )


# ---- the instant replay is the limit of no load -----------------------------------------------------------


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3.5-9b", "gpt-oss-20b"])
@pytest.mark.parametrize("interval", [None, 0, 2 * BLOCK])
def test_requests_that_never_meet_find_what_the_instant_replay_finds(
    preset: str, interval: int | None
) -> None:
    for seed, pool in ((1, 32), (3, None)):
        apart = shorter(random_trace(seed, 40), 1000.0, 300)
        settings = ReplaySettings(
            block_tokens=BLOCK,
            pool_tokens=None if pool is None else pool * BLOCK,
            preset=preset,
            retention_tokens=interval,
            check=True,
            seed=1,
        )
        _, instant = serve_all(apart, settings)
        report, _ = replayed(apart, settings, timing())
        for name in (
            "hit_tokens",
            "ideal_hit_rate",
            "lost_tokens_by_cause",
            "checkpoints_per_request",
            "end_of_turn_checkpoints_per_request",
            "leaked_blocks",
        ):
            assert report[name] == instant[name], name
        assert report["preemptions"] == 0
        assert report["queue_seconds"]["max"] == 0


# ---- laws under load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3.5-9b", "gpt-oss-20b"])
def test_laws_hold_where_requests_push_each_other_out(preset: str) -> None:
    preemptions = hits = 0
    for seed, host in ((1, None), (2, 400 * BLOCK), (3, 60 * BLOCK)):
        requests = [
            r._replace(arrival_seconds=0.02 * i, output_tokens=min(160, r.output_tokens))
            for i, r in enumerate(random_trace(seed, 36))
        ]
        settings = ReplaySettings(
            block_tokens=BLOCK,
            pool_tokens=26 * BLOCK,
            preset=preset,
            retention_tokens=0,
            check=True,
        )
        slow = timing(HARDWARE["h100"], token_budget=4096, max_requests=8, host_tokens=host)
        report, _ = replayed(requests, settings, slow)
        assert report["requests"] == 36
        lost = report["lost_tokens_by_cause"]
        assert report["hit_tokens"] + sum(lost.values()) == report["prompt_tokens"]
        assert sum(report["hit_rate_by_source"].values()) == pytest.approx(report["hit_rate"])
        assert report["leaked_blocks"] == 0
        assert report["checks"] > 10
        assert report["compared_pages"] > 0
        preemptions += report["preemptions"]
        if host is not None:
            hits += report["host"]["loaded_bytes"]
            assert report["host"]["failed_loads"] == 0
    assert preemptions > 0 or preset != "llama-3-8b"  # the others' pages leave room for fewer
    assert hits > 0


def test_a_host_tier_gives_back_what_the_device_let_go() -> None:
    requests = shorter(random_trace(5, 80), 1.0)
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=20 * BLOCK, check=True)
    without, _ = replayed(requests, settings, timing(HARDWARE["h100"]))
    within, _ = replayed(requests, settings, timing(HARDWARE["h100"], host_tokens=1000 * BLOCK))
    assert within["hit_rate_by_source"]["host"] > 0.1
    assert without["hit_rate"] < within["hit_rate"] == within["ideal_hit_rate"]
    assert within["ttft_seconds"]["mean"] < without["ttft_seconds"]["mean"]


def test_running_requests_take_what_others_would_have_found() -> None:
    """Serial service hits what is evicted where requests overlap: the reason for this mode."""
    requests = shorter(random_trace(8, 80), 0.0)
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=20 * BLOCK)
    _, instant = serve_all(requests, settings)
    report, _ = replayed(requests, settings, timing(HARDWARE["h100"]))
    assert report["hit_tokens"] != instant["hit_tokens"]
    assert report["queue_seconds"]["max"] > 0


def test_live_sessions_wait_for_their_answers() -> None:
    rows = [
        Row(i + 2, 10.0 * i, 0, i - 1, 8 * i, 8 * (i + 1), 512 * (i + 1), 50, 1.0)
        for i in range(30)
    ]
    sessions = [Session(f"s{s}", rows) for s in range(4)]
    lanes = LaneSettings(lanes=3, hours=0.1, seed=1)
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=200 * BLOCK, check=True)
    counts = []
    for hardware in (FAST, parse_hardware("h100,step_seconds=0.5")):
        replay = TimedReplay(Path("trace"), 64, settings, timing(hardware))
        replay.run(LiveSessions(sessions, lanes))
        counts.append(replay.report()["requests"])
    assert counts[0] > 1.5 * counts[1] > 0  # a slow server is asked less


def test_a_run_can_be_repeated() -> None:
    requests = shorter(random_trace(3, 40), 0.1)
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=24 * BLOCK, seed=5)
    slow = timing(HARDWARE["h100"], host_tokens=100 * BLOCK)
    clocks = {"manager_seconds", "explain_seconds"}
    one, two = (
        {k: v for k, v in replayed(requests, settings, slow)[0].items() if k not in clocks}
        for _ in range(2)
    )
    assert one == two


# ---- settings ----------------------------------------------------------------------------------------------


def test_the_pool_is_what_memory_holds_beside_the_weights() -> None:
    settings = ReplaySettings(block_tokens=64)
    line = timing(HARDWARE["h100"]).roofline(settings)
    left = 80e9 * 0.9 - 8_030_261_248 * 2
    assert pool_tokens_beside(line) == int(left // (131_072 * 64)) * 64
    large = ReplaySettings(block_tokens=64, preset="deepseek-v3")
    with pytest.raises(ConfigError, match=r"no room beside the weights .*raise --tp"):
        pool_tokens_beside(timing(HARDWARE["h100"]).roofline(large))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_requests": 0}, "--max-requests is 0"),
        ({"token_budget": 100, "max_requests": 200}, "--token-budget is 100, below --max-requests"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        timing(**limits)


def test_a_tier_needs_a_bounded_pool() -> None:
    with pytest.raises(ConfigError, match="--host-tokens needs a bounded pool"):
        TimedReplay(
            Path("t"), BLOCK, ReplaySettings(block_tokens=BLOCK), timing(host_tokens=9 * BLOCK)
        )


def test_a_request_larger_than_the_pool_is_named() -> None:
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=4 * BLOCK)
    with pytest.raises(CapacityError, match=r"trace, line \d+: \d+ prompt .* raise --pool-tokens"):
        replayed(random_trace(1), settings, timing())


def test_laws_are_looked_at() -> None:
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=40 * BLOCK)
    _, replay = replayed(random_trace(1), settings, timing())
    replay._request_seconds += 1.0
    with pytest.raises(InvariantError, match="their number over time says"):
        replay._require_laws()
    replay._request_seconds -= 1.0
    replay._expected_tokens += 1
    with pytest.raises(InvariantError, match="tokens were computed or adopted"):
        replay._require_laws()


def test_spreads_of_nothing_are_null() -> None:
    assert spread([]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    assert spread([1.0, 3.0])["mean"] == 2.0
