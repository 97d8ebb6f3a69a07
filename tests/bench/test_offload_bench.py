from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.bench.loads import _row, describe_loads, missed_loads
from kvcache.bench.offload_rig import Rig
from kvcache.cli import main
from kvcache.core.errors import InvariantError

PAGE = 4096


def test_every_tier_moves_every_page_and_says_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--size", "4KiB", "--size", "12KiB", "--count", "1", "--count", "5"]
    few = [
        "--model",
        "none",
        "--repeats",
        "1",
        "--tokens",
        "640",
        "--folder",
        str(tmp_path),
        "--allow-tmpfs",
    ]
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
        with pytest.raises(InvariantError, match="no room for 2 pages more"):
            rig.lookups(1600, 2, beside_stores=True)
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
        (["--model", "huge"], "--model is 'huge': choose from auto, smollm2, tiny, none"),
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
    quick = [
        "--model",
        "none",
        "--tier",
        "host",
        "--size",
        "4KiB",
        "--count",
        "2",
        "--repeats",
        "1",
    ]
    assert main(["bench", "offload", *quick, "--tokens", "64", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["tier", "host", "lookup"]


def test_prompts_and_contents_are_the_same_for_a_seed(tmp_path: Path) -> None:
    made = []
    for seed in (1, 1, 2):
        rig = Rig("host", tmp_path, PAGE, 2, seed=seed)
        made.append((rig._fresh().tobytes(), rig._content().tobytes()))
        rig.close()
    assert made[0] == made[1]
    assert made[0][0] != made[2][0]
    assert made[0][1] != made[2][1]


def test_a_model_loads_always_or_never_or_as_it_thinks_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--tier", "host", "--tier", "disk", "--size", "4KiB", "--count", "1", "--repeats", "2"]
    place = ["--folder", str(tmp_path), "--allow-tmpfs", "--tokens", "64"]
    assert main(["bench", "offload", "--model", "tiny", *few, *place, "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    assert loads["model"] == "tiny-hybrid-0"
    rows = loads["rows"]
    lengths = (33, 129, 513)
    assert [(r["tier"], r["prompt_tokens"]) for r in rows] == [
        (tier, n) for tier in ("host", "disk") for n in lengths
    ]
    for row in rows:
        seconds, loaded = row["first_token_seconds"], row["loaded_tokens"]
        assert seconds[row["better"]] == min(seconds["always"], seconds["never"])
        assert row["auto_vs_better"] > 0
        assert loaded["always"] == row["prompt_tokens"] - 1
        assert loaded["never"] == 0
        assert 0 <= loaded["auto"] <= loaded["always"]
    assert len(describe_loads(loads)) == 2 + len(rows)


def test_auto_is_too_slow_beyond_a_tenth() -> None:
    row = {"tier": "disk", "prompt_tokens": 129}
    found = {"rows": [row | {"auto_vs_better": 1.1}, row | {"auto_vs_better": 1.111}]}
    assert missed_loads(found) == [
        (
            "disk, a prompt of 129 tokens: auto takes 1.11 of the better of loading and computing, aim:"
            " at most 1.1"
        )
    ]
    assert missed_loads({"rows": []}) == []


def test_auto_stands_beside_the_better_of_the_two_round_by_round() -> None:
    taken = {
        "always": [(1.0, 32), (4.0, 32), (2.0, 32)],
        "never": [(3.0, 0), (3.0, 0), (3.0, 0)],
        "auto": [(2.0, 32), (4.0, 0), (3.0, 32)],
    }
    row = _row("host", 33, taken)
    assert (row["better"], row["auto_vs_better"]) == ("always", 1.5)
    assert row["first_token_seconds"] == {"always": 2.0, "never": 3.0, "auto": 3.0}
    assert row["loaded_tokens"] == {"always": 32, "never": 0, "auto": 32}


def test_without_a_model_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from kvcache.cli import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    options = ["--tier", "host", "--size", "4KiB", "--count", "1", "--model", "none", "--quick"]
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "offload", *options, "--folder", str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "host" in done.stdout
