"""A process of its own that makes tiers, forks a child that ends like any program, and goes on.

python fork_process.py FOLDER WHEN

WHEN the child comes: `before` register, or `after` it; `use`: before, and it registers itself. Exit 1
where it touched what is its parent's, or could use it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiers.chain_pieces import host_over_disk
from tiers.shared_pieces import shared

from kvcache.connectors.base import Connector
from kvcache.connectors.testing import Device, Rig, Setup, chain
from kvcache.core.errors import MisuseError


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def child(made: list[Connector], when: str) -> int:
    """Ends by itself, with everything that is done at the interpreter's exit."""
    if os.fork():
        return os.waitstatus_to_exitcode(os.wait()[1])
    for connector in made if when == "use" else ():
        try:
            connector.worker.register(Device(Setup().geometry, 4).regions())
        except MisuseError as error:
            assert "make a connector in this process" in str(error)  # noqa: PT017
        else:
            os._exit(3)
    made[0].worker.close(1.0)  # the other is left to the exit
    sys.exit(0)


def main(folder: Path, when: str) -> None:
    made = [shared(Setup(), folder / "shared"), host_over_disk(Setup(), folder / "disk")]
    rigs = []
    if when == "after":
        rigs = [Rig(lambda _, connector=connector: connector) for connector in made]
    before = files(folder)
    assert child(made, when) == 0
    assert files(folder) == before, "the child removed what is its parent's"
    for r in rigs or [Rig(lambda _, connector=connector: connector) for connector in made]:
        assert r.store(chain("a", 3)) == chain("a", 3)
        assert all(r.lookup(1, chain("a", 3)))
        assert all(r.load(1, chain("a", 3)))
        assert r.worker.flush(10.0)
        assert r.worker.close(10.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
