"""A step loop around the real manager, and everything that may get in the oldest request's way.

Each round: loads and pins that are due end, new ones are taken, every open request tries, oldest
first, and does what `blockage` tells it; steps end as late as allowed. No bytes move: the tier is
a promise about any keys, of which some are not kept.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcache import Geometry, Manager
from kvcache.core.retain import RetentionPolicy


class Pressure(NamedTuple):
    """What the adversary may do.

    deadline: rounds that a pin or a load lasts, at most. pins: at one time. loads: chance that a
    lookup is told of blocks in a tier. failing: chance that a loaded page is bad. worst: pins as
    many slabs as it can, keeps every step open and every transfer to its deadline; else at random.
    """

    deadline: int = 3
    pins: int = 4
    loads: float = 0.3
    failing: float = 0.2
    max_open_steps: int = 2
    worst: bool = True


@dataclass
class Job:
    """One request: its tokens, how many of them are the prompt, tokens per step.

    idle: above 0: it is opened, never scheduled, and aborted after so many rounds.
    """

    tokens: list[int]
    prompt: int
    chunk: int
    arrives: int = 0
    idle: int = 0
    handle: int = -1
    restarts: int = 0
    loads: int = 0
    last_step: int = 0


@dataclass
class Crowd:
    """Drives `jobs` (by arrival) until all have finished; `rounds` counts the steps that took."""

    manager: Manager
    pressure: Pressure
    jobs: list[Job]
    rng: random.Random
    rounds: int = 0
    order: list[Job] = field(default_factory=list)
    """As they finished."""
    met: Counter[str] = field(default_factory=Counter)
    """How often allocate refused, by reason; loads."""
    open_steps: deque[int] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    keyed: deque[np.void] = field(default_factory=lambda: deque(maxlen=400))
    pins: list[tuple[int, int, int]] = field(default_factory=list)  # round, group, page
    loads: list[tuple[int, int]] = field(default_factory=list)  # round, load

    def bound(self) -> int:
        """Rounds within which all must have finished."""
        tokens = sum(len(job.tokens) for job in self.jobs)
        delay = self.pressure.deadline + self.pressure.max_open_steps
        groups = len(self.manager.geometry.groups)
        arrivals = max(job.arrives + job.idle for job in self.jobs)
        return arrivals + (2 * tokens + 5) * (delay + 1) * groups + 50

    def run(self) -> None:
        bound, waiting = self.bound(), deque(sorted(self.jobs, key=lambda job: job.arrives))
        while waiting or self.running:
            self.rounds += 1
            assert self.rounds <= bound, f"{len(self.running)} requests stand still"
            while waiting and waiting[0].arrives <= self.rounds:
                self._open(waiting.popleft())
            self._transfers()
            self._step()
            self._checks()
        while self.open_steps:
            self.manager.end_step(self.open_steps.popleft())
        self.rounds += self.pressure.deadline
        self._transfers(last=True)
        self._checks()
        assert all(c.held == 0 for c in self.manager.arena_stats().classes)

    def _checks(self) -> None:
        self.manager.check()
        self.keyed.extend(self.manager.take_keyed())
        self.manager.take_moves()

    def _open(self, job: Job) -> None:
        job.handle = self.manager.open(job.tokens[: job.prompt], max_tokens=len(job.tokens))
        self.running.append(job)

    # ---- transfers -----------------------------------------------------------------------------

    def _transfers(self, *, last: bool = False) -> None:
        due = [pin for pin in self.pins if pin[0] <= self.rounds]
        self.pins = [pin for pin in self.pins if pin[0] > self.rounds]
        for _, group, page in due:
            self.manager.unpin(group, np.array([page], np.int32))
        for at, load in [entry for entry in self.loads if entry[0] <= self.rounds]:
            self.loads.remove((at, load))
            items = self.manager.load_items(load)
            good = [self.rng.random() >= self.pressure.failing for _ in items]
            self.manager.end_load(load, np.array(good, np.uint8))
        if last:
            assert not self.pins
            assert not self.loads
            return
        frozen = self.manager.stats().frozen
        while len(self.pins) < self.pressure.pins and self.keyed and (item := self._target()):
            got = self.manager.pin(np.array([item]))
            assert not (frozen and got[0] >= 0)
            if got[0] >= 0:
                self.pins.append((self._due(), int(item["group"]), int(got[0])))

    def _due(self) -> int:
        most = self.pressure.deadline
        return self.rounds + (most if self.pressure.worst else self.rng.randint(1, most))

    def _target(self) -> np.void | None:
        """The worst pins one page in every slab; pages that have gone are tried and refused."""
        item = self.keyed.popleft()
        if self.pressure.worst:
            geometry = self.manager.geometry
            c = geometry.class_of_group[item["group"]]
            slab = int(item["page"]) // geometry.pages_per_slab[c]
            k = geometry.pages_per_slab
            taken = {
                (geometry.class_of_group[g], p // k[geometry.class_of_group[g]])
                for _, g, p in self.pins
            }
            return None if (c, slab) in taken else item
        return item if self.rng.random() < 0.7 else None

    # ---- one step ------------------------------------------------------------------------------

    def _step(self) -> None:
        if len(self.open_steps) == self.pressure.max_open_steps:
            self.manager.end_step(self.open_steps.popleft())
        while self.open_steps and not self.pressure.worst and self.rng.random() < 0.5:
            self.manager.end_step(self.open_steps.popleft())
        step = self.manager.begin_step()
        self.open_steps.append(step)
        for job in list(self.running):
            if not job.idle:
                self._turn(job, step)
            elif job.arrives + job.idle <= self.rounds:
                self.manager.abort(job.handle)
                self.running.remove(job)
        for job in list(self.running):
            ended = not self.open_steps or job.last_step < self.open_steps[0]
            if ended and self.manager.info(job.handle).computed == len(job.tokens):
                self.manager.finish(job.handle)
                self.running.remove(job)
                self.order.append(job)

    def _turn(self, job: Job, step: int) -> None:
        m = self.manager
        while True:
            info = m.info(job.handle)
            if info.state == "loading" or info.committed == len(job.tokens):
                return
            if info.state == "waiting":
                self._look_up(job)
            grant = m.allocate(job.handle, self._chunk(job, info.state == "waiting"))
            if grant is not None:
                if grant.load:
                    job.loads += 1
                    self.met["loads"] += 1
                    self.loads.append((self._due(), grant.load))
                elif grant.end > grant.start:
                    if grant.end > m.info(job.handle).tokens:
                        m.extend(job.handle, job.tokens[m.info(job.handle).tokens : grant.end])
                    m.commit(job.handle, grant.end)
                    job.last_step = step
                return
            if not self._make_room(job):
                return

    def _look_up(self, job: Job) -> None:
        m = self.manager
        present = None
        if self.rng.random() < self.pressure.loads and job.loads < 3:
            present = [
                np.ones(len(keys), np.uint8) if self.rng.random() < 0.9 else np.zeros(0, np.uint8)
                for keys in m.group_digests(job.handle)
            ]
        m.lookup(job.handle, present)

    def _chunk(self, job: Job, waiting: bool) -> int:
        """Tokens to ask for: of the prompt by chunks, then one by one."""
        m = self.manager
        start = m.info(job.handle).committed
        if waiting:
            return 0 if self.rng.random() < 0.3 else 1
        left = job.prompt - start
        return min(job.chunk, left) if left > 0 else 1

    def _make_room(self, job: Job) -> bool:
        """Do what the manager says; True: try again."""
        m = self.manager
        why = m.blockage(job.handle)
        self.met[why] += 1
        oldest = job is self.running[0]
        assert why != "frozen" or not oldest
        if why == "preempt":
            younger = [
                j
                for j in self.running[self.running.index(job) + 1 :]
                if m.info(j.handle).state != "waiting"
            ]
            m.preempt(younger[-1].handle)
            return True
        if why == "restart":
            assert oldest
            job.restarts += 1
            assert job.restarts == 1, "restarted twice"
            m.preempt(job.handle)
            return True
        assert why in {"wait", "frozen"}
        return False


def crowd(
    geometry: Geometry,
    jobs: Sequence[Job],
    *,
    slabs: int,
    retention: RetentionPolicy,
    pressure: Pressure,
    movable: bool,
    seed: int,
) -> Crowd:
    """The requests in an arena of `slabs`."""
    manager = Manager(
        geometry,
        slabs=slabs,
        retention=retention,
        movable=movable,
        max_open_steps=pressure.max_open_steps,
        seed=seed,
    )
    return Crowd(manager, pressure, list(jobs), random.Random(seed))
