"""Faults in the engine's layers, and in what they store."""

from __future__ import annotations

from mutate.mutant import Mutant

LAYERS = "kvcache/engine/layers/"
ORACLE = "tests/engine/test_oracle.py::test_a_model_computes_what_transformers_computes"
OF_A_LAYER = (
    "tests/engine/test_oracle.py::test_a_compressed_layer_computes_what_transformers_computes"
)
EXACT = "tests/engine/test_exact.py::test_"
DIRTY = "tests/engine/test_runner.py::test_what_earlier_owners_left_in_a_page_does_not_change_a_bit"
POOLING = "tests/engine/test_pooling_pages.py::test_rows_that_no_later_step_reads_need_no_page"
MIXES = "tests/engine/test_exact_mixes.py::test_no_course_changes_a_bit"
SHARDED = "tests/engine/test_sharded.py::test_"
RANKS = SHARDED + "ranks_compute_what_one_rank_computes"

ENGINE = [
    Mutant(
        "pages are taken for right after a failed move",
        "kvcache/engine/engine.py",
        "                self.scheduler.forget_pages()\n",
        "                pass\n",
        ("tests/engine/test_engine_ends.py::test_after_a_failed_move_of_pages_no_answer_is_wrong",),
    ),
    Mutant(
        "a window a token wide of what it should be",
        LAYERS + "attend.py",
        "max(0, position + 1 - self.window)",
        "max(0, position - self.window)",
        (ORACLE,),
    ),
    Mutant(
        "exact products of several rows at once",
        "kvcache/engine/ops.py",
        "return torch.bmm(x.unsqueeze(1), weight.t().expand(len(x), -1, -1)).squeeze(1)",
        "return linear(x, weight)",
        (EXACT + "any_chunk_plan_computes_the_same_bits", MIXES),
    ),
    Mutant(
        "latents stored before their norm",
        LAYERS + "latent.py",
        "torch.cat((rms_norm(latent, self.row_norm, self.epsilon), key), -1)",
        "torch.cat((latent, key), -1)",
        (ORACLE,),
    ),
    Mutant(
        "a state without the convolution's last inputs",
        LAYERS + "recurrence.py",
        "                pages[page] = part[0]\n",
        "                pages[page] = part[0] if part.dim() == 4 else 0\n",
        (ORACLE, EXACT + "any_chunk_plan_computes_the_same_bits", MIXES),
    ),
    Mutant(
        "a state that begins with what was in its page",
        LAYERS + "recurrence.py",
        "torch.where(fresh.view(-1, *[1] * (pages.dim() - 1)), 0.0, pages[sources])",
        "pages[sources]",
        (DIRTY,),
    ),
    Mutant(
        "KDA with one decay for all rows of a head",
        LAYERS + "kimi_delta.py",
        "decay=torch.exp(-(forget * self.speed[:, None])),",
        "decay=torch.exp(-(forget * self.speed[:, None])).mean(-1, keepdim=True),",
        (ORACLE,),
    ),
    Mutant(
        "an entry without the tokens of the one before",
        LAYERS + "compressor.py",
        "windows = [before, own]",
        "windows = [self._nothing(rows).expand_as(before), own]",
        (OF_A_LAYER,),
    ),
    Mutant(
        "a query sees the entry that it completes a token late",
        LAYERS + "compressed.py",
        "picked = torch.arange(entries) < (positions + 1) // ratio",
        "picked = torch.arange(entries) < positions // ratio",
        (OF_A_LAYER,),
    ),
    Mutant(
        "picked entries not limited to the best",
        LAYERS + "compressed.py",
        "if entries <= index.top:",
        "if entries >= 0:",
        (OF_A_LAYER,),
    ),
    Mutant(
        "equal scores in any order",
        LAYERS + "compressed.py",
        "scores.sort(dim=-1, descending=True, stable=True).indices",
        "scores.topk(scores.shape[-1], dim=-1).indices",
        (EXACT + "exact_and_fast_operations_compute_the_same_model",),
    ),
    Mutant(
        "pooling rows stored where the table has no page",
        LAYERS + "compressed.py",
        "kept = torch.nonzero(plan.pages >= 0)[:, 0]",
        "kept = torch.arange(len(new))",
        (
            POOLING,
            MIXES,
        ),
    ),
    Mutant(
        "pooling rows of earlier steps not read",
        LAYERS + "compressed.py",
        "rows = torch.cat((earlier, new[span.rows]))",
        "rows = torch.cat((earlier * 0, new[span.rows]))",
        (OF_A_LAYER, EXACT + "any_chunk_plan_computes_the_same_bits", MIXES),
    ),
    Mutant(
        "the format of K and V not in the keys",
        "kvcache/engine/model.py",
        "return Fingerprint(model=name, kv_dtype=self.kv_dtype)",
        "return Fingerprint(model=name)",
        ("tests/engine/test_hybrid.py::test_the_keys_of_models_and_formats_differ",),
    ),
    Mutant(
        "a page begun without being cleared",
        "kvcache/engine/runner.py",
        "storage.zero(g, [int(table[last])])",
        "pass",
        (DIRTY,),
    ),
    Mutant(
        "tokens stored by the rank whose turn is next",
        "kvcache/engine/batch.py",
        "places % turn.ranks == turn.rank)",
        "places % turn.ranks == (turn.rank + 1) % turn.ranks)",
        (RANKS, SHARDED + "heads_are_split_and_tokens_taken_in_turns"),
    ),
    Mutant(
        "parts of ranks merged as if they weighed the same",
        LAYERS + "attend.py",
        "shares = torch.exp(logs - logs.amax(0)).unsqueeze(-1)",
        "shares = torch.ones_like(logs).unsqueeze(-1)",
        (RANKS,),
    ),
    Mutant(
        "an index that picks by the scores of one rank",
        LAYERS + "compressed.py",
        "scores[:, context.turn.rank :: context.turn.ranks] = mine",
        "scores[:, context.turn.rank :: context.turn.ranks] = mine * (context.turn.rank == 0)",
        (RANKS,),
    ),
    Mutant(
        "a rank's page begun without being cleared",
        "kvcache/engine/runner.py",
        "for storage in self.storages:\n                    storage.zero",
        "for storage in self.storages[:1]:\n                    storage.zero",
        (RANKS,),
    ),
    Mutant(
        "pages moved on one rank alone",
        "kvcache/engine/runner.py",
        "for storage in self.storages:\n            storage.move",
        "for storage in self.storages[:1]:\n            storage.move",
        (SHARDED + "pages_move_on_every_rank",),
    ),
    Mutant(
        "a load that reaches one rank of those that have a part",
        "kvcache/connectors/region_copy.py",
        "_part(source, i, length)[:1], _part(target, i, length)",
        "_part(source, i, length)[:1], _part(target, i, length)[:1]",
        (SHARDED + "a_slot_has_every_part_and_a_load_reaches_every_rank",),
    ),
    Mutant(
        "files that do not say how ranks share them",
        "kvcache/engine/shards.py",
        "AllRanks(spec, parts * turns(spec, shards), shards)",
        "AllRanks(spec, parts * turns(spec, shards), UNSHARDED)",
        (SHARDED + "layouts_of_all_shardings_differ",),
    ),
    Mutant(
        "ranks that disagree, unnoticed",
        LAYERS + "attend.py",
        "if ops.exact and not torch.equal(results[0], other):",
        "if not ops.exact and not torch.equal(results[0], other):",
        (SHARDED + "a_rank_whose_pages_went_wrong_is_noticed",),
    ),
]
