"""Arrivals of a replay in time: as recorded, and of sessions that wait for their answers."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from replays.files import SESSION_0504, csv, mooncake_line, read, write

from kvcache.bench.traces import LaneSettings, TraceRequest, open_trace
from kvcache.bench.traces.live import NEVER, Arrivals, LiveSessions, OpenLoop
from kvcache.bench.traces.prefix_tree import Row, Session
from kvcache.core.errors import ConfigError, InputError


def sessions(seed: int, count: int, *, agents: bool = False) -> list[Session]:
    """Random sessions; with `agents` some rows run side by side."""
    draw = random.Random(seed)
    made = []
    for s in range(count):
        rows: list[Row] = []
        now = 0.0
        for i in range(draw.randint(2, 25)):
            api = draw.choice((0.0, 1.0, 20.0))
            rows.append(Row(i + 2, now, 0, i - 1, 1 if i else 0, i + 1, (i + 1) * 64 + 3, 9, api))
            side_by_side = agents and draw.random() < 0.4
            now += draw.choice((0.0, api / 2)) if side_by_side else api + draw.choice((0, 3, 500))
        made.append(Session(f"s{s}", rows))
    return made


def serve(arrivals: Arrivals, draw: random.Random | None) -> list[tuple[TraceRequest, float]]:
    """All requests and when they ended: each as long as recorded, or a random time."""
    served: list[tuple[TraceRequest, float]] = []
    open_: list[tuple[float, int]] = []
    while open_ or arrivals.next_seconds() < NEVER:
        if open_ and min(open_)[0] <= arrivals.next_seconds():
            end, ticket = min(open_)
            open_.remove((end, ticket))
            arrivals.ended(ticket, end)
            continue
        ticket, request = arrivals.take()
        taken = RECORDED[request.line] if draw is None else draw.choice((0.0, 0.5, 30.0, 400.0))
        open_.append((request.arrival_seconds + taken, ticket))
        served.append((request, request.arrival_seconds + taken))
    return served


RECORDED: dict[int, float] = defaultdict(float)


def test_answers_as_fast_as_recorded_give_the_recorded_pace(tmp_path: Path) -> None:
    lines, line = [], 1
    for s in range(6):
        now = 0.0
        for i in range(20):
            line += 1
            api, gap = (i * 7 + s) % 13, (i * 5 + s) % 11 * 60
            lines.append(
                f"s{s},{i},{now},0,{i - 1},{i and i + 1},{i + 2},{(i + 2) * 64},9,t,t,0,{api}"
            )
            RECORDED[line] = api
            now += api + gap
    path = csv(tmp_path, lines)
    settings = LaneSettings(lanes=1, hours=12, seed=3)
    planned = read(path, settings)
    served = [request for request, _ in serve(open_trace(path).arrivals(settings), None)]
    assert len(served) == len(planned) > 100
    for one, two in zip(served, planned, strict=True):
        assert one.arrival_seconds == pytest.approx(two.arrival_seconds, abs=1e-6)
        assert (one.line, one.counted) == (two.line, two.counted)
        assert one.blocks.tolist() == two.blocks.tolist()


@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_request_comes_after_all_that_ended_before_it(seed: int, *, agents: bool) -> None:
    made = sessions(seed, 5, agents=agents)
    by_name = {session.name: session.rows for session in made}
    settings = LaneSettings(lanes=3, hours=2, seed=seed)
    served = serve(LiveSessions(made, settings), random.Random(seed))
    assert len(served) > 40
    plays: dict[tuple[str, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for request, end in served:
        row = request.line - 2
        play = int(request.blocks[0])  # of its own in each play
        plays[request.session, play][row] = request.arrival_seconds, end
        assert request.arrival_seconds <= settings.end_seconds
        assert request.counted == (request.arrival_seconds >= 600)
    for (name, _), rows in plays.items():
        recorded = by_name[name]
        for i, (begun, _) in rows.items():
            before = [
                j for j in rows
                if j < i and recorded[j].seconds + recorded[j].api_seconds <= recorded[i].seconds
            ]  # fmt: skip
            if not before:
                continue
            ended = max(rows[j][1] for j in before)
            last = max(recorded[j].seconds + recorded[j].api_seconds for j in before)
            pause = min(recorded[i].seconds - last, 300.0)
            assert begun == pytest.approx(ended + pause, abs=1e-6)


def test_every_lane_has_one_session_at_a_time_until_the_end() -> None:
    made = sessions(1, 4)
    settings = LaneSettings(lanes=2, hours=1.5, seed=1)
    served = serve(LiveSessions(made, settings), random.Random(2))
    spans: dict[int, list[float]] = {}
    for request, end in served:
        span = spans.setdefault(int(request.blocks[0]), [request.arrival_seconds, end])
        span[1] = max(span[1], end)
    edges = sorted([(a, 1) for a, _ in spans.values()] + [(b, -1) for _, b in spans.values()])
    alive = most = 0
    for _, change in edges:
        alive += change
        most = max(most, alive)
    assert most == 2
    assert len(spans) >= 6
    assert max(r.arrival_seconds for r, _ in served) > settings.end_seconds - 900


def test_an_open_loop_keeps_its_times_divided_by_the_speed(tmp_path: Path) -> None:
    lines = [mooncake_line(stamp, ids=(0, 1, 2)) for stamp in (0, 3000, 3000, 9000)]
    trace = open_trace(write(tmp_path / "t.jsonl", lines))
    for speed, expected in ((1.0, [0, 3, 3, 9]), (2.0, [0, 1.5, 1.5, 4.5])):
        served = serve(trace.arrivals(speed=speed), random.Random(0))
        assert [r.arrival_seconds for r, _ in served] == expected


def test_traces_that_tell_no_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"each of its sessions has a clock of its own.*--lanes"):
        open_trace(csv(tmp_path, SESSION_0504)).arrivals()
    with pytest.raises(ConfigError, match=r"--lanes .* is a mooncake trace"):
        open_trace(write(tmp_path / "t.jsonl", [mooncake_line()])).arrivals(LaneSettings(lanes=1))
    with pytest.raises(InputError, match="has no request"):
        open_trace(csv(tmp_path, [])).arrivals(LaneSettings(lanes=1))
    with pytest.raises(InputError, match="has no request"):
        open_trace(write(tmp_path / "e.jsonl", [])).arrivals()
    with pytest.raises(ConfigError, match="session of two or more requests"):
        open_trace(csv(tmp_path, SESSION_0504[:1])).arrivals(LaneSettings(lanes=1))


def test_a_seed_decides_a_live_run() -> None:
    made = sessions(5, 6)
    one, again, other = (
        [
            (r.arrival_seconds, r.session)
            for r, _ in serve(
                LiveSessions(made, LaneSettings(lanes=3, seed=seed)), random.Random(0)
            )
        ]
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert all(a <= b for (a, _), (b, _) in pairwise(one))


def test_an_empty_open_loop_has_nobody() -> None:
    assert OpenLoop(iter(())).next_seconds() == NEVER
