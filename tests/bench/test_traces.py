"""Readers: what a trace says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from replays.files import SESSION_0504, csv, mooncake_line, read, write

from kvcache.bench.traces import TraceRequest, open_trace
from kvcache.core.errors import InputError


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
