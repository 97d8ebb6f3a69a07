from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache import FullAttention, Geometry, Manager, Sparse


def test_running_out_of_memory_leaves_no_broken_invariant_and_no_leak() -> None:
    script = Path(__file__).with_name("out_of_memory.py")
    done = subprocess.run(
        [sys.executable, str(script), "0", "40"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *broken, summary = done.stdout.splitlines()
    assert broken == []
    count = re.fullmatch(r"(\d+) of 40 ran out of memory", summary)
    assert count is not None
    assert int(count[1]) >= 10  # else the limit does not bite


MANY_COMMITS = """
import resource, sys
import numpy as np
from kvcache import FullAttention, Geometry, Manager, SlidingWindow, Sparse

shape = {"layers": 1, "kv_heads": 1, "head_dim": 8, "block_tokens": 16}
geometry = Geometry(
    (FullAttention(name="a", **shape), SlidingWindow(name="w", window=1 << 20, **shape))
)
manager = Manager(geometry, slabs=20_000, retention=Sparse())
tokens = int(sys.argv[1])
handle = manager.open(np.arange(tokens), max_tokens=tokens)
manager.lookup(handle)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
step = manager.begin_step()
for _ in range(tokens):
    grant = manager.allocate(handle, 1)
    manager.commit(handle, grant.end)
manager.end_step(step)
manager.check()
print(manager.info(handle).computed)
"""


def test_a_step_with_many_commits_of_one_request_ends_with_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_COMMITS, "30000"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "30000\n"


def test_a_request_whose_label_finds_no_memory_is_not_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its handle is never told to anybody."""
    group = FullAttention(name="full", layers=1, kv_heads=1, head_dim=8, block_tokens=16)
    manager = Manager(Geometry((group,)), slabs=8, retention=Sparse(), events=True)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(manager, "_label", full)
        with pytest.raises(MemoryError):
            manager.open(range(40))
    assert manager.stats().open_requests == 0
    assert manager.open(range(40))
