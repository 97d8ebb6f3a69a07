"""What was drained before a restart comes back after it, from every tier that keeps files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.mixes import MIXES, NEW_TOKENS, Course, Met, World, play_course

torch.set_num_threads(1)


@pytest.mark.parametrize("tier", ["disk", "chain"])
def test_after_a_restart_the_files_serve_what_was_drained(tier: str, tmp_path: Path) -> None:
    world = World(MIXES["every"], 0)
    course = Course(
        token_budget=48,
        max_requests=4,
        spare_slabs=60,
        preempting=0.0,
        movable=False,
        tier=tier,
        tier_pages=400,
        forgetting=False,
        restarting=True,
        interval_tokens=0,
        lazy_bytes=None,
        sharding="whole",
        seed=0,
    )
    met = Met()
    play_course(world, course, met, tmp_path)
    known = sum(len(prompt) + NEW_TOKENS for prompt in world.prompts(0))
    grid = world.model.geometry.grid_tokens
    assert met.counts["restarts"] == 1
    assert met.counts[f"tokens from {tier}"] >= known - len(world.texts) * 2 * grid
