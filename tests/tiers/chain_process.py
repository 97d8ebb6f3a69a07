"""A process of its own that lets go of a chain while a page sinks from host memory to the disk.

python chain_process.py FOLDER HOW

drop: nobody has the chain any more. exit: the interpreter ends, which closes the host tier first.
die: the copy thread of the host tier ends of itself. Each time the disk goes on only then. The page
is that of `KEY`.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiers.disk_pieces import disk, wait_for
from tiers.pieces import PATIENCE, one_group

from kvcache.connectors import disk_worker, host_worker
from kvcache.connectors.base import Connector
from kvcache.connectors.chain import ChainConnector
from kvcache.connectors.cpu import CpuConnector, native_copy
from kvcache.connectors.host_pool import HostPool
from kvcache.connectors.testing import Gate, Key, Rig, Setup

KEY = Key("sinks")
GEOMETRY = one_group(1 << 20)
KEPT: list[Rig] = []
"""Until the interpreter ends."""


def main(folder: Path, how: str) -> None:
    if how != "exit":
        host_worker.CLOSE_SECONDS = disk_worker.CLOSE_SECONDS = 0.01  # what runs is not waited for
    gate = Gate()
    setup = Setup(geometry=GEOMETRY, pages=(8,), before_copy=gate)
    let_go: list[HostPool] = []
    really = HostPool.close

    def close(pool: HostPool) -> None:
        let_go.append(pool)
        really(pool)

    HostPool.close = close  # type: ignore[method-assign]

    def copy(source: Any, target: Any, *pages: Any) -> None:
        if how == "die" and target.address == memory:
            raise SystemExit
        native_copy(source, target, *pages)

    def made(_: Setup) -> Connector:
        below = disk(setup, folder)
        weakref.finalize(gate, gate.open)  # at the exit after the host tier, before the disk
        return ChainConnector(CpuConnector(GEOMETRY, pages=[8], copy=copy), below)

    r = Rig(made, setup)
    upper, lower = (tier.worker for tier in r.scheduler.tiers)  # type: ignore[attr-defined]
    threads = [t._thread._thread for t in (upper, lower)]
    memory = r.device.regions()[0].address
    gate.shut()
    r.store([KEY])
    assert r.worker.poll() == []
    gate.wait_reached()
    if how == "exit":
        KEPT.append(r)
        return
    if how == "die":
        assert r.lookup(1, [KEY]) == [1]
        r.submit(r.plan_load(1, [KEY]))
        threads[0].join(PATIENCE)
        assert not threads[0].is_alive()
    del r, upper, lower
    threads[0].join(PATIENCE)
    assert not threads[0].is_alive()
    assert threads[1].is_alive()
    # Whoever asks for memory now may get what was the tier's.
    others = [mmap.mmap(-1, 8 << 20) for _ in range(8)]
    for other in others:
        other.write(b"\x77" * len(other))
    gate.open()
    wait_for("the end of the disk's thread", lambda: not threads[1].is_alive())
    assert len(let_go) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
