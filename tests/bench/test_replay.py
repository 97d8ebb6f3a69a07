"""Replay against naive models of the cache, its figures on real traces, and its command line."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import cli
from kvcache.bench.ideal import IdealCache
from kvcache.bench.replay import Replay, ReplaySettings, foreign_digests
from kvcache.bench.traces import LaneSettings, TraceRequest, open_trace
from kvcache.commands.replay import pool_size, retention, token_count
from kvcache.core.errors import CapacityError, ConfigError

BLOCK = 512  # of a Mooncake trace
MOST_BLOCKS = 12  # of a random prompt: with its reply it fits in one step of 8,192 tokens


def random_trace(seed: int, count: int = 60) -> list[TraceRequest]:
    """Requests that continue, cut and repeat each other's prompts."""
    draw = random.Random(seed)
    paths: list[list[int]] = [[]]
    made = 0
    requests = []
    for line in range(1, count + 1):
        known = draw.choice(paths[-8:])
        path = known[: draw.choice((len(known), draw.randint(0, len(known))))]
        grown = draw.randint(0 if path else 1, MOST_BLOCKS - len(path))
        path = path + list(range(made, made + grown))
        made += grown
        paths.append(path)
        prompt = len(path) * BLOCK + draw.choice((0, 1, draw.randrange(BLOCK)))
        blocks = np.array(path, np.int64)
        output = draw.choice((0, 1, 2, 300, 1500))
        requests.append(TraceRequest(line, float(line), "", 0, prompt, output, blocks))
    return requests


def serve_all(
    requests: Iterable[TraceRequest], settings: ReplaySettings, trace_block: int = BLOCK
) -> tuple[list[int], dict[str, Any]]:
    """Hit tokens of each request, and the report at the end."""
    replay = Replay(Path("trace"), trace_block, settings)
    hits, before = [], 0
    for request in requests:
        replay.serve(request)
        total = replay.report()["hit_tokens"]
        hits.append(total - before)
        before = total
    return hits, replay.report()


def naive_lru(requests: Iterable[TraceRequest], merge: int, pages: int) -> list[int]:
    """An LRU cache of `pages` blocks: one request at a time, its pages pinned, tail evicted first."""
    cached: OrderedDict[int, None] = OrderedDict()
    block, hits = BLOCK * merge, []
    for request in requests:
        keys, prompt = request.blocks.tolist()[merge - 1 :: merge], request.prompt_tokens
        run = 0
        while run < (prompt - 1) // block and keys[run] in cached:
            run += 1
        held = keys[:run]
        for key in held:
            del cached[key]
        while len(cached) + -(-prompt // block) > pages:
            cached.popitem(last=False)
        held += [k for k in keys[run:] if k not in cached]  # the others stay where they are
        while len(cached) + -(-(prompt + max(0, request.output_tokens - 1)) // block) > pages:
            cached.popitem(last=False)
        for key in reversed(held):
            cached[key] = None
        hits.append(run * block)
    return hits


def naive_states(requests: Iterable[TraceRequest], interval: int | None) -> tuple[list[int], int]:
    """An infinite cache of attention and recurrent states: hits, and states made."""
    blocks: set[int] = set()
    states: set[int] = set()
    hits = []
    for request in requests:
        keys, prompt = request.blocks.tolist(), request.prompt_tokens
        run = 0
        while run < (prompt - 1) // BLOCK and keys[run] in blocks:
            run += 1
        hit = max(p for p in range(run + 1) if p == 0 or keys[p - 1] in states)
        end = (prompt + max(0, request.output_tokens - 1)) // BLOCK
        keep = {(prompt - 1) // BLOCK, run, end}
        if interval != 0:
            step = (interval or BLOCK) // BLOCK
            keep |= set(range(step, len(keys) + 1, step))
        states |= {keys[p - 1] for p in keep if hit < p <= len(keys)}
        blocks |= set(keys)
        hits.append(hit * BLOCK)
    return hits, len(states)


# ---- against naive models ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_a_bounded_pool_hits_as_a_naive_lru_does(seed: int) -> None:
    requests = random_trace(seed)
    for merge in (1, 2):
        # The smallest pool that takes the longest random request, and larger ones.
        for pages in (16 // merge, 24 // merge, 60 // merge, 400 // merge):
            settings = ReplaySettings(
                block_tokens=BLOCK * merge, pool_tokens=pages * BLOCK * merge, check=True
            )
            hits, report = serve_all(requests, settings)
            assert hits == naive_lru(requests, merge, pages)
            assert report["leaked_blocks"] == 0
            assert report["peak_used_pages"]["full"] <= pages


@pytest.mark.parametrize("seed", range(25))
def test_an_unbounded_pool_hits_as_the_ideal_cache_does(seed: int) -> None:
    requests = random_trace(seed)
    for merge in (1, 3):
        _, report = serve_all(requests, ReplaySettings(block_tokens=BLOCK * merge, check=True))
        assert report["hit_tokens"] == sum(naive_lru(requests, merge, 10**6))
        assert report["hit_rate"] == report["ideal_hit_rate"]
        assert report["lost_tokens_by_cause"]["evicted"] == 0


@pytest.mark.parametrize("interval", [None, 0, BLOCK, 3 * BLOCK])
def test_kept_states_hit_as_a_naive_model_does(interval: int | None) -> None:
    for seed in range(20):
        requests = random_trace(seed)
        settings = ReplaySettings(
            block_tokens=BLOCK, preset="qwen3.5-9b", retention_tokens=interval, check=True
        )
        hits, report = serve_all(requests, settings)
        expected, states = naive_states(requests, interval)
        assert hits == expected
        assert report["checkpoints_per_request"] == states / len(requests)
        assert report["leaked_blocks"] == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("interval", [None, 0, 2 * BLOCK])
def test_hit_and_lost_tokens_add_up_to_the_prompts(seed: int, interval: int | None) -> None:
    requests = random_trace(seed)
    for pool in (32 * BLOCK, 64 * BLOCK, None):
        for preset in ("llama-3-8b", "qwen3.5-9b"):
            settings = ReplaySettings(
                block_tokens=BLOCK,
                pool_tokens=pool,
                preset=preset,
                retention_tokens=interval,
                check=True,
            )
            _, report = serve_all(requests, settings)
            lost = report["lost_tokens_by_cause"]
            assert report["prompt_tokens"] == sum(r.prompt_tokens for r in requests)
            assert report["hit_tokens"] + sum(lost.values()) == report["prompt_tokens"]
            assert report["hit_rate"] <= report["ideal_hit_rate"]
            assert report["leaked_blocks"] == 0


def test_a_prompt_of_many_steps_leaves_the_same_keys_as_one_of_one() -> None:
    blocks = np.arange(100, dtype=np.int64)
    long = TraceRequest(1, 0.0, "", 0, 100 * BLOCK + 7, 20_000, blocks)
    hits, report = serve_all([long, long], ReplaySettings(block_tokens=BLOCK, check=True))
    assert hits == [0, 100 * BLOCK]
    assert report["peak_used_pages"]["full"] == -(-(100 * BLOCK + 7 + 19_999) // BLOCK)


def test_the_last_token_is_recomputed() -> None:
    blocks = np.arange(3, dtype=np.int64)
    request = TraceRequest(1, 0.0, "", 0, 3 * BLOCK, 0, blocks)
    hits, report = serve_all([request, request], ReplaySettings(block_tokens=BLOCK))
    assert hits == [0, 2 * BLOCK]
    assert report["ideal_hit_rate"] == 2 / 6


def test_requests_of_the_warm_up_are_served_but_not_counted() -> None:
    blocks = np.arange(3, dtype=np.int64)
    request = TraceRequest(1, 0.0, "", 0, 3 * BLOCK + 1, 5, blocks)
    _, report = serve_all(
        [request._replace(counted=False), request], ReplaySettings(block_tokens=BLOCK)
    )
    assert report["requests"] == 1
    assert report["prompt_tokens"] == report["hit_tokens"] + 1 == 3 * BLOCK + 1


def test_the_ideal_cache_agrees_with_a_set() -> None:
    for seed in range(20):
        ideal, seen = IdealCache(BLOCK), set[int]()
        for request in random_trace(seed):
            run = 0
            while run < len(request.blocks) and int(request.blocks[run]) in seen:
                run += 1
            seen |= set(request.blocks.tolist())
            limit = (request.prompt_tokens - 1) // BLOCK
            hit = ideal.hit_tokens(request.blocks, request.prompt_tokens)
            assert hit == min(run, limit) * BLOCK


def test_foreign_digests_differ_where_numbers_do() -> None:
    keys = np.array([0, 1, 256, 2**40, 2**62], np.int64)
    digests = foreign_digests(keys)
    assert digests.shape == (5, 32)
    assert [int.from_bytes(d.tobytes(), "little") for d in digests] == keys.tolist()


# ---- checks --------------------------------------------------------------------------------------


def test_a_small_trace_is_checked_at_every_request_and_at_the_end() -> None:
    requests = random_trace(1)
    for check, expected in ((True, len(requests) + 1), (False, 0)):
        replay = Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=BLOCK, check=check))
        for request in requests:
            replay.serve(request)
        assert replay.report()["checks"] == expected


def test_a_leak_is_counted() -> None:
    replay = Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=BLOCK))
    manager = replay._manager
    handle = manager.open_foreign(np.zeros((0, 32), np.uint8), prompt_tokens=100)
    manager.lookup(handle)
    step = manager.begin_step()
    assert manager.allocate(handle, 100) is not None
    manager.commit(handle, 100)
    manager.end_step(step)
    assert replay.report()["leaked_blocks"] == 1


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("512", 512), ("1_000_000", 10**6), ("512k", 512_000), ("2.56M", 2_560_000), ("1G", 10**9)],
)
def test_token_counts_are_read(text: str, tokens: int) -> None:
    assert token_count(text) == pool_size(text) == tokens


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "nan",
        "",
        "1.5",
        "0.0001k",
        "1e9",
        "12Q",
        "k",
        "_1",
        "\u0665",
        "1" * 40,
        "infinity",
    ],
)
def test_other_token_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a number of tokens.*or inf"):
        pool_size(text)


def test_inf_dense_and_zero_are_words_of_their_flags_only() -> None:
    assert pool_size("inf") is None
    assert retention("dense") is None
    assert retention("0") == 0
    for text in ("inf", "dense", "0"):
        with pytest.raises(argparse.ArgumentTypeError):
            token_count(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "llama"}, "llama-3-8b, qwen3"),
        ({"block_tokens": 0}, "--block-tokens is 0"),
        ({"pool_tokens": 511}, "--pool-tokens 511 is less than one block of 512"),
        ({"pool_tokens": -1}, "--pool-tokens -1"),
        ({"retention_tokens": 100}, "--retention 100 .* multiple of the hit grid of 512"),
        ({"retention_tokens": -512}, "--retention -512"),
    ],
)
def test_impossible_settings_name_their_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplaySettings(**{"block_tokens": BLOCK} | changes)


def test_a_block_that_cuts_the_traces_blocks_is_refused() -> None:
    for block in (100, 768, 64):
        with pytest.raises(ConfigError, match=f"--block-tokens {block} is not a multiple .* 512"):
            Replay(Path("t"), BLOCK, ReplaySettings(block_tokens=block))


def test_a_request_larger_than_the_pool_is_named_with_the_size_that_takes_it() -> None:
    blocks = np.arange(4, dtype=np.int64)
    requests = [
        TraceRequest(3, 0.0, "", 0, 600, 1, blocks[:1]),
        TraceRequest(17, 0.0, "", 0, 4 * BLOCK + 9, 900, blocks),
    ]
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=5 * BLOCK)
    with pytest.raises(
        CapacityError,
        match=r"line 17: the request has 2057 prompt and 900 output .* --pool-tokens to 3072",
    ):
        serve_all(requests, settings)
    _, report = serve_all(requests, ReplaySettings(block_tokens=BLOCK, pool_tokens=3072))
    assert report["requests"] == 2


# ---- the command line ----------------------------------------------------------------------------


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> Path:
    """A Mooncake file; the partial last block gets an id of its own."""
    with path.open("w") as stream:
        for r in requests:
            ids = r.blocks.tolist() + ([10**6 + r.line] if r.prompt_tokens % BLOCK else [])
            fields = {
                "timestamp": r.line,
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": ids,
            }
            stream.write(json.dumps(fields) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.jsonl", random_trace(5))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_json_is_one_object_with_all_figures(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("replay", trace, "--pool-tokens", "10.24k", "--check", "--json", "--seed", 7)
    status, out, err = run(capsys, *argv)
    report = json.loads(out)
    assert (status, err) == (0, "")
    expected: dict[str, Any] = {
        "requests": 60,
        "block_tokens": 512,
        "pool_tokens": 10_240,
        "leaked_blocks": 0,
    }
    expected |= {"retention": "dense", "seed": 7, "checks": 61, "preemptions": 0}
    assert report == report | expected
    assert report["hit_tokens"] == sum(naive_lru(random_trace(5), 1, 20))
    assert report["hit_rate"] == report["hit_tokens"] / report["prompt_tokens"]
    assert report["hit_rate_by_source"] == {"device": report["hit_rate"]}
    assert report["peak_used_bytes"] == 20 * BLOCK * 128 * 1024
    assert 0 < report["manager_seconds"] < report["wall_seconds"]
    for field in ("ideal_hit_rate", "lost_tokens_by_cause", "checkpoints_per_request", "trace"):
        assert field in report


def test_without_json_a_table_is_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("replay", trace, "--preset", "qwen3.5-9b", "--retention", 0, "--pool-tokens", "20k")
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    assert "hit rate" in out
    assert "states kept" in out
    assert len(out.splitlines()) < 20


def test_output_is_the_same_json_as_on_stdout(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", trace, "--json", "--output", tmp_path / "o.json")
    assert status == 0
    assert (tmp_path / "o.json").read_text() == out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-tokens", "100"), "--block-tokens 100 is not a multiple of the trace's block"),
        (("--pool-tokens", "-1"), "'-1' is not a number of tokens"),
        (("--pool-tokens", "0"), "'0' is not a number of tokens"),
        (("--pool-tokens", "nan"), "'nan' is not a number of tokens"),
        (("--pool-tokens", "2k"), "line 3: the request has .* raise --pool-tokens to"),
        (("--preset", "x"), "llama-3-8b, qwen3"),
        (("--retention", "100"), "--retention 100"),
        (("--retention", "some"), "'some' is not"),
        (("--hours", "1"), "--hours 1.0 needs --lanes"),
        (("--lanes", "2"), "--lanes replays live sessions"),
        (("--lanes", "0"), "--lanes is 0"),
        (("--lanes", "x"), "--lanes: invalid int value"),
        (("--output",), "expected one argument"),
    ],
)
def test_wrong_usage_ends_with_two_one_line_and_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    blocks = np.arange(4, dtype=np.int64)
    sizes = ((1, 512, 1), (2, 512, 1), (3, 2048, 99))
    requests = [TraceRequest(i, 0.0, "", 0, n, o, blocks[: n // 512]) for i, n, o in sizes]
    trace = write_trace(tmp_path / "t.jsonl", requests)
    status, out, err = run(capsys, "replay", trace, "--json", *flags)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def test_a_broken_trace_ends_with_two_and_leaves_the_output_file_alone(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace.open("a") as stream:
        stream.write('{"timestamp": 99, "input_length": -4}\n')
    output = tmp_path / "o.json"
    output.write_text("old")
    status, out, err = run(capsys, "replay", trace, "--json", "--output", output)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvcache: {trace}, line 61: no field 'output_length'")
    assert output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json", "t.jsonl"]


def test_a_full_disk_under_the_output_file_ends_with_two(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "replay", trace, "--json", "--output", "/dev/full")
    assert status == 2
    assert "/dev/full: No space left on device" in err


# ---- the real files ------------------------------------------------------------------------------


def test_the_mooncake_trace_hits_as_an_infinite_cache(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "mooncake_conversation.jsonl.gz")
    replay = Replay(trace.path, 512, ReplaySettings(block_tokens=512, check=True))
    for request in trace.requests():
        replay.serve(request)
    report = replay.report()
    assert report["hit_rate"] == pytest.approx(0.3734, abs=0.0003)
    assert report["hit_rate"] == report["ideal_hit_rate"]
    assert report["leaked_blocks"] == 0
    assert report["checks"] > 100


def test_the_mooncake_trace_hits_as_lru_in_five_million_tokens(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "mooncake_conversation.jsonl.gz")
    replay = Replay(trace.path, 512, ReplaySettings(block_tokens=512, pool_tokens=5_120_000))
    for request in trace.requests():
        replay.serve(request)
    assert replay.report()["hit_rate"] == pytest.approx(0.216, abs=0.006)


@pytest.mark.parametrize(
    ("pool_tokens", "lru"), [(1_000_000, 0.644), (2_000_000, 0.908), (3_000_000, 0.950)]
)
def test_sixteen_live_sessions_hit_as_the_reference_simulation_of_lru(
    trace_dir: Path, pool_tokens: int, lru: float
) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    settings = ReplaySettings(block_tokens=512, pool_tokens=pool_tokens)
    replay = Replay(trace.path, 64, settings)
    for request in trace.requests(LaneSettings(lanes=16, hours=1)):
        replay.serve(request)
    report = replay.report()
    assert report["hit_rate"] == pytest.approx(lru, abs=0.002)
    assert report["ideal_hit_rate"] == pytest.approx(0.9528, abs=0.0001)


def test_agent_sessions_hit_as_an_infinite_cache(trace_dir: Path) -> None:
    trace = open_trace(trace_dir / "claude_code_sessions_500.csv.gz")
    replay = Replay(trace.path, 64, ReplaySettings(block_tokens=64))
    for request in islice(trace.requests(), 3000):
        replay.serve(request)
    report = replay.report()
    assert report["hit_rate"] == report["ideal_hit_rate"] > 0.9


def test_the_ideal_hit_rate_of_the_claude_code_sample_is_known(trace_dir: Path) -> None:
    ideal, hit, prompt = IdealCache(64), 0, 0
    for request in open_trace(trace_dir / "claude_code_sessions_500.csv.gz").requests():
        hit += ideal.hit_tokens(request.blocks, request.prompt_tokens)
        prompt += request.prompt_tokens
    assert hit / prompt == pytest.approx(0.9637, abs=0.0001)


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3.5-9b"])
def test_states_share_the_bytes_of_a_bounded_pool(preset: str) -> None:
    for blocks in (32, 100, 5000):
        settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=blocks * BLOCK, preset=preset)
        geometry = settings.geometry()
        page_bytes = geometry.groups[0].page_bytes
        total = geometry.pool_bytes(settings.pages(geometry))
        assert (blocks - 1) * page_bytes < total <= blocks * page_bytes


@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3.5-9b"])
@pytest.mark.parametrize("tokens", [1, 3 * BLOCK, 40 * BLOCK + 1, 900 * BLOCK])
def test_the_pool_that_an_error_asks_for_is_enough(preset: str, tokens: int) -> None:
    geometry = ReplaySettings(block_tokens=BLOCK, preset=preset).geometry()
    enough = ReplaySettings(block_tokens=BLOCK, preset=preset).enough_tokens(tokens, geometry)
    pages = ReplaySettings(block_tokens=BLOCK, preset=preset, pool_tokens=enough).pages(geometry)
    assert all(n >= need for n, need in zip(pages, geometry.pages_needed(tokens), strict=True))


def test_a_pool_for_less_than_two_states_is_refused() -> None:
    settings = ReplaySettings(block_tokens=BLOCK, pool_tokens=BLOCK, preset="qwen3.5-9b")
    with pytest.raises(ConfigError, match="less than two states"):
        settings.pages(settings.geometry())
