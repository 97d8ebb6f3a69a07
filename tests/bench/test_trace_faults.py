"""Readers: how each way of being broken is named."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from replays.files import SESSION_0504, csv, mooncake_line, read, write

from kvcache.bench.traces import TraceRequest, open_trace
from kvcache.bench.traces.base import MAX_TOKENS
from kvcache.bench.traces.lines import MAX_LINE_BYTES
from kvcache.bench.traces.prefix_tree import HEADER
from kvcache.core.errors import ConfigError, InputError

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
