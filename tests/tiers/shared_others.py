"""Other processes that use a shared region (shared_process.py), and what one sees of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiers import shared_process
from tiers.pieces import PATIENCE
from tiers.shared_pieces import shared

from kvcache.connectors.testing import Rig, Setup

PROGRAM = Path(shared_process.__file__)


@contextmanager
def process(
    folder: Path, action: str, seed: int = 0, *more: str, under: Sequence[str] = ()
) -> Iterator[Any]:
    command = [*under, sys.executable, str(PROGRAM), str(folder), action, str(seed), *more]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def kill(victim: subprocess.Popen[str]) -> str:
    victim.send_signal(signal.SIGKILL)
    return victim.communicate()[0]


def wait_for(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.005)


def at(folder: Path) -> Callable[[Setup], Any]:
    return lambda setup: shared(setup, folder)


def held(r: Rig) -> int:
    """Slots that anybody holds."""
    return sum(pool.shared_stats().held for pool in r.scheduler._pools)  # type: ignore[attr-defined]


def nothing_left(folder: Path) -> bool:
    return [path.name for path in folder.iterdir()] == ["lock"]
