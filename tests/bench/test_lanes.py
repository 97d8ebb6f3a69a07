"""Live sessions side by side, drawn from recorded ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from replays.files import SESSION_0504, csv, mooncake_line, read, write

from kvcache.bench.traces import LaneSettings, open_trace
from kvcache.core.errors import ConfigError, InputError


def sessions(tmp_path: Path, *, count: int = 5, rows: int = 30, gap: int = 100) -> Path:
    lines = [
        f"s{s},{i},{i * gap},0,{i - 1},{i and i + 1},{i + 2},{(i + 2) * 64},9,t,t,0,10"
        for s in range(count)
        for i in range(rows)
    ]
    return csv(tmp_path, lines)


def test_lanes_run_in_the_order_of_time_and_end_on_time(tmp_path: Path) -> None:
    requests = read(sessions(tmp_path), LaneSettings(lanes=4, hours=1))
    times = [r.arrival_seconds for r in requests]
    assert times == sorted(times)
    assert max(times) <= 3600 + 600
    assert max(times) > 4000
    assert all(r.counted == (r.arrival_seconds >= 600) for r in requests)
    assert {r.counted for r in requests} == {True, False}


def test_a_lane_plays_one_session_at_a_time_and_each_play_is_cold(tmp_path: Path) -> None:
    requests = read(sessions(tmp_path, count=2), LaneSettings(lanes=1, hours=6))
    owners: dict[int, int] = {}
    play = -1
    plays: list[str] = []
    for request in requests:
        owner = owners.setdefault(int(request.blocks[0]), len(owners))
        if owner != play:
            assert owner == len(plays)
            plays.append(request.session)
            play = owner
    assert len(plays) > 4
    assert len(set(plays)) == 2


def test_the_first_session_of_a_lane_starts_between_a_quarter_and_three_quarters(
    tmp_path: Path,
) -> None:
    path = sessions(tmp_path, count=9, rows=100)
    requests = read(path, LaneSettings(lanes=64, hours=0.001))
    first: dict[int, int] = {}
    for request in requests:
        if request.arrival_seconds < 30:
            first.setdefault(int(request.blocks[0]), len(request.blocks) - 2)
    assert len(first) == 64
    assert 24 <= min(first.values()) < 35
    assert 65 < max(first.values()) <= 75


def test_idle_gaps_in_a_lane_are_cut_to_five_minutes(tmp_path: Path) -> None:
    path = sessions(tmp_path, count=1, rows=50, gap=7200)
    requests = read(path, LaneSettings(lanes=1, hours=2))
    times = [r.arrival_seconds for r in requests]
    gaps = {round(b - a, 3) for a, b in pairwise(times)}
    assert gaps <= {310.0, 11.0}  # 10 s of service, then 300 s idle, or 1 s to the next session
    assert 310.0 in gaps


def test_the_seed_decides_the_lanes(tmp_path: Path) -> None:
    path = sessions(tmp_path)
    one, again, other = (
        [r.arrival_seconds for r in read(path, LaneSettings(lanes=3, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("lanes", "hours"), [(0, 1), (-1, 1), (10**9, 1), (1, 0), (1, -1), (1, 1e9)]
)
def test_impossible_lanes_are_refused(lanes: int, hours: float) -> None:
    with pytest.raises(ConfigError, match=r"--(lanes|hours) is "):
        LaneSettings(lanes=lanes, hours=hours)


@pytest.mark.parametrize("hours", ["nan", "inf"])
def test_hours_must_be_a_number(hours: str) -> None:
    with pytest.raises(ConfigError, match=f"--hours is {hours}"):
        LaneSettings(lanes=1, hours=float(hours))


def test_lanes_need_sessions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lanes .* is a mooncake trace"):
        read(write(tmp_path / "t.jsonl", [mooncake_line()]), LaneSettings(lanes=1))
    with pytest.raises(ConfigError, match="session of two or more requests"):
        read(csv(tmp_path, SESSION_0504[:1]), LaneSettings(lanes=1))
    with pytest.raises(InputError, match="has no request"):
        read(csv(tmp_path, []), LaneSettings(lanes=1))


def test_lanes_of_the_claude_code_sample_give_the_known_workload(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    requests = list(trace.requests(LaneSettings(lanes=16, hours=1, seed=0)))
    counted = [r for r in requests if r.counted]
    assert (len(requests), sum(r.prompt_tokens for r in counted)) == (1_745, 171_456_066)
