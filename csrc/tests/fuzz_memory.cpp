// fuzz_memory [OPERATIONS [SEED]]: right calls in a random order, each of which runs out of memory at every allocation that
// it makes, beside a manager that never does: see lives.h and twins.h. Exit 1 at the first difference, with the seed.
#include <cinttypes>

#include "lives.h"

namespace {

constexpr int64_t kOperationsOfSetup = 80;

}  // namespace

int main(int argc, char** argv) {
    const int64_t operations = argc > 1 ? std::atoll(argv[1]) : 8'000;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    fuzz::Lives::Counts tally;
    for (int64_t i = 0; i * kOperationsOfSetup < operations; ++i)
        fuzz::Lives(first + static_cast<uint64_t>(i), &tally).run(kOperationsOfSetup);
    bool starved = true;
    for (const auto& [function, counts] : tally) {
        std::printf("%-22s %9" PRId64 " calls, %9" PRId64 " times out of memory before\n", function.c_str(),
                    counts.first, counts.second);
    }
    for (const char* function : {"kvc_open", "kvc_extend", "kvc_allocate", "kvc_commit", "kvc_end_step", "kvc_preempt",
                                 "kvc_allocate_many", "kvc_commit_many", "kvc_extend_many"})
        starved &= tally[function].second > 0;
    if (operations >= 8'000 && !starved) {
        std::fprintf(stderr, "a call never ran out of memory: the fuzz is of no use for it\n");
        return 1;
    }
    return 0;
}
