"""The faults, and beside each the law that notices it."""

from __future__ import annotations

from mutate.mutant import Mutant

POLICY = "tests/retention/test_policy.py::"
HASHING = "tests/core/test_hashing.py::"

MUTANTS = [
    Mutant(
        "junction dropped by the policy",
        "retention/policy.py",
        "(*shape.boundaries, *shape.junctions)",
        "shape.boundaries",
        (POLICY + "test_every_policy_keeps_replay_boundary_declared_boundaries_and_junctions",),
    ),
    Mutant(
        "boundary rounded up to the grid",
        "retention/policy.py",
        "points[position // grid * grid] = True",
        "points[-(-position // grid) * grid] = True",
        (POLICY + "test_every_policy_keeps_replay_boundary_declared_boundaries_and_junctions",),
    ),
    Mutant(
        "chain starts from the wrong parent",
        "csrc/sha256.cpp",
        "previous = &digests[i];",
        "previous = &parent;",
        (HASHING + "test_chain_equals_hashlib_for_any_tokens",),
    ),
    Mutant(
        "two threads in one manager",
        "csrc/exclusive.h",
        "if (exclusive.entered.test_and_set(std::memory_order_acquire))",
        "if (false)",
        ("csrc/tests/test_threads",),
        ("crash",),
    ),
]
