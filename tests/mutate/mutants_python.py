"""Faults in specs, roots and the policy."""

from __future__ import annotations

from mutate.mutant import Mutant

LAW = "tests/laws/test_law_"
POLICY = "tests/retention/test_policy.py::"
KEEPS = POLICY + "test_every_policy_keeps_replay_boundary_declared_boundaries_and_junctions"

PYTHON = [
    Mutant(
        "salt ignored in the keys",
        "kvcache/core/hashing.py",
        "            salt.encode(),\n",
        "",
        (LAW + "17_key_bytes.py::test_law_17_keys_have_the_documented_bytes",),
    ),
    Mutant(
        "DCP scale ignored",
        "kvcache/core/specs/full.py",
        "block_tokens=self.block_tokens * self.dcp_shards,",
        "block_tokens=self.block_tokens,",
        (
            LAW + "20_context_parallel.py"
            "::test_law_20_so_many_shards_of_a_block_hit_as_one_block_of_all_their_tokens",
        ),
    ),
    Mutant(
        "junction dropped by the policy",
        "retention/policy.py",
        "for position in (*shape.boundaries, *shape.junctions)}",
        "for position in shape.boundaries}",
        (KEEPS,),
    ),
    Mutant(
        "declared boundary rounded up",
        "retention/policy.py",
        "floors = {position // grid * grid for position",
        "floors = {-(-position // grid) * grid for position",
        (KEEPS,),
    ),
    Mutant(
        "replay boundary of n instead of n - 1",
        "retention/policy.py",
        "replay = (shape.prompt_tokens - 1) // grid * grid",
        "replay = shape.prompt_tokens // grid * grid",
        (
            LAW
            + "06_resend.py::test_law_06_the_second_identical_request_hits_all_but_the_last_grid_unit",
        ),
    ),
    Mutant(
        "declared boundaries may be superseded",
        "retention/policy.py",
        "[p in declared for p in positions]",
        "[False for p in positions]",
        (POLICY + "test_declared_boundaries_and_junctions_keep_their_place_when_superseded",),
    ),
    Mutant(
        "retained interval off the grid",
        "csrc/open.cpp",
        "if (interval < 0 || interval > kMostTokens || interval % grid_)",
        "if (interval < 0 || interval > kMostTokens)",
        (
            "tests/core/test_bad_arguments.py::test_a_policy_that_answers_nonsense_is_refused_at_open",
        ),
    ),
]
