// The long form of XXH3 as its specification describes it: 8 lanes of 64 bits, stripes of 64 bytes, 16 stripes a block.
#include "xxh3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "error.h"
#include "vector_path.h"

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace kvc {

namespace {

constexpr size_t kStripe = 64;
constexpr size_t kStripes = Xxh3::kBlock / kStripe;
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime32 = 0x9E3779B1;

// The specification's default secret. Stripe i of a block is mixed with 64 bytes from 8 * i on.
alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr size_t kScramble = sizeof kSecret - kStripe;  // where the secret for the end of a block begins
constexpr size_t kLast = kScramble - 7;                 // and for the last stripe
constexpr size_t kLow = 11, kHigh = kScramble - 11;     // and for the two halves of the digest

uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Folds stripes: whole blocks, each of which ends with a scramble, or n stripes of the last one (n_blocks = 0).
using Fold = void (*)(uint64_t* lanes, const uint8_t* data, const uint8_t* secret, size_t n_blocks, size_t n);

void fold_portable(uint64_t* lanes, const uint8_t* data, const uint8_t* secret, size_t n_blocks, size_t n) {
    for (size_t b = 0; b < std::max<size_t>(n_blocks, 1); ++b) {
        for (size_t s = 0; s < (n_blocks ? kStripes : n); ++s, data += kStripe)
            for (size_t i = 0; i < 8; ++i) {
                const uint64_t value = word(data + 8 * i);
                const uint64_t keyed = value ^ word(secret + 8 * (s + i));
                lanes[i ^ 1] += value;
                lanes[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
            }
        for (size_t i = 0; n_blocks && i < 8; ++i) {
            const uint64_t lane = lanes[i];
            lanes[i] = (lane ^ lane >> 47 ^ word(kSecret + kScramble + 8 * i)) * kPrime32;
        }
    }
}

#if defined(__x86_64__)

// The lanes stay in registers over all blocks: written as words and read as vectors they would wait for the store queue.
[[gnu::target("avx2")]] void fold_avx2(uint64_t* lanes, const uint8_t* data, const uint8_t* secret, size_t n_blocks,
                                       size_t n) {
    __m256i sums[2];
    for (int half = 0; half < 2; ++half) sums[half] = _mm256_load_si256(reinterpret_cast<__m256i*>(lanes) + half);
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32));
    for (size_t b = 0; b < std::max<size_t>(n_blocks, 1); ++b) {
        for (size_t s = 0; s < (n_blocks ? kStripes : n); ++s, data += kStripe)
            for (int half = 0; half < 2; ++half) {
                const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + half);
                const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret + 8 * s) + half);
                const __m256i keyed = _mm256_xor_si256(value, key);
                const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
                const __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
                sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
            }
        for (int half = 0; n_blocks && half < 2; ++half) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + kScramble) + half);
            const __m256i mixed =
                _mm256_xor_si256(_mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47)), key);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    for (int half = 0; half < 2; ++half) _mm256_store_si256(reinterpret_cast<__m256i*>(lanes) + half, sums[half]);
}

[[gnu::target("avx512f")]] void fold_avx512(uint64_t* lanes, const uint8_t* data, const uint8_t* secret,
                                            size_t n_blocks, size_t n) {
    constexpr __mmask8 kEach = 0xFF;
    constexpr __mmask16 kAll = 0xFFFF;  // without a mask GCC 12 warns of its own header
    __m512i sums = _mm512_load_si512(lanes);
    const __m512i prime = _mm512_set1_epi64(static_cast<int64_t>(kPrime32));
    const __m512i last = _mm512_loadu_si512(kSecret + kScramble);
    for (size_t b = 0; b < std::max<size_t>(n_blocks, 1); ++b) {
        for (size_t s = 0; s < (n_blocks ? kStripes : n); ++s, data += kStripe) {
            const __m512i value = _mm512_loadu_si512(data);
            const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * s));
            const __m512i product = _mm512_maskz_mul_epu32(kEach, keyed, _mm512_maskz_srli_epi64(kEach, keyed, 32));
            const __m512i swapped = _mm512_maskz_shuffle_epi32(kAll, value, _MM_PERM_BADC);
            sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
        }
        if (!n_blocks) break;
        const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_maskz_srli_epi64(kEach, sums, 47)), last);
        const __m512i high = _mm512_maskz_mul_epu32(kEach, _mm512_maskz_srli_epi64(kEach, mixed, 32), prime);
        sums = _mm512_add_epi64(_mm512_maskz_mul_epu32(kEach, mixed, prime), _mm512_maskz_slli_epi64(kEach, high, 32));
    }
    _mm512_store_si512(lanes, sums);
}

Fold fold() {
    constexpr Fold kFolds[] = {fold_portable, fold_avx2, fold_avx512};
    return kFolds[static_cast<int>(vector_path())];
}

#else

Fold fold() { return fold_portable; }

#endif

uint64_t merged(const uint64_t* lanes, const uint8_t* secret, uint64_t sum) {
    for (size_t i = 0; i < 8; i += 2) {
        const auto product =
            static_cast<unsigned __int128>(lanes[i] ^ word(secret + 8 * i)) * (lanes[i + 1] ^ word(secret + 8 * i + 8));
        sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
    return sum ^ sum >> 32;
}

}  // namespace

void Xxh3::blocks(const uint8_t* data, size_t n) {
    if (n) fold()(lanes_, data, kSecret, n, 0);
    length_ += n * kBlock;
}

void Xxh3::finish(const uint8_t* data, size_t bytes, uint8_t digest[kDigest]) {
    const size_t whole = (bytes - 1) / kBlock;  // the last block, whole or not, is not scrambled
    blocks(data, whole);
    const uint8_t* rest = data + whole * kBlock;
    fold()(lanes_, rest, kSecret, 0, (bytes - 1 - whole * kBlock) / kStripe);
    fold()(lanes_, data + bytes - kStripe, kSecret + kLast, 0, 1);
    length_ += bytes - whole * kBlock;
    const uint64_t low = merged(lanes_, kSecret + kLow, length_ * kPrime1);
    const uint64_t high = merged(lanes_, kSecret + kHigh, ~(length_ * kPrime2));
    for (size_t i = 0; i < 8; ++i) {
        digest[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
        digest[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
    }
}

}  // namespace kvc

extern "C" int32_t kvc_checksum(const uint8_t* data, int64_t n_bytes, uint8_t* digest) {
    if (!data || !digest) return kvc::fail(KVC_E_ARGUMENT, "data or digest is NULL");
    if (n_bytes < static_cast<int64_t>(kvc::Xxh3::kLeast))
        return kvc::fail(KVC_E_ARGUMENT, "%lld bytes to check: this form of XXH3 is for 241 and more",
                         static_cast<long long>(n_bytes));
    kvc::Xxh3().finish(data, static_cast<size_t>(n_bytes), digest);
    return KVC_OK;
}
