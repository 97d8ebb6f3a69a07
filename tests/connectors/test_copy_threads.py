"""Batches cut into parts for several threads."""

from __future__ import annotations

import threading
from itertools import chain as chain_of

import numpy as np
import pytest
from numpy.typing import NDArray
from tiers.pieces import PATIENCE
from tiers.shared_pieces import shared

from kvcache.connectors import settings
from kvcache.connectors.copy_threads import CopyThreads
from kvcache.connectors.testing import Setup, chain, rig


def test_parts_run_at_once_and_results_are_in_order() -> None:
    meet = threading.Barrier(3)
    threads = CopyThreads(3)

    def call(first: NDArray[np.int64], second: NDArray[np.int64]) -> list[tuple[int, int]]:
        meet.wait(PATIENCE)
        return list(zip(first.tolist(), second.tolist(), strict=True))

    results = threads.run(call, np.arange(7), np.arange(7) * 10)
    assert list(chain_of(*results)) == [(i, 10 * i) for i in range(7)]
    assert [len(part) for part in results] == [3, 2, 2]
    threads.close()


def test_none_is_left_running_where_one_raises() -> None:
    ended: list[int] = []
    threads = CopyThreads(2)
    raised = threading.Event()

    def call(rows: NDArray[np.int64]) -> None:
        if rows[0] == 0:
            raised.set()
            raise OSError("no")
        assert raised.wait(PATIENCE)
        ended.append(int(rows[0]))

    with pytest.raises(OSError, match="no"):
        threads.run(call, np.arange(4))
    assert ended == [2]
    threads.close()


@pytest.mark.parametrize("count", [0, 1])
def test_what_cannot_be_cut_is_done_by_the_caller(count: int) -> None:
    threads = CopyThreads(4)
    assert threads.run(lambda _: threading.get_ident(), np.arange(count)) == [threading.get_ident()]
    threads.close()


def test_a_shared_tier_copies_with_several_threads(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 2)
    used: set[str] = set()
    parts: set[int] = set()
    real = CopyThreads.run

    def run(self: CopyThreads, call: object, *arrays: object) -> object:
        def noted(*rows: object) -> object:
            used.add(threading.current_thread().name)
            parts.add(len(rows[0]))  # type: ignore[arg-type]
            return call(*rows)  # type: ignore[operator]

        return real(self, noted, *arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyThreads, "run", run)
    with rig(lambda s: shared(s, tmp_path, threads=9), Setup(pages=(16, 2))) as r:  # type: ignore[arg-type]
        keys = chain("a", 9)
        assert r.store(keys) == keys
        r.lookup(1, keys)
        assert all(r.load(1, keys))
    assert parts == {5, 4}  # of nine pages
    assert used <= {"kvcache-part_0", "kvcache-part_1"}
