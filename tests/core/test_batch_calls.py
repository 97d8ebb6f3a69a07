"""Calls for all requests of a step do what single calls do, up to the first that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from core.managing import HYBRID, A, Equal, compute, full, hybrid, picture, run, text
from hypothesis import given, strategies as st
from laws import cases

from kvcache import CapacityError, ConfigError, KVCacheError, Manager
from kvcache.core.errors import HandleError, MisuseError
from kvcache.core.records import GRANT_DTYPE, Grant

UNKNOWN = 1 << 40
"""No request has this handle."""
TRIED = ["full", "hybrid", "speculative", "gpt-oss", "three kinds", "deepseek", "deepseek + draft"]
LONGEST = 48
SEEN = ("no space", "error", "guesses", "committed")


def one_by_one(calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], KVCacheError | None]:
    """Answers of the calls, up to the first that fails or finds no space."""
    answers = []
    for call in calls:
        try:
            answer = call()
        except KVCacheError as error:
            return answers, error
        if answer is None:
            break
        answers.append(answer)
    return answers, None


class Pair(Equal):
    """Equal managers: one is driven by single calls, the other by batches."""

    def __init__(self, name: str, interval: int | None, spare: int, seed: int) -> None:
        geometry = cases.GEOMETRIES[name]
        slabs = geometry.slabs_needed(LONGEST) + spare
        self.single, self.batch = (
            Manager(
                geometry,
                slabs=slabs,
                retention=cases.policy_of(geometry, interval),
                max_open_steps=2,
                events=True,
            )
            for _ in range(2)
        )
        super().__init__(self.single, self.batch)
        self.random = random.Random(seed)
        self.steps: list[int] = []
        self.seen = dict.fromkeys(SEEN, 0)

    def ask(
        self, calls: Sequence[Callable[[], Any]], many: Callable[[], Any], n: int
    ) -> list[Any] | None:
        """The answers; None after an error, which must be the same one, at the same place."""
        wanted, error = one_by_one(calls)
        if error is None:
            answers = many()
            self.compare()
            return wanted if answers is None else [Grant(*row.item()) for row in answers]
        with pytest.raises(type(error)) as caught:
            many()
        assert str(caught.value) == f"request {len(wanted)} of {n} in the batch: {error}"
        self.seen["error"] += 1
        self.compare()
        return None

    # ---- a round

    def open(self) -> None:
        tokens = list(cases.STORIES[self.random.randrange(2)][: self.random.randint(1, 30)])
        most = min(LONGEST, len(tokens) + self.random.randint(0, 20))
        self.handles.append(self.both(lambda m: m.open(tokens, max_tokens=most)))

    def chosen(self, *states: str) -> list[int]:
        """Some requests in these states, each once; now and then twice, or one that is unknown."""
        there = [h for h in self.handles if self.batch.info(h).state in states]
        found = self.random.sample(there, self.random.randint(0, len(there)))
        if found and self.random.random() < 0.1:
            found.insert(
                self.random.randrange(len(found) + 1), self.random.choice([UNKNOWN, *found])
            )
        return found

    def allocate(self) -> list[int]:
        """Returns whom it served, each once."""
        handles, info = self.chosen("waiting", "running"), self.batch.info
        for h in {*handles} - {UNKNOWN}:
            if info(h).state == "waiting":
                self.both(lambda m, h=h: m.lookup(h))
        tokens = [self.random.choice([1, 1, 2, 9, 30]) for _ in handles]
        guesses = [self.random.choice([0, 0, 1, 3]) for _ in handles]
        tokens = [
            n if h == UNKNOWN else max(0, min(n, LONGEST - 4 - info(h).committed))
            for h, n in zip(handles, tokens, strict=True)
        ]
        if tokens and self.random.random() < 0.05:
            tokens[-1] = -1
        drafts = guesses if self.random.random() < 0.5 else None
        calls = [
            lambda h=h, n=n, d=d: self.single.allocate(h, n, drafts=d)
            for h, n, d in zip(handles, tokens, drafts or [0] * len(handles), strict=True)
        ]
        got = self.ask(
            calls, lambda: self.batch.allocate_many(handles, tokens, drafts=drafts), len(handles)
        )
        if got is None:
            return []
        served = handles[: len(got)]
        self.seen["no space"] += len(got) < len(handles)
        self.seen["guesses"] += bool(drafts) and bool(got)
        return [h for h in dict.fromkeys(served) if info(h).granted > info(h).committed]

    def grant_and_commit(self) -> None:
        """The same, all of it committed."""
        if self.random.random() < 0.9:  # else maybe outside of a step
            self.begin_step()
        handles, info = self.chosen("waiting", "running"), self.batch.info
        tokens = [
            1
            if h == UNKNOWN
            else max(0, min(self.random.choice([1, 1, 9]), LONGEST - info(h).committed))
            for h in handles
        ]

        def single(h: int, n: int) -> Grant | None:
            if not self.steps:
                self.single.commit(self.handles[0], n)
            grant = self.single.allocate(h, n)
            if grant is not None and grant.end > grant.start:
                self.single.commit(h, grant.end)
            return grant

        calls = [lambda h=h, n=n: single(h, n) for h, n in zip(handles, tokens, strict=True)]
        self.ask(
            calls, lambda: self.batch.allocate_many(handles, tokens, commit=True), len(handles)
        )
        self.seen["committed"] += len(handles)

    def begin_step(self) -> None:
        if not self.steps or self.random.random() < 0.5:
            if len(self.steps) == 2:
                self.end_step()
            self.steps.append(self.both(lambda m: m.begin_step()))

    def commit(self, handles: list[int]) -> None:
        self.begin_step()
        ends = [self.batch.info(h).granted for h in handles]
        if ends and self.random.random() < 0.05:
            ends[len(ends) // 2] += 1
        calls = [
            lambda h=h, e=e: self.single.commit(h, e) or 1
            for h, e in zip(handles, ends, strict=True)
        ]
        self.ask(calls, lambda: self.batch.commit_many(handles, ends), len(handles))

    def extend(self) -> None:
        handles = self.chosen("waiting", "running")
        counts = None
        if self.random.random() < 0.5:
            counts = [self.random.choice([0, 1, 1, 2, 40]) for _ in handles]
        sizes = [1] * len(handles) if counts is None else counts
        tokens = [self.random.randrange(2) for _ in range(sum(sizes))]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        calls = [
            lambda h=h, at=at, n=n: self.single.extend(h, tokens[at : at + n]) or 1
            for h, at, n in zip(handles, starts, sizes, strict=True)
        ]
        self.ask(
            calls, lambda: self.batch.extend_many(handles, tokens, counts=counts), len(handles)
        )

    def end_step(self) -> None:
        step = self.steps.pop(0)
        self.both(lambda m: m.end_step(step))

    def leave(self) -> None:
        handle = self.random.choice(self.handles)
        running = self.batch.info(handle).state == "running"
        if running and self.random.random() < 0.5:
            self.both(lambda m: m.preempt(handle))
            return
        self.both(lambda m: m.finish(handle))
        self.handles.remove(handle)

    def round(self) -> None:
        if len(self.handles) < 6:
            self.open()
        if self.random.random() < 0.3:
            self.grant_and_commit()
        elif served := self.allocate():
            self.commit(served)
        self.extend()
        if self.steps and self.random.random() < 0.6:
            self.end_step()
        if self.random.random() < 0.4:
            self.leave()
        self.compare()


@cases.law(60)
@given(
    name=st.sampled_from(TRIED),
    interval=cases.intervals,
    spare=st.sampled_from([0, 4, 200]),
    seed=st.integers(0, 2**32),
)
def test_batches_do_what_single_calls_do(
    name: str, interval: int | None, spare: int, seed: int
) -> None:
    pair = Pair(name, interval, spare, seed)
    for _ in range(12):
        pair.round()


def test_the_comparison_meets_guesses_errors_and_lack_of_space() -> None:
    totals = dict.fromkeys(SEEN, 0)
    for seed in range(10):
        pair = Pair("hybrid", None, 0, seed)
        for _ in range(12):
            pair.round()
        totals = {what: n + pair.seen[what] for what, n in totals.items()}
    assert min(totals.values()) > 4, totals


# ---- one thing at a time


def two_running(m: Manager) -> list[int]:
    handles = [m.open(text(8, first), max_tokens=16) for first in (0, 100)]
    for h in handles:
        compute(m, h, 8)
    return handles


def test_with_no_space_in_the_middle_the_grants_before_it_stand() -> None:
    m = full(slabs=6)
    handles = [*two_running(m), m.open(text(8, 200))]
    m.lookup(handles[2])
    grants = m.allocate_many([handles[0], handles[1], handles[2]], [8, 8, 1])
    assert grants.dtype == GRANT_DTYPE
    assert grants.tolist() == [(0, 8, 16, 0, 0)]
    assert m.blockage(handles[0]) == ""
    assert m.blockage(handles[1]) == "wait"
    assert m.info(handles[0]).granted == 16
    assert m.info(handles[1]).granted == 8
    assert m.info(handles[2]).state == "waiting", "who comes after is not asked"
    m.check()


def test_a_first_grant_tells_of_its_hit_and_of_its_load() -> None:
    m = hybrid()
    run(m, text(9))
    h = m.open(text(10), max_tokens=20)
    loading = m.open(text(9, 50), max_tokens=20)
    assert m.lookup(h).hit_tokens == 8
    m.lookup(loading, [np.ones(2, np.uint8)] * len(HYBRID.groups))
    grants = m.allocate_many([h, loading], [2, 1])
    load = m.info(loading).load
    assert grants["hit_tokens"].tolist() == [8, 8]
    assert grants["load"].tolist() == [0, load]
    assert load
    assert grants["load_pages"].tolist() == [0, len(m.load_items(load))]
    assert grants["end"].tolist() == [10, 8]


def test_an_error_names_its_place_and_what_came_before_stands() -> None:
    m = full()
    a, b = two_running(m)
    with pytest.raises(HandleError, match=r"^request 1 of 3 in the batch: .*unknown"):
        m.allocate_many([a, UNKNOWN, b], [1, 1, 1])
    assert [m.info(h).granted for h in (a, b)] == [9, 8]
    m.allocate_many([b], [1])
    m.begin_step()
    with pytest.raises(ConfigError, match=r"^request 1 of 2 in the batch: commit up to 10"):
        m.commit_many([a, b], [9, 10])
    assert [m.info(h).committed for h in (a, b)] == [9, 8]
    with pytest.raises(CapacityError, match=r"^request 1 of 2 in the batch: .*max_tokens is 16"):
        m.extend_many([a, b], text(10), counts=[1, 9])
    assert [m.info(h).tokens for h in (a, b)] == [9, 8]
    m.check()


def test_a_handle_may_occur_twice_as_in_single_calls() -> None:
    m = full()
    a, _ = two_running(m)
    assert m.allocate_many([a, a], [1, 3])["end"].tolist() == [9, 11]
    m.begin_step()
    m.commit_many([a, a], [9, 11])
    m.extend_many([a, a], [7, 8])
    assert (m.info(a).committed, m.info(a).tokens) == (11, 10)
    m.check()


def test_a_load_is_not_committed_with_its_grant() -> None:
    m = hybrid()
    run(m, text(9))
    h = m.open(text(10), max_tokens=20)
    loading = m.open(text(9, 50), max_tokens=20)
    m.lookup(h)
    m.lookup(loading, [np.ones(2, np.uint8)] * len(HYBRID.groups))
    m.begin_step()
    grants = m.allocate_many([h, loading], [2, 1], commit=True)
    assert grants["end"].tolist() == [10, 8]
    assert (m.info(h).committed, m.info(loading).state) == (10, "loading")
    m.check()


def test_outside_a_step_nothing_is_granted_that_would_be_committed() -> None:
    m = full()
    handles = two_running(m)
    before = picture(m, handles)
    with pytest.raises(MisuseError, match=r"^request 0 of 2 in the batch: commit outside a step"):
        m.allocate_many(handles, [1, 1], commit=True)
    assert picture(m, handles) == before


def test_an_empty_batch_does_nothing() -> None:
    m = full()
    handles = two_running(m)
    before = picture(m, handles)
    assert len(m.allocate_many([], [])) == 0
    assert m.allocate_many([], [], drafts=[]).dtype == GRANT_DTYPE
    m.commit_many([], [])  # even outside a step
    assert len(m.allocate_many([], [], commit=True)) == 0
    m.extend_many([], [])
    m.extend_many(handles, [], counts=[0, 0])
    assert picture(m, handles) == before


def pick_every_second(values: list[int]) -> Any:
    """An array that does not lie in one piece."""
    return np.repeat(np.array(values), 2)[::2]


@pytest.mark.parametrize("kind", [list, tuple, np.array, pick_every_second])
def test_lists_and_arrays_are_the_same(kind: Callable[[list[int]], Any]) -> None:
    m = full()
    handles = two_running(m)
    grants = m.allocate_many(kind(handles), kind([1, 2]), drafts=kind([2, 0]))
    assert grants["end"].tolist() == [11, 10]
    m.begin_step()
    m.commit_many(kind(handles), kind([9, 10]))
    m.extend_many(kind(handles), kind([1, 2, 3]), counts=kind([1, 2]))
    assert [m.info(h).tokens for h in handles] == [9, 10]


BAD: dict[str, tuple[Callable[[Manager, list[int]], Any], str]] = {
    "tokens for fewer": (lambda m, h: m.allocate_many(h, [1]), "1 values for 2 handles"),
    "drafts for more": (
        lambda m, h: m.allocate_many(h, [1, 1], drafts=[1, 1, 1]),
        "3 values for 2 handles",
    ),
    "guesses that are committed": (
        lambda m, h: m.allocate_many(h, [1, 1], drafts=[1, 0], commit=True),
        "commit=True with drafts",
    ),
    "a word in place of a flag": (
        lambda m, h: m.allocate_many(h, [1, 1], commit="no"),
        "commit is 'no'",
    ),
    "ends for fewer": (lambda m, h: m.commit_many(h, [9]), "1 values for 2 handles"),
    "counts for fewer": (lambda m, h: m.extend_many(h, [1], counts=[1]), "1 values for 2 handles"),
    "one token too few": (lambda m, h: m.extend_many(h, [1]), "1 tokens .* add up to 2"),
    "one token too many": (lambda m, h: m.extend_many(h, [1] * 3), "3 tokens .* add up to 2"),
    "counts above": (
        lambda m, h: m.extend_many(h, [1] * 3, counts=[1, 3]),
        "3 tokens .* add up to 4",
    ),
    "counts below": (
        lambda m, h: m.extend_many(h, [1] * 3, counts=[1, 1]),
        "3 tokens .* add up to 2",
    ),
    "a count below zero": (lambda m, h: m.extend_many(h, [1], counts=[2, -1]), "counts"),
    "counts beyond 64 bits": (
        lambda m, h: m.extend_many(h, [1], counts=[2**63 - 1, 2**63 - 1]),
        "add up to 18446744073709551614",
    ),
    "tokens below zero": (lambda m, h: m.allocate_many(h, [-1, 1]), "request 0 of 2"),
    "drafts below zero": (
        lambda m, h: m.allocate_many(h, [1, 1], drafts=[-1, 0]),
        "request 0 of 2",
    ),
    "tokens beyond 64 bits": (lambda m, h: m.allocate_many(h, [1, 2**63]), "tokens"),
    "a token beyond 32 bits": (
        lambda m, h: m.extend_many(h, [1, 2**31]),
        r"expected -2147483648 to 2147483647 \(int32\)",
    ),
    "handles of half a number": (lambda m, _: m.commit_many([0.5], [9]), "handles is of float64"),
    "a handle alone": (lambda m, h: m.commit_many(h[0], [9]), "give a list"),  # type: ignore[arg-type]
    "handles in rows": (lambda m, h: m.commit_many([h], [[9, 9]]), "shape"),  # type: ignore[list-item]
    "no tokens": (lambda m, h: m.allocate_many(h, None), "tokens is None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_changes_nothing(name: str) -> None:
    m = full()
    handles = two_running(m)
    m.begin_step()
    before = picture(m, handles)
    call, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as caught:
        call(m, handles)
    assert ("in the batch" in str(caught.value)) == message.startswith("request")
    assert picture(m, handles) == before
    m.check()


def test_requests_with_foreign_keys_are_not_told_tokens() -> None:
    m = full()
    keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
    foreign = m.open_foreign(keys, prompt_tokens=8, max_tokens=12)
    native = m.open(text(8), max_tokens=12)
    with pytest.raises(KVCacheError, match=r"request 1 of 2 in the batch: .*extend it by a count"):
        m.extend_many([native, foreign], [1, 2])
    assert [m.info(h).tokens for h in (native, foreign)] == [9, 8]


def test_keys_of_tokens_told_in_a_batch_are_those_of_single_calls() -> None:
    m = full()
    handles = two_running(m)
    m.extend_many(handles, [*text(8, 8), *text(8, 108)], counts=[8, 8])
    alone = m.open(text(16))
    assert m.digests(handles[0]).tolist() == m.digests(alone).tolist()
    assert len(m.block_table(handles[0], A)) == 2
