"""vLLM's decoder reads our bytes, our subscriber its publisher: in vLLM's own environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_vllm_and_we_read_each_other(repo_root: Path, require: Callable[[str, str], None]) -> None:
    python = os.environ.get("KVCACHE_VLLM_PYTHON", "")
    if not python:
        require("vllm", "KVCACHE_VLLM_PYTHON names no Python with vLLM 0.33.0 and msgpack")
    done = subprocess.run(
        [python, "tests/golden/check_with_vllm.py"],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all good with vLLM 0.33.0" in done.stdout
