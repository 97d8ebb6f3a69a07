"""A copy of the source tree in which faults are built and tested, one after the other.

The native library is built without optimisation to speak of and incrementally: a fault costs the
compilation of the files that it touches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "shared", ".*_cache", "__pycache__", ".hypothesis", "*.so"
)


class Outcome(NamedTuple):
    """What became of a process. `code` is negative for a signal, None for too late."""

    code: int | None
    output: str


def run(command: list[str], *, cwd: Path, seconds: float, env: dict[str, str]) -> Outcome:
    """Run to the end, or kill it after `seconds`."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(None, (late.output or b"").decode(errors="replace"))
    return Outcome(done.returncode, done.stdout.decode(errors="replace"))


class BuildError(Exception):
    """The copy does not build."""


class Workshop:
    """One copy with its own build folder; used by one thread at a time."""

    def __init__(self, original: Path, folder: Path) -> None:
        """Copy the tree below `folder`; `build()` makes the library."""
        self.root = folder / "kvcache-copy"
        self._build = folder / "build"
        shutil.copytree(original, self.root, symlinks=True, ignore=LEFT_OUT)
        binaries = Path(sys.executable).parent
        self.env = {
            **os.environ,
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([str(self.root), str(self.root / "tests")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVCACHE_NATIVE_DIR": str(self._build),
            "MUTATE_ROOT": str(self.root),
            "CI": "1",  # hypothesis: the same examples each time
        }
        self.env.pop("KVCACHE_TEST_SCALE", None)

    def build(self, target: str = "kvcache_core", seconds: float = 900) -> None:
        """Raises `BuildError` with the compiler's words."""
        if not (self._build / "build.ninja").is_file():
            flags = [
                "-DCMAKE_BUILD_TYPE=None",
                "-DCMAKE_CXX_FLAGS=-O1 -DNDEBUG",
                "-DKVCACHE_TESTS=ON",
            ]
            self._must(["cmake", "-G", "Ninja", "-S", ".", "-B", str(self._build), *flags], 120)
        self._must(["ninja", "-j1", "-C", str(self._build), target], seconds)
        shutil.copy(self.root / "csrc/include/kvcache_core.h", self._build)

    def program(self, name: str) -> Path:
        """Where the build puts a program of `csrc/tests`."""
        return self._build / "csrc" / "tests" / name

    def _must(self, command: list[str], seconds: float) -> None:
        code, output = run(command, cwd=self.root, seconds=seconds, env=self.env)
        if code != 0:
            raise BuildError(f"{' '.join(command)}: exit {code}\n{output[-2000:]}")
