"""A preempted request's last part goes to the tier before its pages go, where that is cheaper."""

from __future__ import annotations

import pytest
from engine.rig import Rig, rig, tokens
from engine.simulated import Speeds, simulated
from engine.stamp_runner import expected_output, stamp_geometry

from kvcache.engine.queues import Counters

GRID = 16


def squeeze(r: Rig) -> Counters:
    """Requests that grow until they do not fit together; the youngest are preempted."""
    wanted = {}
    for i, (length, count) in enumerate([(30, 120), (50, 90), (40, 90)]):
        request = r.engine.add_request(tokens(length, i), max_new_tokens=count)
        wanted[request] = expected_output(tokens(length, i), count)
    results = r.engine.run()
    for request, output in wanted.items():
        assert results[request].tokens == output
    assert r.held == 0
    assert r.engine.counters.preemptions > 0
    return r.engine.counters


@pytest.mark.parametrize(("states", "window"), [(0, 0), (1, 0), (2, 0), (0, 20), (1, 20)])
def test_a_resume_loads_what_the_request_had_at_its_last_grid_point(
    states: int, window: int
) -> None:
    geometry = stamp_geometry(16, states=states, window=window)
    with rig(
        geometry.slabs_needed(150) + 2,
        states=states,
        window=window,
        tier_pages=[200] * len(geometry.groups),
    ) as r:
        counters = squeeze(r)
        assert counters.kept_preemptions == counters.preemptions
        assert counters.recomputed_tokens < GRID * counters.preemptions


def test_without_a_tier_it_is_computed_again() -> None:
    with rig(stamp_geometry(16, states=1).slabs_needed(150) + 2, states=1) as r:
        counters = squeeze(r)
        assert counters.kept_preemptions == 0
        assert counters.recomputed_tokens > GRID * counters.preemptions


@pytest.mark.parametrize(("byte", "kept"), [(1e-8, True), (1e-1, False)])
def test_what_is_cheaper_to_compute_is_not_kept(byte: float, kept: bool) -> None:
    speeds = Speeds(byte=byte)
    with simulated([14, 2], 16, speeds=speeds, states=1, tier_pages=[200, 99]) as r:
        r.engine.scheduler.costs.note_load(1000, 1e-3 + 1000 * byte)
        counters = squeeze(r)
        assert (counters.kept_preemptions == counters.preemptions) == kept
        assert (counters.restored_tokens > 0) == kept
