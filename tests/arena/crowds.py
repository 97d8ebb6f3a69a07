"""Random crowds in arenas as small as `open` allows, from a seed: page ratios up to 2,000 to 1."""

from __future__ import annotations

import random

from arena.adversary import Crowd, Job, Pressure, crowd
from laws import cases

from kvcache import Geometry
from kvcache.retention import Dense, Sparse

RATIOS = (1, 2, 3, 5, 8, 40, 200, 2000)
"""Small pages to one large page."""


def two_sizes(rng: random.Random, ratio: int) -> Geometry:
    """Full attention beside a state, a window, both, or a second size; the large one is `ratio` pages."""
    block = rng.choice([1, 2, 4])
    window = rng.randint(1, 3) * block
    small, large = 8 * block, 8 * block * ratio
    full = cases.full("a", block)
    groups = {
        "state": (full, cases.state("s", large)),
        "window": (full, cases.window("w", window, block, width=4 * ratio)),
        "both": (
            full,
            cases.window("w", window, block, width=4 * rng.choice([1, 2, 3])),
            cases.state("s", large),
        ),
        "two blocks": (full, cases.full("b", 2 * block), cases.state("s", large)),
        "large full": (
            cases.full("a", block, width=4 * ratio),
            cases.window("w", window, block),
            cases.state("s", small),
        ),
    }
    return cases.geometry(*groups[rng.choice(sorted(groups))])


def jobs(rng: random.Random, longest: int) -> list[Job]:
    """One to six requests, some with a prefix in common, some that are opened and never run."""
    shared = [rng.randrange(3) for _ in range(longest)]
    drawn = []
    for _ in range(rng.randint(1, 6)):
        length = rng.randint(2, longest)
        same = rng.randint(0, length) if rng.random() < 0.7 else 0
        tokens = shared[:same] + [rng.randrange(5) for _ in range(length - same)]
        job = Job(tokens, rng.randint(1, length), rng.choice([1, 2, 5, 16, longest]))
        job.arrives = rng.randint(0, 12)
        job.idle = rng.randint(5, 40) if rng.random() < 0.2 else 0
        drawn.append(job)
    return drawn


def random_crowd(seed: int, geometry: Geometry | None = None, *, ratio: int = 1) -> Crowd:
    """Slabs for the longest request and no more, in four of five."""
    rng = random.Random(seed)
    geometry = geometry or two_sizes(rng, ratio)
    drawn = jobs(rng, rng.choice([8, 24, 48]))
    slabs = max(geometry.slabs_needed(len(job.tokens)) for job in drawn)
    pressure = Pressure(
        deadline=rng.randint(1, 6),
        pins=rng.randint(0, 4),
        loads=rng.choice([0, 0.3]),
        max_open_steps=rng.randint(1, 3),
        worst=rng.random() < 0.5,
    )
    return crowd(
        geometry,
        drawn,
        slabs=slabs + (rng.random() < 0.2),
        retention=rng.choice([Dense(), Sparse(), Sparse(2 * geometry.grid_tokens)]),
        pressure=pressure,
        movable=rng.random() < 0.5,
        seed=seed,
    )
