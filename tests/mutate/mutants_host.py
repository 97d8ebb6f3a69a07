"""Faults in host memory: pools made ready in chunks, lazy stores, regions that processes share."""

from __future__ import annotations

from mutate.mutant import Mutant

SHARED = "tests/connectors/test_shared.py::test_"
PROCESSES = "tests/connectors/test_shared_processes.py::test_"
USERS = "tests/connectors/test_shared_users.py::test_"
BUSY = "tests/connectors/test_shared_busy.py::test_"
CHUNKS = "tests/connectors/test_pool_chunks.py::test_"
LAZY = "tests/connectors/test_driver_lazy.py::test_"
BROKEN = ("ContractError",)

HOST = [
    Mutant(
        "memory is touched whatever is left",
        "connectors/host_pool.py",
        "                require_room(size_bytes)\n",
        "                pass\n",
        (CHUNKS + "memory_that_went_since_the_start_fails_stores_and_nothing_else",),
    ),
    Mutant(
        "stores go where no memory is ready",
        "connectors/cpu.py",
        "        count = int(ready.sum())",
        "        ready |= True\n        count = int(ready.sum())",
        (CHUNKS + "memory_that_went_since_the_start_fails_stores_and_nothing_else",),
        BROKEN,
    ),
    Mutant(
        "a chunk is made ready as often as it is asked for",
        "connectors/pool_chunks.py",
        "            self._ready[group][chunk] = True\n",
        "            self._ready[group][0] = True\n",
        (CHUNKS + "a_slot_may_be_written_if_its_bytes_were_made_ready_and_each_was_once",),
    ),
    Mutant(
        "memory is made ready after the end",
        "connectors/pool_chunks.py",
        '            if self._stop.is_set():\n                return "the pool is closed"\n',
        "",
        (CHUNKS + "closing_ends_the_thread_between_two_chunks",),
    ),
    Mutant(
        "lazy stores look a byte ahead",
        "connectors/offload_stores.py",
        "self._manager.next_evicted(self._ahead_bytes)",
        "self._manager.next_evicted(1)",
        (LAZY + "what_the_device_evicts_is_in_the_tier_by_then",),
    ),
    Mutant(
        "lazy stores are eager",
        "connectors/offload_stores.py",
        "            self._backlog = self._manager.next_evicted(self._ahead_bytes)\n",
        "            self._backlog = self._manager.next_evicted(None)\n",
        (LAZY + "nothing_is_stored_while_the_device_has_room",),
    ),
    Mutant(
        "regions in use are removed",
        "connectors/shared_region.py",
        '            if _is_region(entry) and not is_used(entry / "region"):',
        "            if _is_region(entry):",
        (SHARED + "what_one_stores_all_find_at_once",),
    ),
    Mutant(
        "whatever lies beside regions is taken for one",
        "connectors/shared_region.py",
        '    return [entry.name for entry in path.iterdir()] == ["region"]',
        '    return "region" in [entry.name for entry in path.iterdir()]',
        (SHARED + "what_else_lies_in_the_folder_stays",),
    ),
    Mutant(
        "the last user leaves the region behind",
        "connectors/shared_region.py",
        "and not locks.others():",
        "and locks.others():",
        (SHARED + "where_regions_lie_by_default",),
    ),
    Mutant(
        "memory of a region is not reserved",
        "connectors/shared_region.py",
        "            os.posix_fallocate(memory, address - base, size_bytes)\n",
        "",
        (SHARED + "a_file_system_that_others_fill_fails_stores_and_kills_nobody",),
        ("crash",),
    ),
    Mutant(
        "anybody's folder will do",
        "connectors/shared_region.py",
        "    if about.st_uid != os.geteuid() or about.st_mode & 0o077:",
        "    if about.st_uid != os.geteuid():",
        (SHARED + "a_folder_that_others_may_read_is_refused",),
    ),
    Mutant(
        "the dead are not buried",
        "connectors/shared.py",
        "        self._region.bury()\n",
        "",
        (PROCESSES + "what_a_dead_process_held_is_let_go",),
    ),
    Mutant(
        "who leaves removes whatever has the name now",
        "connectors/shared_region.py",
        'locks.lead_from(self.path / "region") and ',
        "",
        (USERS + "who_leaves_a_region_that_was_removed_takes_nothing_from_its_successor",),
    ),
    Mutant(
        "a region that cannot be looked at is nobody's",
        "connectors/shared_users.py",
        "    except OSError:\n        return True\n    try:",
        "    except OSError:\n        return False\n    try:",
        (USERS + "where_it_cannot_be_told_whether_a_region_is_used_it_is_kept",),
    ),
    Mutant(
        "a forked child keeps its parent's number",
        "connectors/shared_users.py",
        "        mind_forks(self)\n",
        "",
        (USERS + "a_forked_child_keeps_nothing_of_its_dead_parent",),
        BROKEN,
    ),
    Mutant(
        "keys that another process's lock kept from being given are forgotten",
        "csrc/shared_pool.cpp",
        "        debt.items.push_back({held[done], static_cast<int32_t>(debt.names.size())});\n",
        "",
        (BUSY + "a_page_that_was_stored_meanwhile_is_found",),
    ),
    Mutant(
        "a lookup that was not answered is a miss",
        "connectors/pool_promises.py",
        "            if busy.soon:",
        "            if not busy.soon:",
        (BUSY + "a_lookup_that_was_not_answered_is_asked_anew",),
    ),
    Mutant(
        "what is found nowhere in a pause is taken for the answer of the index",
        "connectors/pool_promises.py",
        "            versions = [NEVER] * len(versions)\n",
        "",
        (BUSY + "what_was_not_found_in_a_pause_is_found_after_it",),
    ),
    Mutant(
        "namespaces are known for ever",
        "connectors/pool_spaces.py",
        "            if number not in used:",
        "            if number in used and number not in used:",
        (
            "tests/connectors/test_pool_scheduler.py::test_namespaces_are_known_as_long_as_a_key_or_an_event_has_them",
        ),
    ),
    Mutant(
        "checksums of shared pages are not compared",
        "csrc/shared_pages.cpp",
        "ok[i] = std::memcmp(digest, slots(g)[held[i]].checksum, sizeof digest) == 0;",
        "ok[i] = 1;",
        (SHARED + "a_page_that_changed_is_a_miss_and_goes",),
        BROKEN,
    ),
    Mutant(
        "checksums of shared pages know no key",
        "csrc/shared_pages.cpp",
        "    std::memcpy(end + rest, name, sizeof(SharedName));\n",
        "    (void)name;\n",
        (SHARED + "the_slot_of_another_key_is_not_taken_for_the_wanted_one",),
        BROKEN,
    ),
    Mutant(
        "tables are taken as a dead owner left them",
        "csrc/shared_pool.cpp",
        "        rebuild();\n        ++head().recoveries;",
        "        ++head().recoveries;",
        ("csrc/tests/test_shared_pool",),
        ("crash", "hang"),
    ),
    Mutant(
        "a slot has its key before its name",
        "csrc/shared_tables.cpp",
        "    s.name = name;\n    std::atomic_ref(s.keyed).store(1, std::memory_order_release);",
        "    std::atomic_ref(s.keyed).store(1, std::memory_order_release);\n"
        "    for (volatile int i = 0; i < 3000; i = i + 1) {\n    }\n"
        "    s.name = name;",
        ("csrc/tests/test_shared_pool",),
        ("crash", "hang"),
    ),
]
