"""A peer for tests: our own manager behind the questions that vLLM is asked, and ways to spoil it.

    python pretended_peer.py [QUESTION FAULT]

FAULT is what becomes of the answer to QUESTION: see `FAULTS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.bench.agents_presets import PRESETS, comparison_model
from kvcache.bench.manager_work import Work

Answer = dict[str, Any]


def die(_: Answer) -> Answer:
    sys.exit("the pretended peer dies")


def hang(_: Answer) -> Answer:
    time.sleep(600)
    return {}


def garbage(answer: Answer) -> Answer:
    sys.stdout.write("<html>\n[1]\nnull\n")
    return dict.fromkeys(answer, "fast")


FAULTS: dict[str, Callable[[Answer], Answer]] = {
    "die": die,
    "hang": hang,
    "garbage": garbage,
    "empty": lambda _: {},
    "zero": lambda answer: dict.fromkeys(answer, 0),
    "more": lambda answer: {
        name: value + 1 if isinstance(value, int) else value for name, value in answer.items()
    },
}


def install(folder: Path, question: str = "", fault: str = "") -> None:
    """Put the peer where a benchmark looks for vLLM's: `folder` takes the place of `peers/`."""
    program = Path(__file__).read_text()
    arguments = f"{question!r}, {fault!r}" if fault else ""
    call = f'if __name__ == "__main__":\n    main({arguments})\n'
    (folder / "vllm_manager.py").write_text(program.rpartition("if __name__")[0] + call)


def main(spoiled: str = "", fault: str = "") -> None:
    names = {json.dumps(comparison_model(name).peer_groups): name for name in ("full16", *PRESETS)}
    work = Work()
    for line in sys.stdin:
        question = json.loads(line)
        what = question.pop("do")
        if "groups" in question:
            question["preset"] = names[json.dumps(question.pop("groups"))]
        if "algorithm" in question:
            question["algorithm"] = "hashlib"
        answer = getattr(work, what)(**question)
        if what == spoiled:
            answer = FAULTS[fault](answer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
