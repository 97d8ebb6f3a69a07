"""What is remembered of closed requests: how much, in which order it goes, who it is named by."""

from __future__ import annotations

from typing import Any

import pytest
from core.managing import FULL, HYBRID, full, text
from explain.explained import explain, look_up, only, serve

from kvcache import Manager, Sparse
from kvcache.core import explain_calls
from kvcache.core.errors import ConfigError
from kvcache.core.explain_calls import LEAST_HISTORY_TOKENS, MOST_HISTORY_TOKENS
from kvcache.core.explanation import NotStored, TokensDiffer
from kvcache.core.records import UNLIMITED


def remembers(m: Manager, first: int) -> bool:
    """Whether a request that began with `first` is known. Asked once: who asks stays open."""
    found = look_up(m, m.open([*text(5, first), *text(9, 90_000)]))
    return any(loss.cause == "tokens_differ" for loss in found.losses)


def manager(history_tokens: int) -> Manager:
    return Manager(FULL, slabs=UNLIMITED, retention=Sparse(), history_tokens=history_tokens)


def test_the_oldest_goes_first_when_there_are_more_tokens_than_allowed() -> None:
    m = manager(50)
    for first in (1000, 2000, 3000):
        serve(m, text(20, first))
    assert [remembers(m, first) for first in (1000, 2000, 3000)] == [False, True, True]


def test_a_request_longer_than_all_that_is_remembered_is_not_kept() -> None:
    m = manager(44)
    serve(m, text(20, 1000))
    serve(m, text(45, 2000))
    m.check()
    assert not remembers(m, 2000)
    assert remembers(m, 1000)


def test_at_most_4096_requests_are_remembered() -> None:
    m = manager(10**9)
    for i in range(4097):
        m.abort(m.open(text(8, 10 * i)))
    m.check()
    assert not remembers(m, 0)
    assert remembers(m, 10)
    assert remembers(m, 10 * 4096)


@pytest.mark.parametrize("history_tokens", [-1, True, 1.5, "8", 2**70])
def test_a_history_that_cannot_be_is_refused(history_tokens: Any) -> None:
    with pytest.raises(ConfigError, match="history_tokens is"):
        manager(history_tokens)


def test_an_eighth_of_the_arenas_tokens_is_remembered_within_bounds() -> None:
    assert full(8).history_tokens == LEAST_HISTORY_TOKENS
    assert full(10**6).history_tokens == 4 * 10**6 // 8
    assert full(10**8).history_tokens == MOST_HISTORY_TOKENS
    assert full(UNLIMITED).history_tokens == MOST_HISTORY_TOKENS
    slabs = 10**6
    hybrid = Manager(HYBRID, slabs=slabs, retention=Sparse())
    needed = HYBRID.slabs_needed(8 * hybrid.history_tokens)
    assert needed == pytest.approx(slabs, rel=0.01)


def test_names_of_sessions_are_forgotten_in_the_order_in_which_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain_calls, "MAX_SESSIONS", 2)
    m = manager(10**6)
    for first, session in ((1000, "a"), (2000, "b"), (3000, "c")):
        serve(m, text(20, first), session=session)
    names = []
    for first in (1000, 2000, 3000):
        found = explain(m, [*text(6, first), *text(9, 90_000)])
        evidence = only(found, "tokens_differ").evidence
        assert isinstance(evidence, TokensDiffer)
        names.append(evidence.other.session)
    assert names == ["", "b", "c"]


def test_a_turn_that_was_cut_short_does_not_take_away_what_the_one_before_had_computed() -> None:
    """The table of evicted keys has forgotten all: only the history knows."""
    m = Manager(FULL, slabs=1024, retention=Sparse(), history_tokens=10**8)
    serve(m, text(33), session="chat")
    m.abort(m.open(text(60), session="chat"))
    for i in range(1, 120):
        serve(m, text(4000, 10_000 * i))
    found = explain(m, text(33))
    assert (found.losses[0].cause, found.losses[0].end) == ("evicted", 32)


def test_a_turn_that_was_cut_short_does_not_hide_a_clear_after_the_one_before() -> None:
    m = manager(10**6)
    serve(m, text(24), session="chat")
    m.clear()
    m.abort(m.open(text(30), session="chat"))
    evidence = only(explain(m, text(24)), "not_stored").evidence
    assert isinstance(evidence, NotStored)
    assert evidence.why == "cleared"
