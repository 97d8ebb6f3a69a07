from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.bench.offload import OffloadBench, run_offload_bench
from kvcache.bench.offload_rig import Rig
from kvcache.cli import main
from kvcache.core.errors import InvariantError

PAGE = 4096


def test_every_tier_moves_every_page_and_says_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--size", "4KiB", "--size", "12KiB", "--count", "1", "--count", "5"]
    few = ["--repeats", "1", "--tokens", "640", "--folder", str(tmp_path), "--allow-tmpfs"]
    assert main(["bench", "offload", *sizes, *few, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    rows = {(r["tier"], r["page_bytes"], r["pages"]): r for r in report["transfers"]}
    tiers = ("host", "disk", "chain")
    assert set(rows) == {(t, size * 1024, n) for t in tiers for size in (4, 12) for n in (1, 5)}
    for (tier, size, pages), row in rows.items():
        seconds = row["seconds"]
        assert row["load_bytes_per_second"] == pytest.approx(size * pages / seconds["load"])
        assert row["store_bytes_per_second"] == pytest.approx(size * pages / seconds["store"])
        assert seconds["plan_load"] <= seconds["load"]
        assert seconds["plan_store"] <= seconds["store"]
        assert row["per_page_seconds"]["lookup"] == pytest.approx(seconds["lookup"] / pages)
        plain = row["plain_seconds"][row["plain"][1]]
        assert row["load_vs_plain"] == pytest.approx(plain / seconds["load"])
        assert row["plain"] == (["file_write", "file_read"] if tier == "disk" else ["memcpy"] * 2)
        assert ("load_below_bytes_per_second" in row) == (tier == "chain")
    assert set(report["lookups"]) == set(tiers)
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_gives_other_bytes_is_found_out(tmp_path: Path) -> None:
    rig = Rig("host", tmp_path, PAGE, 3, seed=1)
    try:
        rig.round()
        (slots,) = rig._offload._worker.slot_regions or ()
        memory = (ctypes.c_uint8 * (slots.pages * slots.step_bytes)).from_address(slots.address)
        store = rig._store

        def spoiled(tokens: NDArray[np.int32], content: NDArray[np.uint8]) -> tuple[float, float]:
            taken = store(tokens, content)
            np.frombuffer(memory, np.uint8)[:] ^= 1
            return taken

        rig._store = spoiled  # type: ignore[method-assign]
        with pytest.raises(InvariantError, match="other bytes came back"):
            rig.round()
    finally:
        rig.close()


def test_the_chain_loads_from_its_lower_tier_what_the_upper_one_has_not(tmp_path: Path) -> None:
    rig = Rig("chain", tmp_path, PAGE, 4, seed=1)
    try:
        rig.round()
        upper, lower = rig._offload._scheduler.tiers
        before = lower.scheduler.stats().loaded_pages
        seconds = rig.round()
        assert seconds.load_below is not None
        assert lower.scheduler.stats().loaded_pages - before == 4
        assert upper.scheduler.stats().loaded_pages > 0
    finally:
        rig.close()


def test_lookups_are_of_the_whole_prompt(tmp_path: Path) -> None:
    rig = Rig("host", tmp_path, 64, 100, seed=1)
    try:
        taken = rig.lookups(1600, 5)
        assert len(taken) == 5
        assert all(seconds > 0 for seconds, _ in taken)
        rig._store = lambda *_: (0.0, 0.0)  # type: ignore[method-assign]
        with pytest.raises(InvariantError, match="is not in the tier"):
            rig.lookups(1600, 1)
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "5000"], "--size is 5000 bytes: give a multiple of 4096"),
        (["--count", "0"], "--count is 0"),
        (["--tier", "tape"], "invalid choice: 'tape'"),
        (["--tokens", "1"], "--tokens is 1: at least 32"),
        (["--size", "1GiB", "--count", "16"], "at most 8589934592"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--folder", "/nowhere/at/all"], "--folder /nowhere/at/all cannot be used"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offload", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_table_has_a_line_for_each_row_and_each_lookup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--tier", "host", "--size", "4KiB", "--count", "2", "--repeats", "1"]
    assert main(["bench", "offload", *quick, "--tokens", "64", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["tier", "host", "lookup"]


def test_rounds_are_the_same_for_a_seed(tmp_path: Path) -> None:
    bench = OffloadBench(
        tiers=("host",), page_bytes=(PAGE,), counts=(2,), tokens=64, repeats=1, folder=str(tmp_path)
    )
    report = run_offload_bench(bench, lambda _: None)
    assert [row["pages"] for row in report["transfers"]] == [2]
    assert report["seed"] == 0
