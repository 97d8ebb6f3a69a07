"""What both sides of the manager benchmark measure and answer with. It needs nothing but Python."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, Self


class Clock:
    """CPU seconds of this process within a `with` block."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self.seconds = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.seconds


def resident_bytes() -> int:
    """Memory of this process, after a full collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def freeze() -> None:
    """Take everything that lives now out of the collector's sight."""
    gc.collect()
    gc.freeze()


def answer_questions(work: object) -> None:
    """Calls what each line of stdin names in `do`, with the rest of it, until there are none."""
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        answer = getattr(work, question.pop("do"))(**question)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
