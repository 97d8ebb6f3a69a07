"""`kvcache bench copy`: what is measured, what is refused, the command line. No timings."""

from __future__ import annotations

import json

import pytest

from kvcache import cli
from kvcache.bench.copy import CopyBench, _missed, _ratio, describe, run_copy_bench
from kvcache.core.copy import cores
from kvcache.core.errors import ConfigError

RATIOS = ("vs_torch", "vs_contiguous", "cpu_vs_torch", "contiguous_vs_memcpy")
SMALL = {"bytes": 1 << 20, "sizes": (4096, 65536, 8 * 1001), "repeats": 2}


def test_each_copy_is_measured_beside_torch_and_a_contiguous_one() -> None:
    """`run_copy_bench` compares what both copied with numpy."""
    said: list[str] = []
    report = run_copy_bench(CopyBench(**SMALL), said.append)  # type: ignore[arg-type]
    assert json.loads(json.dumps(report)) == report
    threads = [n for n in (1, 2) if n <= cores()]
    rows = report["copies"]
    assert [(row["page_bytes"], row["threads"], row["direction"]) for row in rows] == [
        (size, n, direction)
        for size in (4096, 65536, 8008)
        for n in threads
        for direction in ("gather", "scatter")
    ]
    assert len(said) == len(rows)
    for row in rows:
        assert set(row["gb_per_second"]) == {"ours", "torch", "contiguous", "memcpy"}
        assert min(*row["gb_per_second"].values(), *(row[ratio] for ratio in RATIOS)) > 0
        large = row["page_bytes"] >= 64 << 10
        assert row["aim_vs_torch"] == (1.5 if large else 1.3)
        assert row.get("aim_vs_contiguous") == (0.9 if large else None)
    assert len(report["nanoseconds_per_move"]) == 4
    lines = describe(report)
    assert len(lines) == 2 + len(rows) + 1 + 4


def test_what_is_missed_is_what_is_below_its_aim() -> None:
    report = run_copy_bench(CopyBench(bytes=1 << 18, sizes=(65536,), repeats=1), lambda _: None)
    below = [
        (row["direction"], row["threads"], ratio)
        for row in report["copies"]
        for ratio in ("vs_torch", "vs_contiguous")
        if row[ratio] < row[f"aim_{ratio}"]
    ]
    slow = [spent for spent in report["nanoseconds_per_move"].values() if spent > 2.0]
    assert len(report["missed"]) == len(below) + len(slow)
    for (direction, threads, ratio), text in zip(below, report["missed"], strict=False):
        assert text.startswith(f"{direction} of 64 KiB, {threads} threads: {ratio} ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0}, "--repeats is 0: at least 1"),
        ({"sizes": (0,)}, "--size 0: pages are of 8 bytes"),
        ({"sizes": (4100,)}, "--size 4100: .* a multiple of 8"),
        ({"sizes": (8192,), "bytes": 4096}, r"--size 8192: .* at most --bytes \(4096\)"),
        ({"bytes": 1 << 60}, "--bytes 1152921504606846976: twice as much is needed"),
    ],
)
def test_sizes_that_cannot_be_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CopyBench(**settings)  # type: ignore[arg-type]


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "copy", "--quick", "--bytes", "1MiB", "--size", "4KiB", "--repeats", "1"]
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bytes"], report["repeats"]) == (1 << 20, 1)
    assert {row["page_bytes"] for row in report["copies"]} == {4096}
    assert cli.main(["bench", "copy", "--pages", "3"]) == 2
    assert "--pages is an option of `bench disk`, not of `bench copy`" in capsys.readouterr().err


def test_every_list_of_moves_is_under_the_aim() -> None:
    spent = {"118_layers_to_slots_random": 2.0, "1_layer_random": 4.4}
    assert _missed([], spent) == ["1_layer_random: 4.40 ns a move, aim 2.0"]


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    seconds = {"ours": [1.0, 2.0, 4.0], "memcpy": [3.0, 2.0, 1.0], "contiguous": [1.0, 4.0, 4.0]}
    assert _ratio(seconds, "memcpy") == 1.0
    assert _ratio(seconds, "memcpy", "contiguous") == 0.5
