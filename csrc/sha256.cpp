#include "sha256.h"

#include <algorithm>
#include <bit>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "error.h"
#include "exclusive.h"

namespace kvc {

const uint32_t kShaInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

namespace {

alignas(64) const uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The message bytes of a key, the same on every host.
constexpr int64_t kMostHashed = int64_t{1} << 40;  // tokens
constexpr char kBlockDomain[] = "kvcache/block/2";
constexpr char kMixedDomain[] = "kvcache/block+/2";

uint32_t load_be(const uint8_t* p) {
    return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

void store_be(uint32_t value, uint8_t* p) {
    for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

void compress_portable(uint32_t state[8], const uint8_t* data, size_t n_blocks) {
    for (; n_blocks; --n_blocks, data += 64) {
        uint32_t w[64];
        for (int i = 0; i < 16; ++i) w[i] = load_be(data + 4 * i);
        for (int i = 16; i < 64; ++i) {
            const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        uint32_t v[8];
        std::copy_n(state, 8, v);
        for (int i = 0; i < 64; ++i) {
            const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
            const uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[i] + w[i];
            const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
            const uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            for (int j = 7; j > 0; --j) v[j] = v[j - 1];
            v[4] += t1;
            v[0] = t1 + t2;
        }
        for (int i = 0; i < 8; ++i) state[i] += v[i];
    }
}

#if defined(__x86_64__)
// The instructions keep the state as two rows, ABEF and CDGH, and do two rounds each.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(uint32_t state[8], const uint8_t* data,
                                                                 size_t n_blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(abcd, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, abcd, 0xF0);
    for (; n_blocks; --n_blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; ++i)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            const __m128i row = w[i & 3];
            __m128i sum = _mm_add_epi32(row, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            sum = _mm_shuffle_epi32(sum, 0x0E);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, sum);
            if (i < 12) {  // schedule row i + 4 over row i
                __m128i next = _mm_sha256msg1_epu32(row, w[(i + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
                w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

}  // namespace

bool sha_ni_available() {
#if defined(__x86_64__)
    static const bool available = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 29))) return false;
        __builtin_cpu_init();
        return __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
    }();
    return available;
#else
    return false;
#endif
}

Compress compress_function(ShaPath path) {
#if defined(__x86_64__)
    if (path != ShaPath::kPortable && sha_ni_available()) return compress_sha_ni;
#endif
    return path == ShaPath::kShaNi ? nullptr : compress_portable;
}

const char* sha_path_name() { return sha_ni_available() ? "sha-ni" : "portable"; }

// Ends a message of so many bytes, whose last n_tail (below 119) lie in the zeroed tail; returns its 64-byte blocks.
static size_t pad(uint8_t tail[128], size_t n_tail, uint64_t message_bytes) {
    const size_t blocks = n_tail + 9 > 64 ? 2 : 1;
    tail[n_tail] = 0x80;
    store_be(static_cast<uint32_t>(message_bytes * 8 >> 32), tail + blocks * 64 - 8);
    store_be(static_cast<uint32_t>(message_bytes * 8), tail + blocks * 64 - 4);
    return blocks;
}

static Digest digest_of(const uint32_t state[8]) {
    Digest digest;
    for (int i = 0; i < 8; ++i) store_be(state[i], digest.bytes + 4 * i);
    return digest;
}

Digest sha256(Compress compress, const uint32_t start[8], uint64_t prefix_bytes, const uint8_t* data, size_t n_bytes) {
    uint32_t state[8];
    std::copy_n(start, 8, state);
    const size_t whole = n_bytes / 64, rest = n_bytes % 64;
    compress(state, data, whole);
    uint8_t tail[128] = {};
    std::copy_n(data + whole * 64, rest, tail);
    compress(state, tail, pad(tail, rest, prefix_bytes + n_bytes));
    return digest_of(state);
}

BlockChain::BlockChain(Compress compress) : compress_(compress) {
    auto fold = [&](const char* name, size_t length, uint32_t* state) {
        uint8_t domain[64] = {};
        std::copy_n(name, length, domain);
        std::copy_n(kShaInitial, 8, state);
        compress_(state, domain, 1);
    };
    fold(kBlockDomain, sizeof kBlockDomain - 1, start_);
    fold(kMixedDomain, sizeof kMixedDomain - 1, mixed_start_);
}

Digest BlockChain::mixed(const Digest& parent, const int32_t* tokens, int64_t block_tokens, const uint8_t* extra,
                         size_t extra_bytes) const {
    const size_t token_bytes = static_cast<size_t>(block_tokens) * 4;
    std::vector<uint8_t> message(token_bytes + extra_bytes + 32);
    std::memcpy(message.data(), tokens, token_bytes);
    std::memcpy(message.data() + token_bytes, extra, extra_bytes);
    std::memcpy(message.data() + token_bytes + extra_bytes, parent.bytes, 32);
    return sha256(compress_, mixed_start_, 64, message.data(), message.size());
}

// The parent comes last: what is folded before it does not wait for it, so the processor works on two blocks at a time.
void BlockChain::extend(const Digest& parent, const int32_t* tokens, int64_t n_blocks, int64_t block_tokens,
                        Digest* digests) const {
    static_assert(std::endian::native == std::endian::little, "tokens are hashed as little-endian int32");
    const size_t token_bytes = static_cast<size_t>(block_tokens) * 4;
    const size_t whole = token_bytes / 64, rest = token_bytes % 64;
    uint8_t tail[128] = {};  // tokens beyond whole 64-byte blocks, parent, padding
    const size_t tail_blocks = pad(tail, rest + 32, 64 + token_bytes + 32);
    const auto* bytes = reinterpret_cast<const uint8_t*>(tokens);
    const Digest* previous = &parent;
    for (int64_t i = 0; i < n_blocks; ++i, bytes += token_bytes) {
        uint32_t state[8];
        std::copy_n(start_, 8, state);
        compress_(state, bytes, whole);
        if (rest) std::memcpy(tail, bytes + whole * 64, rest);
        std::memcpy(tail + rest, previous->bytes, 32);
        compress_(state, tail, tail_blocks);
        digests[i] = digest_of(state);
        previous = &digests[i];
    }
}

}  // namespace kvc

extern "C" {

const char* kvc_sha256_path(void) { return kvc::sha_path_name(); }

int32_t kvc_sha256(int32_t path, const uint8_t* data, int64_t n_bytes, uint8_t* digest) {
    const auto compress = kvc::compress_function(static_cast<kvc::ShaPath>(path));
    if (path < 0 || path > 2 || !compress) return kvc::fail(KVC_E_ARGUMENT, "SHA-256 path %d: not on this CPU", path);
    if (const auto status = kvc::check_array("data", data, n_bytes)) return status;
    if (const auto status = kvc::not_null("digest", digest)) return status;
    const auto result = kvc::sha256(compress, kvc::kShaInitial, 0, data, static_cast<size_t>(n_bytes));
    std::memcpy(digest, result.bytes, 32);
    return KVC_OK;
}

int32_t kvc_hash_chain(int32_t path, const uint8_t* parent, const int32_t* tokens, int64_t n_blocks,
                       int64_t block_tokens, uint8_t* digests) {
    return kvc::guarded([&]() -> int32_t {
        const auto compress = kvc::compress_function(static_cast<kvc::ShaPath>(path));
        if (path < 0 || path > 2 || !compress)
            return kvc::fail(KVC_E_ARGUMENT, "SHA-256 path %d: not on this CPU", path);
        if (n_blocks < 0 || block_tokens < 1 || block_tokens > kvc::kMostHashed ||
            n_blocks > kvc::kMostHashed / block_tokens)
            return kvc::fail(KVC_E_ARGUMENT, "%lld blocks of %lld tokens: both must be positive, their product small",
                             static_cast<long long>(n_blocks), static_cast<long long>(block_tokens));
        if (const auto status = kvc::not_null("parent", parent)) return status;
        if (const auto status = kvc::check_array("tokens", tokens, n_blocks)) return status;
        if (const auto status = kvc::check_array("digests", digests, n_blocks)) return status;
        kvc::Digest first;
        std::memcpy(first.bytes, parent, 32);
        std::vector<kvc::Digest> out(static_cast<size_t>(n_blocks));
        kvc::BlockChain(compress).extend(first, tokens, n_blocks, block_tokens, out.data());
        if (n_blocks) std::memcpy(digests, out.data(), out.size() * 32);
        return KVC_OK;
    });
}
}
