"""What a tier holds and a request went without is lost to `elsewhere`, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from explain.explained import only
from tiers.stamp_engine import engine, refuse_loads, text

from kvcache.connectors.base import RequestKeys, TierScheduler
from kvcache.connectors.pool_scheduler import PoolScheduler
from kvcache.core.errors import ConfigError
from kvcache.core.explanation import Elsewhere


def test_a_load_that_cannot_be_made_is_told_as_the_reason() -> None:
    with engine() as e:
        prompt = text(0, 41)
        e.serve(prompt)
        e.manager.clear()
        refuse_loads(e)
        handle = e.manager.open(np.array(prompt, np.int32))
        hit = e.offload.lookup(handle)
        assert hit is not None
        assert hit.hit_tokens == 40
        grant = e.allocate(handle, 1)
        assert grant is not None
        assert not e.offload.start_load(handle, grant)
        assert e.offload.lookup(handle).hit_tokens == 0  # type: ignore[union-attr]
        found = e.offload.explain(handle)
        loss = only(found, "elsewhere")
        assert (loss.start, loss.end) == (0, 40)
        assert isinstance(loss.evidence, Elsewhere)
        assert "loads of this request failed (1)" in loss.evidence.reason
        assert loss.evidence.reason in str(found)
        e.offload.forget(handle)
        e.manager.abort(handle)


def test_what_was_stored_since_was_not_there_for_the_lookup() -> None:
    with engine() as e:
        prompt = text(0, 41)
        handle = e.manager.open(np.array(prompt, np.int32))
        assert e.offload.lookup(handle).hit_tokens == 0  # type: ignore[union-attr]
        assert [loss.cause for loss in e.offload.explain(handle).losses] == [
            "not_stored",
            "last_block",
        ]
        e.serve(prompt)
        e.manager.clear()
        loss = only(e.offload.explain(handle), "elsewhere")
        assert (loss.start, loss.end, loss.told) == (0, 40, "not_stored")
        pinned = e.offload.stats().pinned_pages
        e.offload.explain(handle)
        assert e.offload.stats().pinned_pages == pinned
        e.offload.forget(handle)
        e.manager.abort(handle)


def scheduler() -> PoolScheduler:
    return PoolScheduler((8, 8), (4, 4), deadline_seconds=1.0)


def test_a_tier_holds_nothing_of_a_namespace_that_it_never_saw() -> None:
    keys = RequestKeys(1, bytes(32), [np.zeros((3, 32), np.uint8), np.zeros((2, 32), np.uint8)])
    assert [held.tolist() for held in scheduler().holds(keys)] == [[0, 0, 0], [0, 0]]
    with pytest.raises(ConfigError, match="keys of 1 groups: this tier has 2"):
        scheduler().holds(keys._replace(digests=keys.digests[:1]))


def test_a_tier_that_cannot_tell_leaves_the_causes_as_they_are() -> None:
    def cannot(keys: RequestKeys) -> Any:
        return TierScheduler.holds(e.offload._scheduler, keys)

    with engine() as e:
        prompt = text(0, 41)
        handle = e.manager.open(np.array(prompt, np.int32))
        e.offload.lookup(handle)
        e.serve(prompt)
        e.offload._scheduler.holds = cannot  # type: ignore[method-assign]
        assert [loss.cause for loss in e.offload.explain(handle).losses] == [
            "not_stored",
            "last_block",
        ]
        e.offload.forget(handle)
        e.manager.abort(handle)
