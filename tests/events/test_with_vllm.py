"""vLLM's decoder reads our bytes, our subscriber its publisher: in vLLM's own environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from events import recorded
from events.managers import GEOMETRIES, play_sessions

from kvcache.core.layout import Geometry
from kvcache.retention import Dense, Sparse

SECONDS = 500
VERSION = "0.33.0"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def vllm(repo_root: Path, require: Callable[[str, str], None]) -> Callable[..., str]:
    """Runs a script with the Python that has vLLM; gives what it prints."""
    python = os.environ.get("KVCACHE_VLLM_PYTHON", "")
    if not python:
        require("vllm", f"KVCACHE_VLLM_PYTHON names no Python with vLLM {VERSION} and msgpack")

    def run(script: Path, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [python, str(script), *arguments],
            cwd=repo_root,
            env={**os.environ, "PYTHONPATH": str(repo_root)},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_vllm_and_we_read_each_other(vllm: Callable[..., str]) -> None:
    assert f"all good with vLLM {VERSION}" in vllm(recorded.FOLDER / "check_with_vllm.py")


def test_vllm_rebuilds_our_managers_keys_from_our_events(
    vllm: Callable[..., str], tmp_path: Path
) -> None:
    played = {
        f"{name} {retention}": play_sessions(
            Geometry(GEOMETRIES[name], page_alignment_bytes=1), retention
        )
        for name in ("window", "state", "mixed", "deepseek")
        for retention in (Dense(), Sparse(), Sparse(16))
    }
    files = [tmp_path / str(n) for n in range(len(played))]
    noted = [sorted(rig.held) for rig in played.values()]
    for file, rig in zip(files, played.values(), strict=True):
        file.write_bytes(b"".join(len(p).to_bytes(4, "big") + p for p in rig.payloads))
    script = recorded.FOLDER / "decode_with_vllm.py"
    printed = vllm(script, *map(str, files), stdin=json.dumps(noted))
    answer = json.loads(printed.splitlines()[-1])
    assert answer["vllm"] == VERSION
    for (name, rig), at, read in zip(played.items(), noted, answer["streams"], strict=True):
        assert read["misfits"] == read["cleared"] == 0, name
        assert read["stored"] == read["removed"] > 0, name  # the last clear left nothing
        assert max(map(len, rig.held.values())) > 20, name
        for n, keys in zip(at, read["keys"], strict=True):
            assert {(group, bytes.fromhex(key)) for group, key in keys} == rig.held[n], name


def test_events_that_vllm_records_today_give_its_pools_keys(
    vllm: Callable[..., str], tmp_path: Path
) -> None:
    script = shutil.copy(recorded.FOLDER / "record_vllm_events.py", tmp_path)
    vllm(Path(script))
    assert recorded.index(tmp_path)["vllm"] == VERSION
    for name in recorded.pools():
        for held, pool in recorded.replayed(name, count_copies=True, folder=tmp_path):
            assert held == pool, name
