"""Faults in what measures and shows: benchmarks of tiers, the demo, the chat."""

from __future__ import annotations

from mutate.mutant import Mutant

SESSIONS = "tests/bench/test_engine_bench_sessions.py::test_"
OFFLOAD = "tests/bench/test_offload_bench.py::test_"
AIMS = "tests/bench/test_aims.py::test_"
CHAT = "tests/test_chat.py::test_"
DEMO = "tests/test_demo.py::test_"

BENCH = [
    Mutant(
        "outputs that differ count as equal",
        "bench/sessions_report.py",
        '"outputs_equal": not any(o["differences"] for o in outputs),',
        '"outputs_equal": True,',
        (SESSIONS + "an_engine_that_computes_something_else_is_found_out",),
    ),
    Mutant(
        "a small pool that holds every session",
        "bench/sessions_way.py",
        "tokens = bench.pool_tokens if small else every",
        "tokens = every",
        (SESSIONS + "each_way_reuses_what_its_memory_allows",),
    ),
    Mutant(
        "a missed aim that is required is no failure",
        "bench/aims.py",
        'not (require and report.get("missed"))',
        "True",
        (AIMS + "what_fails_ends_with_1_and_what_misses_only_where_that_is_required",),
    ),
    Mutant(
        "files in memory pass for a disk",
        "bench/medium.py",
        "if kind in IN_MEMORY and not allow_tmpfs:",
        "if kind in IN_MEMORY and allow_tmpfs:",
        ("tests/bench/test_medium.py::test_memory_is_refused_unless_it_is_asked_for",),
        errors=("ConfigError",),
    ),
    Mutant(
        "sessions that ask in the same order every round",
        "bench/sessions.py",
        "np.random.default_rng([bench.seed, number])",
        "np.random.default_rng(bench.seed)",
        (SESSIONS + "sessions_ask_in_another_order_each_round_and_all_ways_alike",),
    ),
    Mutant(
        "an upper tier that still has what is loaded from below",
        "bench/offload_rig.py",
        "return ChainConnector(CpuConnector(geometry, pages=[pages]), disk)",
        "return ChainConnector(CpuConnector(geometry, pages=[2 * pages]), disk)",
        (OFFLOAD + "the_chain_loads_from_its_lower_tier_what_the_upper_one_has_not",),
    ),
    Mutant(
        "a second process with a disk of its own",
        "bench/demo/play.py",
        "with SecondProcess(settings, kit, folder) as second:",
        'with SecondProcess(settings, kit, folder / "own") as second:',
        (DEMO + "a_new_process_goes_on_from_what_the_first_one_left_on_disk",),
    ),
    Mutant(
        "a conversation without its answers' tokens",
        "kvcache/engine/conversation.py",
        "conversation.tokens = [*prompt.tolist(), *output]",
        "conversation.tokens = prompt.tolist()",
        (CHAT + "a_turn_hits_what_the_turn_before_it_computed",),
    ),
    Mutant(
        "an answer that was cut short needs no end mark",
        "kvcache/engine/chat.py",
        "close = () if ended else (_special(tokenizer, END),)",
        "close: tuple[int, ...] = ()",
        (CHAT + "a_reply_in_tokens_is_what_the_whole_conversation_encodes_to",),
    ),
    Mutant(
        "two chats in one folder",
        "kvcache/commands/chat_history.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (CHAT + "a_folder_is_for_one_chat_at_a_time_and_for_one_model",),
    ),
    Mutant(
        "folders of living processes are swept",
        "bench/folder.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(lock, fcntl.LOCK_UN)",
        (SESSIONS + "a_folder_in_use_by_another_is_left_and_one_of_a_dead_process_is_not",),
    ),
]
