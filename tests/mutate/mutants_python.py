"""Faults in specs, roots and the policy."""

from __future__ import annotations

from mutate.mutant import Mutant

LAW = "tests/laws/test_law_"
KEPT = (
    LAW + "10_boundaries.py::test_law_10_the_keys_kept_are_those_that_a_lookup_at_a_boundary_reads"
)

PYTHON = [
    Mutant(
        "salt ignored in the keys",
        "kvcache/core/hashing.py",
        '        text(salt, "salt").encode(),\n',
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
        "a shard's page counted with the tokens of all",
        "kvcache/core/specs/full.py",
        "return self.block_tokens * self.bytes_per_token",
        "return self.block_tokens * self.dcp_shards * self.bytes_per_token",
        (
            LAW + "20_bytes.py"
            "::test_law_20_a_shard_holds_its_share_of_the_bytes_and_the_arena_serves_as_one_of_large_blocks",
        ),
    ),
    Mutant(
        "window of the spec a token short",
        "kvcache/core/specs/window.py",
        "lead_tokens=self.window - 1,",
        "lead_tokens=max(self.window - 2, 0),",
        (
            LAW + "10_spans.py"
            "::test_law_10_a_boundary_keeps_the_blocks_of_the_tokens_that_its_query_reads_and_no_others",
        ),
    ),
    Mutant(
        "junction dropped by the policy",
        "retention/policy.py",
        "for position in (*shape.boundaries, *shape.junctions)}",
        "for position in shape.boundaries}",
        (
            LAW + "21_second_sighting.py"
            "::test_law_21_an_undeclared_one_hits_on_the_third_at_the_latest",
        ),
    ),
    Mutant(
        "junctions of a waiting request pile up",
        "kvcache/core/manager.py",
        "shape, junctions = self._shapes[handle], self._junctions.get(handle, ())",
        "shape, junctions = self._shapes[handle], self._shapes[handle].junctions",
        (LAW + "07_polls.py::test_law_07_a_request_that_waits_keeps_one_junction",),
    ),
    Mutant(
        "junction forgotten with a preempt",
        "kvcache/core/manager.py",
        "if junctions := self._shapes[handle].junctions:",
        "if junctions := self._shapes[handle].junctions[:0]:",
        (LAW + "07_polls.py::test_law_07_what_an_earlier_run_noticed_is_kept_after_a_preempt",),
    ),
    Mutant(
        "declared boundary rounded up",
        "retention/policy.py",
        "floors = {position // grid * grid for position",
        "floors = {-(-position // grid) * grid for position",
        (KEPT,),
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
        (
            LAW + "14_declared.py"
            "::test_law_14_a_running_request_passes_what_it_declared_in_order_and_the_rest_goes_first",
        ),
    ),
    Mutant(
        "retained interval off the grid",
        "csrc/open.cpp",
        "if (interval < 0 || interval > kMostTokens || interval % grid_)",
        "if (interval < 0 || interval > kMostTokens)",
        (LAW + "15_misuse.py::test_law_15_what_a_policy_may_not_answer_is_refused_at_open",),
    ),
]
