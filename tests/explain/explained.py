"""Looks requests up and explains them, checking that all of it adds up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.managing import compute

from kvcache import Manager
from kvcache.core.explanation import CAUSES, Explanation, Loss
from kvcache.core.records import LOSS_CAUSES, Hit

Regions = list[tuple[str, int, int]]


def require_sum(hit: Hit, explanation: Explanation) -> None:
    """The regions are all of the prompt that was not hit, and add up to what the lookup told."""
    at = explanation.hit_tokens
    told = dict.fromkeys(LOSS_CAUSES, 0)
    for loss in explanation.losses:
        assert loss.start == at < loss.end, explanation
        at = loss.end
        told[loss.told] += loss.tokens
    assert at == explanation.prompt_tokens
    assert explanation.hit_tokens == hit.hit_tokens
    assert told == hit.lost, explanation
    assert set(explanation.lost()) == set(CAUSES)
    assert sum(explanation.lost().values()) + hit.hit_tokens == explanation.prompt_tokens
    assert str(explanation).count("\n") == len(explanation.losses)


def look_up(m: Manager, handle: int, **how: Any) -> Explanation:
    """A lookup, and why it lost what it did."""
    hit = m.lookup(handle)
    explanation = m.explain(handle, **how)
    require_sum(hit, explanation)
    return explanation


def regions(explanation: Explanation) -> Regions:
    return [(loss.cause, loss.start, loss.end) for loss in explanation.losses]


def explain(m: Manager, tokens: Sequence[int], **how: Any) -> Explanation:
    """Of a request that is aborted at once."""
    handle = m.open(tokens, **how)
    explanation = look_up(m, handle)
    m.abort(handle)
    return explanation


def serve(m: Manager, tokens: Sequence[int], **how: Any) -> int:
    """Compute a prompt and finish it; its handle."""
    handle = m.open(tokens, **how)
    compute(m, handle, len(tokens))
    m.finish(handle)
    return handle


def only(explanation: Explanation, cause: str) -> Loss:
    """The one loss with this cause."""
    found = [loss for loss in explanation.losses if loss.cause == cause]
    assert len(found) == 1, explanation
    return found[0]
