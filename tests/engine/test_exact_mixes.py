"""Any mix of layers, through whatever an engine does with it: logits bit-identical to a run alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine.mixes import MIXES, Met, World, draw, play_course

torch.set_num_threads(1)

pytestmark = pytest.mark.long

RUNS = 25
"""Of each mix: 200 in all."""
SCALE = int(os.environ.get("KVCACHE_TEST_SCALE", "1"))
HAPPENINGS = (
    "cut prompts",
    "engines of DCP 2",
    "engines of TP 2",
    "engines of TP 2 x DCP 2",
    "engines of whole",
    "logits",
    "moved pages",
    "preemptions",
    "restarts",
    "steps with batch mates",
    "tokens from chain",
    "tokens from disk",
    "tokens from host",
    "tokens from the device",
    "tokens restored to ranks",
)


@pytest.mark.parametrize("name", MIXES)
def test_no_course_changes_a_bit(name: str, tmp_path: Path) -> None:
    met = Met()
    for seed in range(SCALE):
        world = World(MIXES[name], seed)
        for run in range(RUNS):
            course = draw(world, seed * RUNS + run)
            try:
                play_course(world, course, met, tmp_path / str(course.seed))
            except BaseException as error:
                error.add_note(f"mix {name!r}, world {seed}: {course}")
                raise
    single = len(World(MIXES[name], 0).model.geometry.pages_per_slab) == 1
    expected = [what for what in HAPPENINGS if not (single and what == "moved pages")]
    assert sorted(what for what, count in met.counts.items() if count) == expected
