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

// What the words of a key are mixed with. From a seed that nobody knows these are four such numbers (splitmix64: Steele, Lea,
// Flood, Fast splittable pseudorandom number generators, 2014).
struct HashSeed {
    uint64_t words[4];

    explicit HashSeed(uint64_t seed) {
        for (uint64_t& word : words) {
            uint64_t z = seed += 0x9e3779b97f4a7c15ULL;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
            word = z ^ (z >> 31);
        }
    }
};

// Foreign keys are opaque, may be as regular as 1, 2, 3, and may be chosen by somebody who wants them to collide. So all 32
// bytes count, and no word meets another, or the namespace, but for what the seed has made of it. A zero, which would make any
// product zero, leaves the other factor: both are mixed into the result once more.
inline uint64_t table_hash(const Digest& digest, uint32_t ns, const HashSeed& seed) {
    uint64_t words[4];
    std::memcpy(words, digest.bytes, 32);
    auto fold = [](uint64_t a, uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ a ^ b;
    };
    const uint64_t left = fold(words[0] ^ seed.words[0], words[1] ^ seed.words[1]);
    const uint64_t right = fold(words[2] ^ seed.words[2], words[3] ^ seed.words[3]);
    return fold(left, right ^ ns);
}

}  // namespace kvc
