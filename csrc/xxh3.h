// XXH3 with 128 bits and no seed, of inputs above 240 bytes: the checksum of bytes that leave the process.
//
// It finds damage, not malice: whoever can write a file can write its checksum too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc {

// One input, read once from the front: whole blocks first, the rest in `finish`. At least 241 bytes in all.
class Xxh3 {
  public:
    static constexpr size_t kBlock = 1024;
    static constexpr size_t kLeast = 241;
    static constexpr size_t kDigest = 16;

    // n * kBlock bytes. More must follow.
    void blocks(const uint8_t* data, size_t n);
    // The end of the input, at least 64 bytes. The digest is in the canonical (big-endian) order.
    void finish(const uint8_t* data, size_t bytes, uint8_t digest[kDigest]);

  private:
    alignas(64) uint64_t lanes_[8] = {0xC2B2AE3D,         0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                      0x85EBCA77C2B2AE63, 0x85EBCA77,         0x27D4EB2F165667C5, 0x9E3779B1};
    uint64_t length_ = 0;
};

}  // namespace kvc
