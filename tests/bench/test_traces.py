"""Readers: what a trace says, and how each way of being broken is named."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.bench.traces import LaneSettings, TraceRequest, open_trace
from kvcache.bench.traces.base import MAX_TOKENS
from kvcache.bench.traces.lines import MAX_LINE_BYTES
from kvcache.bench.traces.prefix_tree import HEADER
from kvcache.core.errors import ConfigError, InputError

# Session 0504 of the Claude Code sample, with its known block identities.
SESSION_0504 = (
    "0504,0,0.0,0,-1,0,173,11133,139,t,u,0.0,8.79",
    "0504,1,13.0,0,0,173,176,11300,96,t,t,4.0,3.09",
    "0504,2,3075.0,0,1,170,176,11306,102,t,t,3058.0,3.38",
)


def write(path: Path, lines: Sequence[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def csv(tmp_path: Path, rows: Sequence[str], name: str = "t.csv.gz") -> Path:
    return write(tmp_path / name, [HEADER, *rows])


def mooncake_line(
    stamp: Any = 0, prompt: Any = 1200, output: Any = 5, ids: Any = (0, 1, 2), **other: Any
) -> str:
    ids = list(ids) if isinstance(ids, tuple) else ids
    fields = {"timestamp": stamp, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(fields | other)


def read(path: Path, lanes: LaneSettings | None = None) -> list[TraceRequest]:
    return list(open_trace(path).requests(lanes))


# ---- what is read --------------------------------------------------------------------------------


def test_a_prefix_tree_row_shares_the_blocks_it_names_and_makes_the_rest(tmp_path: Path) -> None:
    first, second, third = read(csv(tmp_path, SESSION_0504))
    assert first.blocks.tolist() == list(range(173))
    assert second.blocks.tolist() == list(range(176))
    assert third.blocks.tolist() == [*range(170), *range(176, 182)]
    assert third == TraceRequest(4, 3075.0, "0504", 0, 11306, 102, third.blocks)


def test_sessions_share_no_block_even_when_their_rows_are_equal(tmp_path: Path) -> None:
    other = [row.replace("0504", "0505") for row in SESSION_0504]
    requests = read(csv(tmp_path, [*SESSION_0504, *other]))
    mine, theirs = (
        {int(b) for r in requests if r.session == name for b in r.blocks}
        for name in ("0504", "0505")
    )
    assert len(mine) == len(theirs) == 182
    assert not mine & theirs


def test_a_row_may_share_with_a_row_that_others_share_with_too(tmp_path: Path) -> None:
    rows = [
        "a,0,0,0,-1,0,3,200,1,t,u,0,1",
        "a,1,1,1,0,2,3,200,1,t,u,0,1",
        "a,2,2,2,0,1,2,150,1,t,u,0,1",
        "a,3,3,1,1,3,4,260,1,,t,0,1",
    ]
    blocks = [r.blocks.tolist() for r in read(csv(tmp_path, rows))]
    assert blocks == [[0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 3, 5]]


def test_a_mooncake_id_of_a_partial_block_gets_no_number(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl.gz",
        [
            mooncake_line(0, 1200, 5, (7, 2**62, 9)),
            "",
            mooncake_line(1500, 1024, 0, (7, 3), session="extra fields are ignored"),
            mooncake_line(1500, 100, 1, (4,)),
        ],
    )
    first, second, third = read(path)
    assert (first.blocks.tolist(), second.blocks.tolist()) == ([0, 1], [0, 3])
    assert second.blocks.dtype == np.int64
    assert (second.line, second.arrival_seconds, second.output_tokens) == (3, 1.5, 0)
    assert third.blocks.tolist() == []


def test_plain_and_compressed_files_read_the_same(tmp_path: Path) -> None:
    packed = read(csv(tmp_path, SESSION_0504))
    plain = read(csv(tmp_path, SESSION_0504, "t.csv"))
    assert [(*r[:6], r.blocks.tolist()) for r in packed] == [
        (*r[:6], r.blocks.tolist()) for r in plain
    ]


def test_requests_before_a_broken_line_are_delivered(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [mooncake_line(), mooncake_line(), "{"])
    requests = open_trace(path).requests()
    assert [next(requests).line, next(requests).line] == [1, 2]
    with pytest.raises(InputError, match=r"t\.jsonl, line 3: not JSON"):
        next(requests)


# ---- what is refused -----------------------------------------------------------------------------

MOONCAKE_FAULTS: dict[str, tuple[str, str]] = {
    "bad JSON": ('{"timestamp": 0, "input_len', "not JSON"),
    "no object": ("[1, 2]", "one JSON object"),
    "deep nesting": ("[" * 200_000, "not JSON"),
    "number of 5,000 digits": ('{"timestamp": ' + "9" * 5000 + "}", "not JSON"),
    "missing field": ('{"timestamp": 3, "input_length": 4, "hash_ids": [1]}', "output_length"),
    "negative length": (mooncake_line(9, -5), "input_length is -5"),
    "empty prompt": (mooncake_line(9, 0, 1, ()), "input_length is 0"),
    "huge length": (mooncake_line(9, 10**30), "input_length is 1000000"),
    "length as text": (mooncake_line(9, "1200"), "input_length is '1200'"),
    "length as true": (mooncake_line(9, True), "input_length is True"),
    "length with a fraction": (mooncake_line(9, 1200.5), "input_length is 1200.5"),
    "negative output": (mooncake_line(9, 1200, -1), "output_length is -1"),
    "too few ids": (mooncake_line(9, 1200, 5, (0, 1)), "2 ids for input_length 1200"),
    "too many ids": (mooncake_line(9, 1200, 5, (0, 1, 2, 3)), "a list of 3"),
    "ids not a list": (mooncake_line(9, 1200, 5, "012"), "hash_ids is '012'"),
    "negative id": (mooncake_line(9, 1200, 5, (0, 1, -2)), "block id -2"),
    "huge id": (mooncake_line(9, 1200, 5, (0, 1, 2**63)), "block id 9223372036854775808"),
    "id of another kind": (mooncake_line(9, 1200, 5, (0, 1, [3])), r"block id \[3\]"),
    "id as true": (mooncake_line(9, 1200, 5, (0, True, 2)), "block id True"),
    "id after another prefix": (mooncake_line(9, 1200, 5, (0, 2, 1)), "than on line 1"),
    "time going back": (mooncake_line(7), "timestamp 7 is before the 8"),
    "negative time": (mooncake_line(-1), "timestamp is -1"),
    "huge time": (mooncake_line(10**400), "timestamp is 1000"),
    "time not a number": (mooncake_line(float("nan")), "timestamp is nan"),
    "infinite time": (mooncake_line(float("inf")), "timestamp is inf"),
    "time as text": (mooncake_line("9"), "timestamp is '9'"),
}


@pytest.mark.parametrize("fault", MOONCAKE_FAULTS)
def test_a_broken_mooncake_line_is_named(tmp_path: Path, fault: str) -> None:
    line, message = MOONCAKE_FAULTS[fault]
    path = write(tmp_path / "t.jsonl.gz", [mooncake_line(0), mooncake_line(8), line])
    with pytest.raises(InputError, match=rf"t\.jsonl\.gz, line 3: .*{message}") as caught:
        read(path)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 500


PREFIX_TREE_FAULTS: dict[str, tuple[str, str]] = {
    "field missing": ("a,2,9,0,-1,0,1,64,1,t,u,0", "12 fields"),
    "field too many": ("a,2,9,0,-1,0,1,64,1,t,u,0,1,1", "14 fields"),
    "empty line": ("", "1 fields"),
    "row left out": ("a,3,9,0,-1,0,1,64,1,t,u,0,1", "i is '3'.*expected 2"),
    "time going back": ("a,2,4,0,-1,0,1,64,1,t,u,0,1", "t is '4'.*5.0 or later"),
    "time not a number": ("a,2,nan,0,-1,0,1,64,1,t,u,0,1", "t is 'nan'"),
    "time with an underscore": ("a,2,1_0,0,-1,0,1,64,1,t,u,0,1", "t is '1_0'"),
    "huge time": ("a,2,1e99,0,-1,0,1,64,1,t,u,0,1", "t is '1e99'"),
    "negative agent": ("a,2,9,-1,-1,0,1,64,1,t,u,0,1", "agent is '-1'"),
    "parent not earlier": ("a,2,9,0,2,1,1,64,1,t,u,0,1", "parent is '2'.*below 2"),
    "parent without prefix": ("a,2,9,0,1,0,1,64,1,t,u,0,1", "parent is '1'.*-1 exactly"),
    "prefix without parent": ("a,2,9,0,-1,1,1,64,1,t,u,0,1", "parent is '-1'.*-1 exactly"),
    "parent below -1": ("a,2,9,0,-2,1,1,64,1,t,u,0,1", "parent is '-2'"),
    "keep above n": ("a,2,9,0,0,2,1,64,1,t,u,0,1", "keep_blocks is '2'.*at most 1"),
    "keep above the parent's": ("a,2,9,0,1,3,4,256,1,t,u,0,1", "keep_blocks is '3'.*at most 2"),
    "n against in": ("a,2,9,0,-1,0,2,64,1,t,u,0,1", "n_blocks is '2'.*expected 1, the full"),
    "empty prompt": ("a,2,9,0,-1,0,0,0,1,t,u,0,1", "in is '0'"),
    "negative prompt": ("a,2,9,0,-1,0,1,-64,1,t,u,0,1", "in is '-64'"),
    "huge prompt": (f"a,2,9,0,-1,0,{2**40},{2**46},1,t,u,0,1", "n_blocks is"),
    "prompt of 5,000 digits": (f"a,2,9,0,-1,0,1,{'9' * 5000},1,t,u,0,1", "in is '999"),
    "digits of another script": ("a,2,9,0,-1,0,1,٦٤,1,t,u,0,1", "in is '٦٤'"),
    "negative output": ("a,2,9,0,-1,0,1,64,-1,t,u,0,1", "out is '-1'"),
    "unknown stop": ("a,2,9,0,-1,0,1,64,1,x,u,0,1", "stop is 'x'"),
    "unknown kind": ("a,2,9,0,-1,0,1,64,1,t,,0,1", "kind is ''"),
    "negative pause": ("a,2,9,0,-1,0,1,64,1,t,u,-1,1", "think is '-1'"),
    "negative duration": ("a,2,9,0,-1,0,1,64,1,t,u,0,-1", "api is '-1'"),
}


@pytest.mark.parametrize("fault", PREFIX_TREE_FAULTS)
def test_a_broken_prefix_tree_line_is_named(tmp_path: Path, fault: str) -> None:
    line, message = PREFIX_TREE_FAULTS[fault]
    good = ["a,0,0,0,-1,0,4,256,1,t,u,0,1", "a,1,5,0,-1,0,2,128,1,t,u,0,1"]
    with pytest.raises(InputError, match=rf"t\.csv\.gz, line 4: .*{message}") as caught:
        read(csv(tmp_path, [*good, line]))
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_session_whose_rows_lie_apart_is_refused(tmp_path: Path) -> None:
    rows = [f"{name},0,0,0,-1,0,1,64,1,t,u,0,1" for name in "aba"]
    with pytest.raises(InputError, match=r"line 4: session 'a' again"):
        read(csv(tmp_path, rows))


def test_a_prompt_at_the_limit_is_read_and_one_above_is_refused(tmp_path: Path) -> None:
    row = "a,0,0,0,-1,0,{},{},1,t,u,0,1"
    (request,) = read(csv(tmp_path, [row.format(MAX_TOKENS // 64, MAX_TOKENS)]))
    assert len(request.blocks) == MAX_TOKENS // 64
    with pytest.raises(InputError, match=rf"line 2: in is .*1 to {MAX_TOKENS}"):
        read(csv(tmp_path, [row.format(MAX_TOKENS // 64, MAX_TOKENS + 1)]))


def test_a_file_of_another_content_than_its_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [mooncake_line()])
    with pytest.raises(InputError, match=r"a\.csv, line 1: the header is .*expected trace,i,t"):
        read(tmp_path / "a.csv")
    write(tmp_path / "b.jsonl", [HEADER, *SESSION_0504])
    with pytest.raises(InputError, match=r"b\.jsonl, line 1: not JSON"):
        read(tmp_path / "b.jsonl")
    write(tmp_path / "c.jsonl", [mooncake_line()]).rename(tmp_path / "c.jsonl.gz")
    with pytest.raises(InputError, match=r"c\.jsonl\.gz is named \.gz but is not gzip"):
        read(tmp_path / "c.jsonl.gz")
    write(tmp_path / "d.jsonl.gz", [mooncake_line()]).rename(tmp_path / "d.jsonl")
    with pytest.raises(InputError, match=r"d\.jsonl is gzip data"):
        read(tmp_path / "d.jsonl")


@pytest.mark.parametrize("name", ["trace.txt", "trace", "trace.gz", ".csv", "trace.json"])
def test_a_name_that_tells_no_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.jsonl\.gz"):
        open_trace(tmp_path / name)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be opened: No such file"):
        read(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.csv cannot be opened: Is a directory"):
        read(tmp_path / "folder.csv")
    for name, lines in {"a.csv": [], "b.csv.gz": [HEADER], "c.jsonl": [], "d.jsonl": [""]}.items():
        with pytest.raises(InputError, match="has no request"):
            read(write(tmp_path / name, lines))


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_gzip_names_the_line_where_it_breaks_off(tmp_path: Path, keep: float) -> None:
    draw = random.Random(1)
    ids = [draw.sample(range(10**9), 3) for _ in range(400)]
    path = write(tmp_path / "t.jsonl.gz", [mooncake_line(0, 1200, 5, i) for i in ids])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    lines = [0]
    with pytest.raises(InputError) as caught:
        lines.extend(request.line for request in open_trace(path).requests())
    assert f"{path}, line {lines[-1] + 1}: the gzip data is broken" in str(caught.value)
    assert len(lines) - 1 == lines[-1] >= 400 * (keep - 0.2)


def test_binary_garbage_is_refused_with_its_line(tmp_path: Path) -> None:
    garbage = random.Random(3).randbytes(2000)
    for name, before in {"a.jsonl": mooncake_line(), "b.csv": HEADER}.items():
        (tmp_path / name).write_bytes(before.encode() + b"\n\xff" + garbage)
        with pytest.raises(InputError, match="line 2: byte 0 is not UTF-8"):
            read(tmp_path / name)
    (tmp_path / "c.jsonl.gz").write_bytes(b"\x1f\x8b" + garbage)
    with pytest.raises(InputError, match="line 1: the gzip data is broken"):
        read(tmp_path / "c.jsonl.gz")


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(4):
            stream.write(bytes(MAX_LINE_BYTES))
    with pytest.raises(InputError, match=f"line 1: no end of line in {MAX_LINE_BYTES} bytes"):
        read(path)


@pytest.mark.parametrize("seed", range(30))
def test_lines_out_of_order_are_named(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = [mooncake_line(10 * i, 1200, 5, (3 * i, 3 * i + 1, 3 * i + 2)) for i in range(20)]
    early, late = sorted(draw.sample(range(20), 2))
    lines[early], lines[late] = lines[late], lines[early]
    with pytest.raises(InputError, match=rf"line {early + 2}: timestamp"):
        read(write(tmp_path / "t.jsonl", lines))


def read_or_message(path: Path) -> tuple[list[TraceRequest], str]:
    try:
        return read(path), str(path)
    except InputError as error:
        return [], str(error)


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_to_a_file_ends_in_another_error(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = {
        "t.csv": [HEADER, *SESSION_0504],
        "t.jsonl": [mooncake_line(0), mooncake_line(8), mooncake_line(9, 1500)],
    }
    for name, good in lines.items():
        data = bytearray(write(tmp_path / name, good).read_bytes())
        for _ in range(20):
            damaged = bytearray(data)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(data))] = draw.choice(b'\x00\n,"[]{}-+.e019_ \xff')
            (tmp_path / name).write_bytes(damaged)
            requests, message = read_or_message(tmp_path / name)
            block = 64 if name == "t.csv" else 512
            assert str(tmp_path / name) in message
            assert all(len(r.blocks) == r.prompt_tokens // block for r in requests)


# ---- lanes ---------------------------------------------------------------------------------------


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


# ---- the real files ------------------------------------------------------------------------------


def test_the_claude_code_sample_reads_as_described(trace_dir: Path) -> None:
    requests = prompt = blocks = last = 0
    for request in open_trace(trace_dir / "claude_code_sessions_500.csv.gz").requests():
        requests += 1
        prompt += request.prompt_tokens
        blocks += len(request.blocks)
        last = max(last, int(request.blocks[-1]) if len(request.blocks) else 0)
    assert (requests, prompt, last + 1) == (35_320, 4_366_755_654, 2_456_613)
    assert blocks == 68_213_048


def test_a_session_reads_as_its_raw_recording(trace_dir: Path) -> None:
    raw = json.loads((trace_dir / "trace_0023.json").read_text())
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    rows = [r for r in trace.requests() if r.session == "0023"]
    names: dict[int, int] = {}
    assert len(rows) == len(raw["requests"]) == 52
    for row, recorded in zip(rows, raw["requests"], strict=True):
        assert row.prompt_tokens == recorded["in"]
        for mine, theirs in zip(row.blocks.tolist(), recorded["hash_ids"], strict=True):
            assert names.setdefault(theirs, mine) == mine
    assert len(set(names.values())) == len(names)


def test_the_mooncake_trace_reads_as_described(trace_dir: Path) -> None:
    requests = list(open_trace(trace_dir / "mooncake_conversation.jsonl.gz").requests())
    assert len(requests) == 12_031
    assert sum(r.prompt_tokens for r in requests) == 144_793_823
    assert len(requests[1].blocks) == 14
    assert requests[1].blocks[0] == requests[0].blocks[0]


def test_lanes_of_the_claude_code_sample_give_the_known_workload(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    requests = list(trace.requests(LaneSettings(lanes=16, hours=1, seed=0)))
    counted = [r for r in requests if r.counted]
    assert (len(requests), sum(r.prompt_tokens for r in counted)) == (1_745, 171_456_066)
