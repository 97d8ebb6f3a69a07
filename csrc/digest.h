// A 32-byte key and its hash-table hash.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvc {

struct alignas(8) Digest {
    uint8_t bytes[32];

    bool operator==(const Digest& other) const { return std::memcmp(bytes, other.bytes, 32) == 0; }
};
static_assert(sizeof(Digest) == 32);

// Foreign keys are opaque and may be as regular as 1, 2, 3, so all 32 bytes are mixed, under a seed.
inline uint64_t table_hash(const Digest& digest, uint32_t ns, uint64_t seed) {
    uint64_t words[4];
    std::memcpy(words, digest.bytes, 32);
    auto fold = [](uint64_t a, uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    };
    // Odd constants: the fractional parts of sqrt(2), sqrt(3), sqrt(5), sqrt(7).
    const uint64_t left = fold(words[0] ^ seed ^ 0x6a09e667f3bcc909ULL, words[1] ^ ns ^ 0xbb67ae8584caa73bULL);
    const uint64_t right = fold(words[2] ^ seed ^ 0x3c6ef372fe94f82bULL, words[3] ^ 0xa54ff53a5f1d36f1ULL);
    return fold(left ^ 0x9e3779b97f4a7c15ULL, right ^ seed);
}

}  // namespace kvc
