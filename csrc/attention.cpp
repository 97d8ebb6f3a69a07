// Attention of decoding requests over K and V where they lie in pages: nothing is gathered first.
//
//     row r        a query for each head, and the tokens `begin` to `end` of its block table
//     a part       512 tokens of a row at most, one thread's: weighted values of each head, their weight, the highest score
//     merge        the parts of a row, first to last (arXiv 1805.02867, section 3)
//
// Where a row is cut depends on the row alone: neither its neighbours nor the number of threads changes a bit.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "cores.h"
#include "error.h"
#include "kvcache_core.h"
#include "vector_path.h"

namespace {

using kvc::fail;
using kvc::VectorPath;
using Longs = long long;

constexpr int32_t kMostThreads = 256;
constexpr int64_t kPartTokens = 512;
constexpr int32_t kLineFloats = 16;   // a head's dimension is a multiple of it: its rows are whole cache lines
constexpr int32_t kMostTokens = 512;  // of a block
constexpr int64_t kMostFloats = int64_t{1} << 30;   // of a page
constexpr int64_t kThreadBytes = int64_t{1} << 20;  // a thread more is not worth its start for less

struct Part {
    int64_t row, begin, end;  // tokens
};

// Scores of tokens that lie `token_floats` apart, four at a time: each sum waits for itself alone.
[[gnu::always_inline]] inline void score(const float* query, const float* key, int64_t token_floats, int32_t n,
                                         int32_t dim, float scale, float* scores) {
    int32_t t = 0;
    for (; t + 4 <= n; t += 4) {
        const float *const a = key + t * token_floats, *const b = a + token_floats, *const c = b + token_floats,
                           *const d = c + token_floats;
        float sa = 0, sb = 0, sc = 0, sd = 0;
#pragma omp simd reduction(+ : sa, sb, sc, sd)
        for (int32_t i = 0; i < dim; ++i)
            sa += query[i] * a[i], sb += query[i] * b[i], sc += query[i] * c[i], sd += query[i] * d[i];
        scores[t] = sa * scale, scores[t + 1] = sb * scale, scores[t + 2] = sc * scale, scores[t + 3] = sd * scale;
    }
    for (; t < n; ++t) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int32_t i = 0; i < dim; ++i) sum += query[i] * key[t * token_floats + i];
        scores[t] = sum * scale;
    }
}

// mixed = fade * mixed + sum of weights * values
[[gnu::always_inline]] inline void mix(const float* weights, const float* value, int64_t token_floats, int32_t n,
                                       int32_t dim, float fade, float* mixed) {
#pragma omp simd
    for (int32_t i = 0; i < dim; ++i) mixed[i] *= fade;
    int32_t t = 0;
    for (; t + 4 <= n; t += 4) {
        const float *const a = value + t * token_floats, *const b = a + token_floats, *const c = b + token_floats,
                           *const d = c + token_floats;
        const float wa = weights[t], wb = weights[t + 1], wc = weights[t + 2], wd = weights[t + 3];
#pragma omp simd
        for (int32_t i = 0; i < dim; ++i) mixed[i] += (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
    }
    for (; t < n; ++t) {
#pragma omp simd
        for (int32_t i = 0; i < dim; ++i) mixed[i] += weights[t] * value[t * token_floats + i];
    }
}

// Asks for one of `n` shares of what is read next, so that memory and arithmetic are at work together.
[[gnu::always_inline]] inline void fetch_share(const float* next, int64_t floats, int32_t i, int32_t n) {
    for (int64_t at = floats * i / n; at < floats * (i + 1) / n; at += kLineFloats) __builtin_prefetch(next + at);
}

// out [heads, dim + 2]: values weighted by exp(score - highest), the sum of the weights, the highest score.
[[gnu::always_inline]] inline void attend_any(const kvc_decode& d, const Part& part, float* out) {
    const int32_t dim = d.head_dim, heads = d.kv_heads * d.group, block = d.block_tokens;
    const int64_t token_floats = int64_t{d.kv_heads} * dim;
    const float* const queries = d.queries + part.row * d.query_stride;
    const int32_t* const table = d.tables + part.row * d.table_stride;
    const auto page = [&](int64_t token) {
        return std::bit_cast<const float*>(d.base + static_cast<uint64_t>(d.page_stride) *
                                                        static_cast<uint64_t>(table[token / block]));
    };
    for (int32_t h = 0; h < heads; ++h) {
        std::fill_n(out + h * (dim + 2), dim + 1, 0.0F);
        out[h * (dim + 2) + dim + 1] = -std::numeric_limits<float>::infinity();
    }
    float scores[kMostTokens];
    for (int64_t first = part.begin; first < part.end;) {
        const int64_t next = std::min(part.end, (first / block + 1) * block);
        const auto n = static_cast<int32_t>(next - first);
        const float* const keys = page(first) + first % block * token_floats;
        const float* const values = keys + d.value_offset;
        const float* const ahead = next < part.end ? page(next) : keys;
        const int64_t page_floats = std::min<int64_t>(part.end - next, block) * token_floats;
        for (int32_t k = 0; k < d.kv_heads; ++k)
            for (int32_t g = 0; g < d.group; ++g) {
                const int32_t head = k * d.group + g;
                const float* const query = queries + head * dim;
                const float* const key = keys + k * dim;
                const float* const value = values + k * dim;
                float* const found = out + head * (dim + 2);
                float highest = found[dim + 1];
                const float before = highest;
                score(query, key, token_floats, n, dim, d.scale, scores);
                for (int32_t t = 0; t < n; ++t) highest = std::max(highest, scores[t]);
                fetch_share(ahead, page_floats, head, heads);
                fetch_share(ahead + d.value_offset, page_floats, head, heads);
                float weight = 0;
                for (int32_t t = 0; t < n; ++t) weight += scores[t] = std::exp(scores[t] - highest);
                const float fade = std::exp(before - highest);
                found[dim] = found[dim] * fade + weight;
                found[dim + 1] = highest;
                mix(scores, value, token_floats, n, dim, fade, found);
            }
        first = next;
    }
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void attend_avx2(const kvc_decode& d, const Part& part, float* out) {
    attend_any(d, part, out);
}
#else
constexpr auto attend_avx2 = attend_any;
#endif

void attend(VectorPath path, const kvc_decode& d, const Part& part, float* out) {
    (path == VectorPath::kPortable ? attend_any : attend_avx2)(d, part, out);
}

class Decode {
  public:
    explicit Decode(const kvc_decode& d) : d_(d), floats_(int64_t{d.kv_heads} * d.group * (d.head_dim + 2)) {
        for (int64_t row = 0; row < d.rows; ++row)
            for (int64_t begin = d.begin[row]; begin < d.end[row]; begin += kPartTokens) {
                parts_.push_back({row, begin, std::min(d.end[row], begin + kPartTokens)});
                tokens_ += parts_.back().end - begin;
            }
        found_.resize(parts_.size() * static_cast<size_t>(floats_));
    }

    // Threads live as long as the call, as those of a copy.
    void run(int32_t threads) {
        const int64_t bytes = tokens_ * d_.kv_heads * d_.head_dim * 2 * static_cast<int64_t>(sizeof(float));
        const int64_t worth = std::min(static_cast<int64_t>(parts_.size()), bytes / kThreadBytes);
        if (threads > 1 && worth > 1) threads = std::min(threads, kvc::cores());
        {
            std::vector<std::jthread> others;
            try {
                for (int64_t i = 1; i < std::min<int64_t>(threads, worth); ++i) others.emplace_back([this] { work(); });
            } catch (const std::exception&) {  // no more threads to be had: those that there are do it
            }
            work();
        }
        const float* part = found_.data();
        for (int64_t row = 0; row < d_.rows; ++row) {
            const int64_t n = (d_.end[row] - d_.begin[row] + kPartTokens - 1) / kPartTokens;
            merge(row, part, n);
            part += n * floats_;
        }
    }

  private:
    void work() noexcept {
        for (size_t i = next_++; i < parts_.size(); i = next_++)
            attend(path_, d_, parts_[i], &found_[i * static_cast<size_t>(floats_)]);
    }

    void merge(int64_t row, const float* parts, int64_t n) const {
        const int32_t dim = d_.head_dim;
        for (int32_t h = 0; h < d_.kv_heads * d_.group; ++h) {
            const float* const first = parts + h * (dim + 2);
            float* const out = d_.out + row * floats_of_row() + h * dim;
            float highest = first[dim + 1], weight = 0;
            for (int64_t i = 1; i < n; ++i) highest = std::max(highest, first[i * floats_ + dim + 1]);
            std::fill_n(out, dim, 0.0F);
            for (int64_t i = 0; i < n; ++i) {
                const float* const part = first + i * floats_;
                const float fade = std::exp(part[dim + 1] - highest);
                weight += fade * part[dim];
                for (int32_t j = 0; j < dim; ++j) out[j] += fade * part[j];
            }
            for (int32_t j = 0; j < dim; ++j) out[j] /= weight;
        }
    }

    int64_t floats_of_row() const { return int64_t{d_.kv_heads} * d_.group * d_.head_dim; }

    const kvc_decode& d_;
    int64_t floats_;  // of one part
    std::vector<Part> parts_;
    std::vector<float> found_;
    int64_t tokens_ = 0;
    VectorPath path_ = kvc::vector_path();
    std::atomic<size_t> next_ = 0;
};

int32_t check_decode(const kvc_decode* d) {
    if (!d) return fail(KVC_E_ARGUMENT, "decode is NULL");
    if (d->rows < 0) return fail(KVC_E_ARGUMENT, "rows is %lld: must not be negative", static_cast<Longs>(d->rows));
    if (d->rows == 0) return KVC_OK;
    if (!d->queries || !d->out || !d->base || !d->tables || !d->begin || !d->end)
        return fail(KVC_E_ARGUMENT, "queries, out, base, tables, begin or end is NULL");
    const int64_t heads = int64_t{d->kv_heads} * d->group;
    if (d->kv_heads < 1 || d->group < 1 || d->head_dim < 1 || d->head_dim % kLineFloats || d->block_tokens < 1 ||
        d->block_tokens > kMostTokens || heads > kMostFloats / d->block_tokens / d->head_dim)
        return fail(
            KVC_E_ARGUMENT,
            "%d KV heads with %d queries each, of dimension %d, in blocks of %d tokens: all must be above 0, the"
            " dimension a multiple of %d, blocks of at most %d tokens",
            d->kv_heads, d->group, d->head_dim, d->block_tokens, kLineFloats, kMostTokens);
    const int64_t half = int64_t{d->block_tokens} * d->kv_heads * d->head_dim;
    if (d->value_offset < half || d->value_offset > kMostFloats || d->pages < 1 || d->page_stride % 4 ||
        d->page_stride / 4 < d->value_offset + half || d->page_stride > INT64_MAX / d->pages || d->base % 4)
        return fail(
            KVC_E_ARGUMENT,
            "%lld pages from %#llx, %lld bytes apart, V %lld elements behind K: K and V take %lld elements each,"
            " and must neither overlap nor lie off a multiple of 4 bytes",
            static_cast<Longs>(d->pages), static_cast<Longs>(d->base), static_cast<Longs>(d->page_stride),
            static_cast<Longs>(d->value_offset), static_cast<Longs>(half));
    if (d->query_stride < heads * d->head_dim || d->query_stride > INT64_MAX / 4 / d->rows || d->table_stride < 1 ||
        d->table_stride > INT64_MAX / 4 / d->rows)
        return fail(KVC_E_ARGUMENT, "%lld rows of queries %lld elements apart, of tables %lld: queries take %lld",
                    static_cast<Longs>(d->rows), static_cast<Longs>(d->query_stride),
                    static_cast<Longs>(d->table_stride), static_cast<Longs>(heads * d->head_dim));
    for (int64_t row = 0; row < d->rows; ++row) {
        const int64_t begin = d->begin[row], end = d->end[row];
        if (begin < 0 || end <= begin || (end - 1) / d->block_tokens >= d->table_stride)
            return fail(KVC_E_ARGUMENT, "row %lld sees tokens %lld to %lld: at least one, in %lld blocks of %d",
                        static_cast<Longs>(row), static_cast<Longs>(begin), static_cast<Longs>(end),
                        static_cast<Longs>(d->table_stride), d->block_tokens);
        const int32_t* const table = d->tables + row * d->table_stride;
        for (int64_t i = begin / d->block_tokens; i <= (end - 1) / d->block_tokens; ++i)
            if (table[i] < 0 || table[i] >= d->pages)
                return fail(KVC_E_ARGUMENT, "row %lld, block %lld: page %d is outside 0 to %lld",
                            static_cast<Longs>(row), static_cast<Longs>(i), table[i], static_cast<Longs>(d->pages - 1));
    }
    return KVC_OK;
}

}  // namespace

extern "C" int32_t kvc_attend(const kvc_decode* decode, int32_t threads) {
    return kvc::guarded([&]() -> int32_t {
        if (threads < 1 || threads > kMostThreads)
            return fail(KVC_E_ARGUMENT, "threads is %d: from 1 to %d", threads, kMostThreads);
        if (const auto status = check_decode(decode)) return status;
        if (decode->rows) Decode(*decode).run(threads);
        return KVC_OK;
    });
}
