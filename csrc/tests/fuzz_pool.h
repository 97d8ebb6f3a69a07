// Fuzzers of what needs no manager: page pools, hashing, host copies, page files.
#pragma once

#include "fuzz.h"

namespace fuzz {

void fuzz_pool(uint64_t seed, int64_t operations, Tally* tally);
void fuzz_hash(uint64_t seed, Tally* tally);
void fuzz_copy(uint64_t seed, Tally* tally);
void fuzz_attend(uint64_t seed, Tally* tally);
void fuzz_files(uint64_t seed, Tally* tally);
void fuzz_shared(uint64_t seed, int64_t operations, Tally* tally);

}  // namespace fuzz
