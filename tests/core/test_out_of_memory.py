from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


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
