from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from laws import cases
from laws.misuse import GEOMETRY, MISUSE, PROMPT, Scene

from kvcache import (
    ConfigError,
    HandleError,
    KVCacheError,
    Manager,
    MisuseError,
    Sparse,
)
from kvcache.core.records import UNLIMITED
from kvcache.core.retain import RetentionPlan, TurnShape

PROMPTS = 40
"""Opened while another thread calls; the first one is enough, unless that thread never ran meanwhile."""


@pytest.mark.parametrize("case", MISUSE)
def test_law_15_misuse_is_a_named_error_at_once_and_changes_nothing(case: str) -> None:
    call, expected = MISUSE[case]
    scene = Scene()
    before = scene.snapshot()
    with pytest.raises(KVCacheError) as raised:
        call(scene)
    assert type(raised.value) is expected, raised.value
    assert len(str(raised.value)) > 10
    assert scene.snapshot() == before
    scene.manager.check()


class Answer(NamedTuple):
    """A policy that always says the same, but for the prompt of one token that a new manager asks of."""

    answer: RetentionPlan
    at_once: bool = False

    def plan(self, shape: TurnShape) -> RetentionPlan:
        if shape.prompt_tokens == 1 and not self.at_once:
            return RetentionPlan([0] * len(shape.groups), (), ())
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        RetentionPlan((0, GEOMETRY.grid_tokens), (GEOMETRY.grid_tokens - 1,), (True,)),
        RetentionPlan((0, 0), (2 * GEOMETRY.grid_tokens, GEOMETRY.grid_tokens), (True, True)),
        RetentionPlan((0, GEOMETRY.grid_tokens + 1), (), ()),
        RetentionPlan((0, -GEOMETRY.grid_tokens), (), ()),
    ],
    ids=["position off the grid", "positions that descend", "interval off the grid", "below 0"],
)
def test_law_15_what_a_policy_may_not_answer_is_refused_at_open(answer: RetentionPlan) -> None:
    m = Manager(GEOMETRY, slabs=8, retention=Answer(answer))
    with pytest.raises(ConfigError):
        m.open(PROMPT)
    assert m.stats().open_requests == 0
    m.check()


def test_law_15_an_interval_off_the_grid_is_refused_when_the_manager_is_made() -> None:
    off = RetentionPlan((0, GEOMETRY.grid_tokens + 1), (), ())
    with pytest.raises(ConfigError, match="an interval of 5 tokens: it must be 0 or a multiple"):
        Manager(GEOMETRY, slabs=8, retention=Answer(off, at_once=True))


def test_law_15_commit_without_a_step_is_refused() -> None:
    m = Manager(GEOMETRY, slabs=8, retention=Sparse())
    handle = m.open(PROMPT)
    m.lookup(handle)
    m.allocate(handle, 4)
    with pytest.raises(MisuseError, match="begin_step"):
        m.commit(handle, 4)
    m.begin_step()
    m.commit(handle, 4)
    m.check()


def test_law_15_a_closed_handle_stays_closed_when_its_slot_is_used_again() -> None:
    m = Manager(GEOMETRY, slabs=8, retention=Sparse())
    closed = []
    for _ in range(5):
        handle = m.open(PROMPT)
        assert handle not in closed
        for old in closed:
            with pytest.raises(HandleError):
                m.extend(old, [1])
            with pytest.raises(HandleError):
                m.abort(old)
        m.abort(handle)
        closed.append(handle)
    assert m.stats().open_requests == 0


def test_law_15_a_load_ends_once() -> None:
    scene = Scene()
    scene.manager.end_load(scene.load, np.ones(3, np.uint8))
    with pytest.raises(HandleError):
        scene.manager.end_load(scene.load, np.ones(3, np.uint8))
    with pytest.raises(HandleError):
        scene.manager.abandon_load(scene.load)
    scene.manager.check()


def test_law_15_a_pin_ends_once() -> None:
    scene = Scene()
    scene.manager.unpin(scene.group, scene.page)
    with pytest.raises(MisuseError):
        scene.manager.unpin(scene.group, scene.page)
    scene.manager.check()


def test_law_15_a_pin_ends_through_the_group_that_it_was_made_for() -> None:
    """Groups of one size class share the page numbers, and nothing else."""
    geometry = cases.GEOMETRIES["gemma"]
    m = Manager(geometry, slabs=UNLIMITED, retention=Sparse())
    handle = m.open(PROMPT)
    m.lookup(handle)
    step = m.begin_step()
    assert m.allocate(handle, len(PROMPT))
    m.commit(handle, len(PROMPT))
    m.end_step(step)
    items = m.take_keyed()
    windows = [int(i["group"]) for i in items if geometry.rules[int(i["group"])].kind == "span"]
    assert len({geometry.class_of_group[g] for g in windows}) == 1 < len(set(windows))
    pages = m.pin(items)
    m.finish(handle)
    before = (m.stats(), m.arena_stats())
    for item, page in zip(items, pages, strict=True):
        group, numbers = int(item["group"]), np.array([page], np.int32)
        for other in range(len(geometry.groups)):
            same_class = geometry.class_of_group[other] == geometry.class_of_group[group]
            if other != group and same_class:
                with pytest.raises(MisuseError):
                    m.unpin(other, numbers)
    assert (m.stats(), m.arena_stats()) == before
    m.check()
    for item, page in zip(items, pages, strict=True):
        m.unpin(int(item["group"]), np.array([page], np.int32))
    assert m.stats().pinned == 0
    assert not any(c.held for c in m.arena_stats().classes)


def test_law_15_closing_leaves_nothing_behind_after_every_misuse_in_a_row() -> None:
    scene = Scene()
    for call, expected in MISUSE.values():
        with pytest.raises(expected):
            call(scene)
    m = scene.manager
    for handle in (scene.running, scene.waiting, scene.loading, scene.foreign):
        m.abort(handle)
    m.end_step(scene.older)
    m.end_step(scene.newer)
    m.end_load(scene.load, np.zeros(3, np.uint8))
    m.unpin(scene.group, scene.page)
    m.check()
    assert not any(c.held for c in m.arena_stats().classes)


def test_law_15_two_threads_at_once_are_refused() -> None:
    """One thread hashes long prompts, without the interpreter lock; the other asks for stats."""
    m = Manager(cases.GEOMETRIES["full"], slabs=2**21, retention=Sparse())
    long_prompt = np.zeros(2**22, np.int32)
    refused, texts = threading.Event(), list[str]()

    def use(call: Callable[[], object], going_on: Callable[[], bool]) -> None:
        while not refused.is_set() and going_on():
            try:
                call()
            except MisuseError as error:
                texts.append(str(error))
                refused.set()

    prompts = iter(range(PROMPTS))
    opener = threading.Thread(
        target=use,
        args=(lambda: m.abort(m.open(long_prompt)), lambda: next(prompts, None) is not None),
    )
    opener.start()
    use(m.stats, opener.is_alive)
    opener.join(timeout=60)
    assert not opener.is_alive(), "a thread is still inside the manager"
    assert texts, f"of two threads none was refused while {PROMPTS} long prompts were hashed"
    assert all("two threads" in text for text in texts), texts
    m.check()
