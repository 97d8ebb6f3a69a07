// fuzz_abi [OPERATIONS [SEED]]: every kvc_* function with hostile arguments in hostile orders.
//
// Any status is a right answer to a hostile call. A crash, a sanitizer's report, a call that fails and changes something
// all the same, a broken invariant, or a page that is held in the end by nobody: exit 1, with the seed.
#include <cinttypes>
#include <cstring>

#include "fuzz_manager.h"
#include "fuzz_pool.h"

namespace {

constexpr int64_t kOperationsOfManager = 400;

// Each must have succeeded at least once, or this program tests nothing. tests/core/test_fuzzed_functions.py compares the
// list with the header.
constexpr const char* kFunctions[] = {
    "kvc_sha256",
    "kvc_hash_chain",
    "kvc_pool_new",
    "kvc_pool_present",
    "kvc_pool_acquire",
    "kvc_pool_take",
    "kvc_pool_publish",
    "kvc_pool_check",
    "kvc_pool_release",
    "kvc_pool_unpublish",
    "kvc_pool_get_stats",
    "kvc_pool_journal",
    "kvc_pool_take_events",
    "kvc_pool_spaces",
    "kvc_manager_new",
    "kvc_open",
    "kvc_extend",
    "kvc_retain",
    "kvc_stops",
    "kvc_lookup",
    "kvc_explain",
    "kvc_need",
    "kvc_allocate",
    "kvc_blockage",
    "kvc_begin_step",
    "kvc_commit",
    "kvc_end_step",
    "kvc_allocate_many",
    "kvc_commit_many",
    "kvc_extend_many",
    "kvc_finish",
    "kvc_preempt",
    "kvc_abort",
    "kvc_info",
    "kvc_digests",
    "kvc_table",
    "kvc_state_plan",
    "kvc_holes",
    "kvc_take_moves",
    "kvc_load_items",
    "kvc_end_load",
    "kvc_abandon_load",
    "kvc_take_keyed",
    "kvc_pin",
    "kvc_unpin",
    "kvc_take_events",
    "kvc_manager_get_stats",
    "kvc_get_arena_stats",
    "kvc_get_class_stats",
    "kvc_get_group_stats",
    "kvc_has_key",
    "kvc_namespace_use",
    "kvc_clear",
    "kvc_clear_namespaces",
    "kvc_check",
    "kvc_attend",
    "kvc_copy",
    "kvc_copy_ranges",
    "kvc_checksum",
    "kvc_page_files_write",
    "kvc_page_files_read",
    "kvc_page_files_remove",
    "kvc_next_evicted",
    "kvc_shared_layout",
    "kvc_shared_format",
    "kvc_shared_new",
    "kvc_shared_present",
    "kvc_shared_acquire",
    "kvc_shared_acquire_held",
    "kvc_shared_users",
    "kvc_shared_take",
    "kvc_shared_publish",
    "kvc_shared_unpublish",
    "kvc_shared_release",
    "kvc_shared_version",
    "kvc_shared_get_stats",
    "kvc_shared_check",
    "kvc_shared_detach",
    "kvc_shared_forget",
    "kvc_shared_store",
    "kvc_shared_load",
    "kvc_memory_populate",
    "kvc_memory_prefer_node",
    "kvc_memory_lock",
};

void print(const fuzz::Tally& tally) {
    std::printf("%-22s %10s %9s %9s %9s %9s %9s %9s\n", "", "ok", "no space", "argument", "handle", "state", "capacity",
                "memory");
    for (const auto& [function, counts] : tally) {
        std::printf("%-22s", function.c_str());
        for (const int32_t status :
             {KVC_OK, KVC_NO_SPACE, KVC_E_ARGUMENT, KVC_E_HANDLE, KVC_E_STATE, KVC_E_CAPACITY, KVC_E_MEMORY}) {
            const auto at = counts.find(status);
            std::printf(" %9" PRId64, at == counts.end() ? 0 : at->second);
        }
        std::printf("\n");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t operations = argc > 1 ? std::atoll(argv[1]) : 100'000;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    fuzz::Tally tally;
    uint64_t seed = first;
    for (int64_t done = 0; done < operations; done += 2 * kOperationsOfManager, ++seed) {
        fuzz::ManagerFuzz manager(seed, &tally);
        if (manager.made()) manager.run(kOperationsOfManager);
        fuzz::fuzz_pool(seed, kOperationsOfManager, &tally);
        for (uint64_t i = 0; i < 8; ++i) fuzz::fuzz_copy(seed * 8 + i, &tally);
        for (uint64_t i = 0; i < 8; ++i) fuzz::fuzz_attend(seed * 8 + i, &tally);
        fuzz::fuzz_hash(seed, &tally);
        fuzz::fuzz_files(seed, &tally);
        fuzz::fuzz_shared(seed, kOperationsOfManager, &tally);
    }
    if (kvc_page_file_bytes(kvc_page_head_bytes()) != 8192 || kvc_page_file_bytes(-1)) return 1;
    print(tally);
    if (operations < 100'000) return 0;
    for (const char* function : kFunctions)
        if (!tally[function][KVC_OK]) {
            std::fprintf(stderr, "%s never succeeded: the fuzz is of no use for it\n", function);
            return 1;
        }
    return 0;
}
