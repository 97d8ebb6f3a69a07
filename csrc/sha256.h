// SHA-256 (FIPS 180-4): SHA-NI where the CPU has it, portable C++ otherwise; and the block chain on top.
#pragma once

#include <cstddef>
#include <cstdint>

#include "digest.h"

namespace kvc {

enum class ShaPath : int32_t { kBest = 0, kPortable = 1, kShaNi = 2 };

bool sha_ni_available();
const char* sha_path_name();

// Folds n_blocks 64-byte blocks into the state.
using Compress = void (*)(uint32_t state[8], const uint8_t* data, size_t n_blocks);

// nullptr where the CPU lacks the path.
Compress compress_function(ShaPath path);

// Digest of `data`, starting from a state that has folded `prefix_bytes` (a multiple of 64) already.
Digest sha256(Compress compress, const uint32_t start[8], uint64_t prefix_bytes, const uint8_t* data, size_t n_bytes);

extern const uint32_t kShaInitial[8];

// The chain of block keys: SHA-256(domain block || tokens || parent). The domain block is folded in once. A block that
// something other than its tokens went into (an image, prompt embeddings) has a domain of its own, and what it was follows.
class BlockChain {
  public:
    explicit BlockChain(Compress compress);
    void extend(const Digest& parent, const int32_t* tokens, int64_t n_blocks, int64_t block_tokens,
                Digest* digests) const;
    Digest mixed(const Digest& parent, const int32_t* tokens, int64_t block_tokens, const uint8_t* extra,
                 size_t extra_bytes) const;

  private:
    Compress compress_;
    uint32_t start_[8];
    uint32_t mixed_start_[8];
};

}  // namespace kvc
