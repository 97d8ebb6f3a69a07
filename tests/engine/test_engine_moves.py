"""Cached pages that make room for others: copied before anybody reads, writes or stores them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from engine.rig import Rig, rig
from engine.stamp_runner import StampRunner, stamp_geometry
from engine.test_engine_random import LONGEST_TOKENS, Play
from numpy.typing import NDArray

from kvcache.engine.chunk import Chunk
from kvcache.engine.request import Reason


class Calling(StampRunner):
    """Requests are aborted and preempted from inside, once pages were moved."""

    play: Play

    def move_pages(self, moves: NDArray[np.void]) -> None:
        super().move_pages(moves)
        self.play.end_one()

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.int32]:
        self.play.end_one()
        return super().run(chunks)


def watch(r: Rig) -> list[int]:
    """Whenever stores may begin, no copy is due; returns how often that was in mid-step."""
    assert r.offload is not None
    stores, manager = r.offload._stores, r.manager
    advance, looked = stores.advance, [0]

    def looking() -> None:
        moves = manager.take_moves()
        assert not len(moves), f"{len(moves)} pages may be stored before their move is copied"
        looked[0] += manager.stats().open_steps > 0
        advance()

    stores.advance = looking  # type: ignore[method-assign]
    return looked


@pytest.mark.parametrize("blocks", [(4, 8), (16,)])
@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize(("lazy_bytes", "queue_depth"), [(None, 1), (3000, 32), (30_000, 2)])
def test_no_page_is_stored_before_its_move_is_copied(
    lazy_bytes: int | None, queue_depth: int, spread: int, blocks: tuple[int, ...]
) -> None:
    """Preemptions store in mid-step; eager with a backlog, and lazy."""
    rng = random.Random(queue_depth + spread)
    geometry = stamp_geometry(*blocks, states=1)
    with rig(
        geometry.slabs_needed(LONGEST_TOKENS) + 4,
        *blocks,
        states=1,
        tier_pages=[400] * len(geometry.groups),
        tier={"queue_depth": queue_depth},
        lazy_bytes=lazy_bytes,
        runner_type=Calling,
        token_budget=60,
        max_requests=8,
        debug=False,
        stall_seconds=30.0,
    ) as r:
        assert isinstance(r.runner, Calling)
        r.runner.play = play = Play(r, rng, spread=spread)
        looked = watch(r)
        for acts in range(6000):  # how soon a step meets all of it hangs on the copies
            counters = r.engine.counters
            if acts >= 600 and looked[0] and r.runner.moved_pages and counters.restored_tokens:
                break
            play.act()
        play.take(list(r.engine.stream()))
        assert not play.wanted
        assert set(play.reasons) == {Reason.LENGTH, Reason.ABORT}
        assert looked[0] > 0
        assert r.runner.moved_pages > 0
        assert r.engine.counters.restored_tokens > 0
        assert r.held == 0
