"""Faults in tiers: files on disk, and one tier over another."""

from __future__ import annotations

from mutate.mutant import Mutant

DISK = "tests/connectors/test_disk_"
CHAIN = "tests/connectors/test_chain.py::test_"
BROKEN = ("ContractError",)

TIERS = [
    Mutant(
        "the head of a prefix is older than its tail after a restart",
        "connectors/disk_worker.py",
        "times = self._last_time - np.arange(len(good))",
        "times = self._last_time + np.arange(len(good))",
        (DISK + "restart.py::test_what_was_oldest_is_evicted_first_after_a_restart",),
    ),
    Mutant(
        "files of evicted keys stay",
        "connectors/disk_scheduler.py",
        '            self._news.discard(group, slots["name"][evicted])\n',
        "",
        (DISK + "restart.py::test_eviction_removes_files_so_that_space_is_bounded",),
    ),
    Mutant(
        "a smaller tier leaves the files that it has no slots for",
        "connectors/disk_scheduler.py",
        "            news.discard(group, pages.names[:excess])\n",
        "",
        (DISK + "restart.py::test_a_smaller_tier_keeps_the_youngest_and_removes_the_other_files",),
    ),
    Mutant(
        "the key of a bad file stays",
        "connectors/pool_scheduler.py",
        "        elif gone.any():",
        "        elif gone.all() and not gone.any():",
        (DISK + "damage.py::test_each_byte_of_the_head_and_the_checksum_counts",),
        BROKEN,
    ),
    Mutant(
        "layouts told apart by their bytes alone",
        "connectors/disk_format.py",
        "    if dataclasses.is_dataclass(spec):",
        "    if not dataclasses.is_dataclass(spec):",
        (DISK + "restart.py::test_bytes_of_another_layout_are_never_read",),
        ("TypeError",),
    ),
    Mutant(
        "heads that do not name their key",
        "connectors/disk_format.py",
        '    rows["name"] = names\n',
        "",
        (DISK + "damage.py::test_something_else_in_a_files_place_is_a_miss",),
        BROKEN,
    ),
    Mutant(
        "what dead writers left stays",
        "connectors/disk_folder.py",
        "                if lock_now(descriptor):",
        "                if not lock_now(descriptor):",
        (DISK + "processes.py::test_a_process_killed_while_another_uses_the_folder",),
    ),
    Mutant(
        "layouts in use are removed",
        "connectors/disk_folder.py",
        "                    if lock_now(users):",
        "                    if users:",
        (DISK + "restart.py::test_bytes_of_another_layout_are_never_read",),
        BROKEN,
    ),
    Mutant(
        "a full disk stays as it is",
        "connectors/pool_scheduler.py",
        "            self._aside.take()\n",
        "            pass\n",
        (DISK + "full.py::test_on_a_full_disk_new_pages_replace_the_oldest",),
        BROKEN,
    ),
    Mutant(
        "a disk that was full is taken for full for ever",
        "connectors/pool_scheduler.py",
        "        self._aside.give_back_in_time()\n",
        "",
        (DISK + "full.py::test_when_others_made_room_the_tier_grows_again",),
        BROKEN,
    ),
    Mutant(
        "other processes are told nothing of stores",
        "connectors/disk_worker.py",
        "        self._board.post(Change.USED if load else Change.STORED,",
        "        load and self._board.post(Change.USED,",
        (DISK + "processes.py::test_one_bound_for_all",),
    ),
    Mutant(
        "what was read from the disk counts as being on the device",
        "connectors/chain_worker.py",
        "        if not part.ascends:",
        "        if True:",
        (CHAIN + "what_is_stored_sinks_to_the_disk_and_is_there_after_a_restart",),
        BROKEN,
    ),
    Mutant(
        "what rose is forgotten",
        "connectors/chain_scheduler.py",
        "            part = replace(part, id=reserved.id, direction=Direction.STORE, gone=None)",
        "            part = replace(part, id=reserved.id, direction=Direction.STORE, ok=ok * 0)",
        (CHAIN + "what_is_stored_sinks_to_the_disk_and_is_there_after_a_restart",),
        BROKEN,
    ),
    Mutant(
        "keys that did not get down are not counted",
        "connectors/chain_scheduler.py",
        "            self._counts.dropped_store_pages += int((~there).sum())\n",
        "",
        (CHAIN + "what_is_evicted_before_its_turn_is_counted",),
    ),
    Mutant(
        "host memory goes while the disk reads it",
        "connectors/chain_worker.py",
        "        if closed:\n            closed = self._upper.close(",
        "        if True:\n            closed = self._upper.close(",
        (CHAIN + "close_ends_the_disk_first_and_waits_for_it",),
        ("crash",),
    ),
    Mutant(
        "what is in use above grows old below",
        "connectors/chain_scheduler.py",
        "        self._touch_below(wanted, here)\n",
        "",
        (CHAIN + "a_key_in_use_above_is_not_old_below",),
    ),
    Mutant(
        "drain waits for the upper tier alone",
        "connectors/driver.py",
        "        return self._worker.flush(max(end - time.monotonic(), 0.0))",
        "        return True",
        ("tests/engine/test_exact_disk.py::test_after_a_restart_the_files_serve_what_was_drained",),
    ),
    Mutant(
        "checksums not compared",
        "csrc/page_files.cpp",
        "        if (std::memcmp(found, stored, sizeof stored) != 0) return KVC_PAGE_CHECKSUM;\n",
        "",
        ("csrc/tests/test_page_files",),
    ),
    Mutant(
        "longer files taken for whole",
        "csrc/page_files.cpp",
        "about.st_size != kvc_page_file_bytes(files_.page_bytes)",
        "about.st_size < kvc_page_file_bytes(files_.page_bytes)",
        ("csrc/tests/test_page_files",),
    ),
    Mutant(
        "bad files stay",
        "csrc/page_files.cpp",
        "        if (outcome < 0) ::unlinkat(files_.folder, name, 0);\n",
        "",
        ("csrc/tests/test_page_files",),
    ),
    Mutant(
        "files half written stay",
        "csrc/page_files.cpp",
        "        ::unlinkat(files_.folder, temporary, 0);\n        return error;",
        "        return error + (temporary ? 0 : 1);",
        (DISK + "full.py::test_a_full_disk_fails_the_store_and_nothing_else",),
    ),
]
"""Tests named here may need root, to mount: without it they would be skipped, and the mutant live."""
