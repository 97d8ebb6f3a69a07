"""Every call that the contract forbids, in a manager that is in the middle of everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from laws import cases
from numpy.typing import NDArray

from kvcache import (
    CapacityError,
    ConfigError,
    HandleError,
    KVCacheError,
    Manager,
    MisuseError,
    Sparse,
)
from kvcache.core.media import Media, PromptEmbeddings

GEOMETRY = cases.GEOMETRIES["hybrid"]
ATTENTION, STATE = 0, 1
PROMPT = np.arange(10, dtype=np.int32)


class Scene:
    """A manager in the middle of everything: requests of each state, an open step, a pin."""

    def __init__(self) -> None:
        self.manager = m = Manager(GEOMETRY, slabs=40, retention=Sparse())
        self.closed = m.open([7, 7, 7])
        m.abort(self.closed)
        self.running = m.open(PROMPT, max_tokens=20)
        assert self.running != self.closed
        self.step = m.begin_step()
        m.lookup(self.running)
        m.allocate(self.running, 9)
        m.commit(self.running, 9)
        m.end_step(self.step)
        self.item = m.take_keyed()[:1]
        self.page = self.item["page"].copy()
        self.group = int(self.item["group"][0])
        assert m.pin(self.item).tolist() == self.page.tolist()
        self.waiting = m.open([*PROMPT, 1], max_tokens=20)
        self.loading = m.open([50, *PROMPT])
        present = [np.ones(2, np.uint8), np.array([0, 1], np.uint8)]
        assert m.lookup(self.loading, present).hit_tokens == 8
        grant = m.allocate(self.loading, 1)
        assert grant
        assert grant.load_pages == 3
        self.load = grant.load
        keys = np.zeros((2, 32), np.uint8)
        self.foreign = m.open_foreign(keys, prompt_tokens=11, max_tokens=20)
        self.older = m.begin_step()
        assert m.allocate(self.running, 3)
        self.newer = m.begin_step()

    def snapshot(self) -> list[Any]:
        m = self.manager
        handles = (self.running, self.waiting, self.loading, self.foreign)
        return [
            m.stats(),
            m.arena_stats(),
            *(m.group_stats(g) for g in range(len(GEOMETRY.groups))),
            *(m.info(h) for h in handles),
            m.block_table(self.running, ATTENTION).tolist(),
            [np.asarray(part).tolist() for part in m.state_plan(self.running, STATE)],
            m.load_items(self.load).tobytes(),
        ]


def image(offset: int, length: int) -> Media:
    return Media(identifier="cat", offset_tokens=offset, length_tokens=length)


def embedded(values: NDArray[np.float64], offset: int) -> PromptEmbeddings:
    return PromptEmbeddings(offset_tokens=offset, values=values)


MISUSE: dict[str, tuple[Callable[[Scene], object], type[KVCacheError]]] = {
    # requests
    "finish twice": (lambda s: s.manager.finish(s.closed), HandleError),
    "abort twice": (lambda s: s.manager.abort(s.closed), HandleError),
    "extend after the end": (lambda s: s.manager.extend(s.closed, [1]), HandleError),
    "lookup after the end": (lambda s: s.manager.lookup(s.closed), HandleError),
    "allocate after the end": (lambda s: s.manager.allocate(s.closed, 1), HandleError),
    "need after the end": (lambda s: s.manager.need(s.closed, 1), HandleError),
    "blockage after the end": (lambda s: s.manager.blockage(s.closed), HandleError),
    "commit after the end": (lambda s: s.manager.commit(s.closed, 1), HandleError),
    "preempt after the end": (lambda s: s.manager.preempt(s.closed), HandleError),
    "info after the end": (lambda s: s.manager.info(s.closed), HandleError),
    "digests after the end": (lambda s: s.manager.digests(s.closed), HandleError),
    "stops after the end": (lambda s: s.manager.stops(s.closed, 0, 1), HandleError),
    "table after the end": (lambda s: s.manager.block_table(s.closed, ATTENTION), HandleError),
    "plan after the end": (lambda s: s.manager.state_plan(s.closed, STATE), HandleError),
    "unknown handle": (lambda s: s.manager.finish(12345), HandleError),
    "handle 0": (lambda s: s.manager.finish(0), HandleError),
    "negative handle": (lambda s: s.manager.finish(-1), HandleError),
    "handle of no slot": (lambda s: s.manager.finish(s.running + 1000), HandleError),
    "handle of a later generation": (lambda s: s.manager.abort(s.running + 2**32), HandleError),
    "empty prompt": (lambda s: s.manager.open([]), ConfigError),
    "max_tokens below prompt": (lambda s: s.manager.open(PROMPT, max_tokens=9), ConfigError),
    "too long for the arena": (lambda s: s.manager.open(PROMPT, max_tokens=500), CapacityError),
    "boundary beyond the prompt": (lambda s: s.manager.open(PROMPT, boundaries=[11]), ConfigError),
    "boundary below 0": (lambda s: s.manager.open(PROMPT, boundaries=[-1]), ConfigError),
    "media beyond the prompt": (
        lambda s: s.manager.open(PROMPT, media=[image(8, 3)]),
        ConfigError,
    ),
    "media before the prompt": (
        lambda s: s.manager.open(PROMPT, media=[image(-1, 3)]),
        ConfigError,
    ),
    "media of no tokens": (lambda s: s.manager.open(PROMPT, media=[image(2, 0)]), ConfigError),
    "media that overlap": (
        lambda s: s.manager.open(PROMPT, media=[image(0, 4), image(3, 2)]),
        ConfigError,
    ),
    "embeddings beyond the prompt": (
        lambda s: s.manager.open(PROMPT, embeddings=[embedded(np.zeros((3, 2)), 8)]),
        ConfigError,
    ),
    "embeddings without a width": (
        lambda s: s.manager.open(PROMPT, embeddings=[embedded(np.zeros(3), 0)]),
        ConfigError,
    ),
    "salt that is no text": (lambda s: s.manager.open(PROMPT, salt=b"s"), ConfigError),
    "too few foreign keys": (
        lambda s: s.manager.open_foreign(np.zeros((1, 32), np.uint8), prompt_tokens=11),
        ConfigError,
    ),
    "foreign keys of another length": (
        lambda s: s.manager.open_foreign(np.zeros((2, 31), np.uint8), prompt_tokens=11),
        ConfigError,
    ),
    "extend beyond max_tokens": (lambda s: s.manager.extend(s.running, [1] * 11), CapacityError),
    "extend foreign by tokens": (lambda s: s.manager.extend(s.foreign, [1]), ConfigError),
    "extend native by a count": (lambda s: s.manager.extend_foreign(s.waiting, 1), ConfigError),
    "extend by a negative count": (lambda s: s.manager.extend_foreign(s.foreign, -1), ConfigError),
    # lookup and allocation
    "lookup while running": (lambda s: s.manager.lookup(s.running), MisuseError),
    "lookup while loading": (lambda s: s.manager.lookup(s.loading), MisuseError),
    "present for too few groups": (
        lambda s: s.manager.lookup(s.waiting, [np.ones(2, np.uint8)]),
        ConfigError,
    ),
    "allocate while loading": (lambda s: s.manager.allocate(s.loading, 1), MisuseError),
    "allocate beyond max_tokens": (lambda s: s.manager.allocate(s.running, 12), ConfigError),
    "allocate below 0": (lambda s: s.manager.allocate(s.running, -1), ConfigError),
    "allocate drafts below 0": (lambda s: s.manager.allocate(s.running, 1, drafts=-1), ConfigError),
    "allocate drafts beyond max_tokens": (
        lambda s: s.manager.allocate(s.running, 1, drafts=11),
        ConfigError,
    ),
    "need below 0": (lambda s: s.manager.need(s.running, -1), ConfigError),
    "need of drafts below 0": (lambda s: s.manager.need(s.running, 1, drafts=-1), ConfigError),
    "stops of a descending range": (lambda s: s.manager.stops(s.running, 5, 4), ConfigError),
    "stops below 0": (lambda s: s.manager.stops(s.running, -1, 4), ConfigError),
    # steps
    "commit while waiting": (lambda s: s.manager.commit(s.waiting, 1), MisuseError),
    "commit while loading": (lambda s: s.manager.commit(s.loading, 9), MisuseError),
    "commit beyond the grant": (lambda s: s.manager.commit(s.running, 13), ConfigError),
    "commit what is committed": (lambda s: s.manager.commit(s.running, 9), ConfigError),
    "commit between grant and state": (lambda s: s.manager.commit(s.running, 11), ConfigError),
    "more steps than allowed": (lambda s: s.manager.begin_step(), MisuseError),
    "end the newer step first": (lambda s: s.manager.end_step(s.newer), MisuseError),
    "end a step twice": (lambda s: s.manager.end_step(s.step), HandleError),
    "end a step of the future": (lambda s: s.manager.end_step(s.newer + 1), HandleError),
    "end step 0": (lambda s: s.manager.end_step(0), HandleError),
    "preempt a waiting request": (lambda s: s.manager.preempt(s.waiting), MisuseError),
    # reading
    "table of a state group": (lambda s: s.manager.block_table(s.running, STATE), ConfigError),
    "table from below 0": (
        lambda s: s.manager.block_table(s.running, ATTENTION, -1),
        ConfigError,
    ),
    "plan of an attention group": (
        lambda s: s.manager.state_plan(s.running, ATTENTION),
        ConfigError,
    ),
    "table of no group": (lambda s: s.manager.block_table(s.running, 2), ConfigError),
    "plan of no group": (lambda s: s.manager.state_plan(s.running, -1), ConfigError),
    "stats of no group": (lambda s: s.manager.group_stats(2), ConfigError),
    "holes of no group": (lambda s: s.manager.draft_holes(s.running, 2), ConfigError),
    "holes after the end": (lambda s: s.manager.draft_holes(s.closed, ATTENTION), HandleError),
    "key of no group": (lambda s: s.manager.find_key(-1, bytes(32)), ConfigError),
    "key of 31 bytes": (lambda s: s.manager.find_key(0, bytes(31)), ConfigError),
    # tiers
    "end an unknown load": (lambda s: s.manager.end_load(99, np.ones(3, np.uint8)), HandleError),
    "end a load with too few results": (
        lambda s: s.manager.end_load(s.load, np.ones(2, np.uint8)),
        ConfigError,
    ),
    "end a load with too many results": (
        lambda s: s.manager.end_load(s.load, np.ones(4, np.uint8)),
        ConfigError,
    ),
    "abandon an unknown load": (lambda s: s.manager.abandon_load(99), HandleError),
    "items of an unknown load": (lambda s: s.manager.load_items(99), HandleError),
    "unpin twice in one call": (
        lambda s: s.manager.unpin(s.group, np.array([s.page[0], s.page[0]])),
        MisuseError,
    ),
    "unpin a page that is held but not pinned": (
        lambda s: s.manager.unpin(ATTENTION, s.manager.block_table(s.running, ATTENTION)[-1:]),
        MisuseError,
    ),
    "unpin a page that does not exist": (
        lambda s: s.manager.unpin(ATTENTION, np.array([10**6])),
        MisuseError,
    ),
    "unpin page -1": (lambda s: s.manager.unpin(ATTENTION, np.array([-1])), MisuseError),
    "unpin in no group": (lambda s: s.manager.unpin(2, s.page), ConfigError),
}
