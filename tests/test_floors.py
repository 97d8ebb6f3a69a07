from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# An editable install finds the package wherever the current folder is: taken out, so that a copy is found.
PROGRAM = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
sys.argv[1:] = ["--no-cache", "--no-logo"]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""
LINKED = ("connectors", "retention", "bench")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copied(repo_root: Path, tmp_path: Path) -> Path:
    """A copy of the package that a test may break."""
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repo_root / "kvcache", tmp_path / "kvcache", symlinks=True, ignore=ignored)
    for name in LINKED:
        shutil.copytree(repo_root / name, tmp_path / name, ignore=ignored)
    return tmp_path


def test_imports_run_downward_only(repo_root: Path) -> None:
    done = lint_imports(repo_root)
    assert done.returncode == 0, done.stdout
    assert "2 kept, 0 broken" in done.stdout


def test_an_upward_import_through_a_link_is_found(copied: Path) -> None:
    with (copied / "retention" / "policy.py").open("a") as stream:
        stream.write("\nimport kvcache.cli\n")
    done = lint_imports(copied)
    assert done.returncode == 1
    assert "kvcache.retention is not allowed to import kvcache.cli" in done.stdout


def test_torch_below_the_engine_is_found(copied: Path) -> None:
    with (copied / "kvcache" / "core" / "retain.py").open("a") as stream:
        stream.write("\n\ndef late() -> None:\n    import torch\n")
    done = lint_imports(copied)
    assert done.returncode == 1
    assert "kvcache.core is not allowed to import torch" in done.stdout


def test_a_room_without_a_floor_is_refused(copied: Path) -> None:
    (copied / "kvcache" / "attic").mkdir()
    (copied / "kvcache" / "attic" / "__init__.py").touch()
    done = lint_imports(copied)
    assert done.returncode == 1
    assert "attic" in done.stdout
