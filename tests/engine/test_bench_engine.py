from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import paged
from numpy.typing import NDArray

from kvcache.bench import dense
from kvcache.bench.engine import EngineBench, run_engine_bench
from kvcache.core.errors import ConfigError
from kvcache.engine import ops
from kvcache.engine.chunk import Chunk


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcache.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SMALL = (
    "--model", "tiny", "--part", "floors", "--tokens", "40", "--repeats", "2", "--threads", "1",
)  # fmt: skip


def test_the_engine_bench_prints_one_json_object_of_two_equal_computations(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    done = bench("engine", *SMALL, "--json", "--seed", "3", "--output", str(output))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert json.loads(output.read_text()) == report
    assert report["prefill_vs_dense"] == report["prefill"]["ratio"] > 0
    assert report["decode_vs_padded"] == report["decode"]["ratio"] > 0
    assert (report["seed"], report["machine"]["threads"]) == (3, 1)
    for part in ("prefill", "decode"):
        assert report[part]["same_next_tokens"] is True
        assert report[part]["max_logit_difference"] < 1e-4


def test_the_engine_bench_has_a_form_for_people() -> None:
    done = bench("engine", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert lines[:4] == ["tiny-hybrid-0,", "paged", "prefill", "decode"]
    assert lines[4:6] == ["prefill_vs_dense", "decode_vs_padded"]
    assert set(lines[6:]) <= {"missed:", "All"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "nothing"),
        (("engine", "--model", "huge"), "--model is 'huge': choose from smollm2, tiny"),
        (("engine", *SMALL[:2], "--tokens", "0"), "--tokens is 0: it must be above 0"),
        (
            ("engine", *SMALL[:2], "--tokens", "99999"),
            "--tokens is 99999: the model's context has 32768",
        ),
        (("engine", *SMALL[:2], "--threads", "-1"), "--threads is -1"),
        (("engine", *SMALL[:2], "--threads", "100000"), "--threads is 100000: at most 256"),
        (("engine", *SMALL[:2], "--repeats", "1000000"), "--repeats is 1000000: at most 1000"),
        (("engine", *SMALL[:2], "--repeats", "x"), "x"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_bench_leaves_the_thread_count_as_it_was() -> None:
    torch.set_num_threads(1)
    with pytest.raises(ConfigError, match="context"):
        run_engine_bench(EngineBench(model="tiny", threads=2, tokens=10**6), print)
    assert torch.get_num_threads() == 1


def test_a_wrong_paged_computation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = paged.TorchRunner.run

    def broken(self: paged.TorchRunner, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        best = compute(self, chunks)
        self.last_logits = self.last_logits.roll(1, -1)
        return best

    monkeypatch.setattr(paged.TorchRunner, "run", broken)
    report = run_engine_bench(
        EngineBench(model="tiny", part="floors", tokens=40, repeats=1), lambda _: None
    )
    assert report["prefill"]["same_next_tokens"] is False
    assert report["decode"]["max_logit_difference"] > 0.1


@pytest.mark.parametrize(("rows", "weight_left"), [(2, True), (3, True), (128, True), (129, False)])
def test_the_dense_forward_multiplies_few_rows_as_the_engine_does(
    rows: int, weight_left: bool
) -> None:
    x, weight = torch.randn(rows, 1, 8), torch.randn(6, 8)
    product = dense._linear(x, weight)
    assert product.shape == (rows, 1, 6)
    assert torch.allclose(product, x @ weight.t(), atol=1e-5)
    assert (product.stride(-1) == rows) is weight_left
    assert (ops.linear(x[:, 0], weight).stride(-1) == rows) is weight_left
