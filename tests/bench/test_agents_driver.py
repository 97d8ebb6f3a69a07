"""The scheduler of the agent benchmark, over the real manager."""

from __future__ import annotations

import pytest

from kvcache.bench.agents_driver import AgentDriver, AgentFigures
from kvcache.bench.agents_trace import AgentTrace, ideal_hit_tokens
from kvcache.core.layout import Geometry
from kvcache.core.manager import Manager
from kvcache.core.records import UNLIMITED
from kvcache.core.specs import FullAttention, RecurrentState, SlidingWindow
from kvcache.retention import Sparse

FULL = FullAttention(name="full", layers=1, kv_heads=1, head_dim=1, block_tokens=8)
WINDOW = SlidingWindow(name="window", layers=1, kv_heads=1, head_dim=1, window=20, block_tokens=4)
STATE = RecurrentState(name="state", layers=1, state_bytes_per_layer=96)
GEOMETRIES = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "full and state": (FULL, STATE),
    "all three": (FULL, WINDOW, STATE),
}
TRACE = AgentTrace(
    sessions=5,
    turns=4,
    system_tokens=96,
    first_tokens=60,
    tool_tokens=50,
    output_tokens=20,
    seed=3,
    max_running=3,
)
REQUESTS = TRACE.generate()
LONGEST = max(len(r.prompt) + len(r.output) for r in REQUESTS)


def play(
    geometry: Geometry, slabs: int, interval: int, *, declared: bool, step_tokens: int = 100
) -> AgentFigures:
    manager = Manager(geometry, slabs=slabs, retention=Sparse(interval), movable=True)
    driver = AgentDriver(
        manager,
        REQUESTS,
        boundaries=(TRACE.system_tokens,) if declared else (),
        max_running=TRACE.max_running,
        step_tokens=step_tokens,
        check_every=7,
    )
    figures = driver.run()
    manager.check()
    assert manager.stats().open_requests == 0
    assert figures.leaked_pages == 0
    assert figures.requests == len(REQUESTS)
    assert sum(figures.hits) == figures.hit_tokens
    assert figures.hit_tokens + sum(figures.lost.values()) == figures.prompt_tokens
    return figures


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("interval", [0, 32])
@pytest.mark.parametrize("groups", GEOMETRIES)
def test_an_ample_pool_hits_what_an_infinite_cache_can(
    groups: str, interval: int, declared: bool
) -> None:
    geometry = Geometry(GEOMETRIES[groups])
    figures = play(geometry, UNLIMITED, interval, declared=declared)
    # Full attention alone needs no boundary: the second sighting hits. An interval that divides the
    # system prompt keeps its end as well.
    at_once = declared or groups == "full" or interval == 32
    ideal = ideal_hit_tokens(REQUESTS, declared=at_once, grid_tokens=geometry.grid_tokens)
    assert figures.hit_tokens == ideal
    assert figures.preemptions == 0
    tokens = sum(len(r.prompt) + len(r.output) - 1 for r in REQUESTS)
    assert figures.computed_tokens == tokens - figures.hit_tokens


@pytest.mark.parametrize("step_tokens", [5, 33, 1000])
def test_hits_in_an_ample_pool_do_not_depend_on_the_token_budget(step_tokens: int) -> None:
    geometry = Geometry(GEOMETRIES["all three"])
    figures = play(geometry, UNLIMITED, 0, declared=True, step_tokens=step_tokens)
    assert figures.hit_tokens == ideal_hit_tokens(
        REQUESTS, declared=True, grid_tokens=geometry.grid_tokens
    )


@pytest.mark.parametrize("spare_slabs", [0, 1, 7])
@pytest.mark.parametrize("groups", GEOMETRIES)
def test_every_request_ends_in_a_pool_that_takes_one_of_them(groups: str, spare_slabs: int) -> None:
    geometry = Geometry(GEOMETRIES[groups])
    slabs = geometry.slabs_needed(LONGEST) + spare_slabs
    figures = play(geometry, slabs, 0, declared=True)
    assert 0 < figures.peak_held_bytes <= slabs * geometry.slab_bytes


def test_preempted_requests_are_resumed_and_counted_apart() -> None:
    geometry = Geometry(GEOMETRIES["full"])
    slabs = geometry.slabs_needed(LONGEST) + 4
    figures = play(geometry, slabs, 0, declared=True, step_tokens=20)
    assert figures.preemptions > 0
    assert figures.resumed_tokens > figures.resume_hit_tokens > 0
    assert figures.prompt_tokens == sum(len(r.prompt) for r in REQUESTS)
