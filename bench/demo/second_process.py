"""The second process of the demo: of its sessions it has a folder, and the next prompts.

It reads questions from stdin, one JSON object a line: first what to open, then a prompt each. See
`kvcache.bench.demo.restart` for who asks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from kvcache.bench.demo.play import RESTARTED, Player, warm_up
from kvcache.bench.demo.script import DemoSettings, load_kit


def main() -> None:
    """Answer until there are no more questions."""
    first = json.loads(sys.stdin.readline())
    settings = DemoSettings(**first["settings"])
    kit = load_kit(first["choice"], settings.seed)
    player = Player(RESTARTED, settings, kit, Path(first["folder"]))
    try:
        warm_up(kit)
        _say(
            process=os.getpid(),
            model=kit.model.name,
            disk_bytes=player.played.disk_bytes,
            device_bytes=player.played.device_bytes,
            start_seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - _started_seconds(),
        )
        for line in sys.stdin:
            turn = player.ask(json.loads(line)["prompt"], session=0, number=0, shared=0)
            _say(
                usage=list(turn.usage),
                first_token_seconds=turn.first_token_seconds,
                output=turn.output,
                gaps=turn.gaps,
            )
    finally:
        player.close()


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _started_seconds() -> float:
    """When this process began, on the clock that starts with the machine (proc(5), stat: field 22)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
