// Attention of decoding requests over K and V where they lie in pages: nothing is gathered first.
//
//     row r        a query for each head, and the tokens `begin` to `end` of its block table
//     a split      512 tokens of a row at most, one thread's: weighted values of each head, their weight, the highest score
//     merge        the splits of a row, first to last (arXiv 1805.02867, section 3)
//
// Where a row is split depends on the row alone: neither its neighbours nor the number of threads changes a bit.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "kvcache_core.h"
#include "vector_path.h"
#include "workers.h"

namespace {

using kvc::fail;
using kvc::VectorPath;
using Longs = long long;

constexpr int64_t kSplitTokens = 512;
constexpr int64_t kLineFloats = 16;
constexpr int64_t kMostFloats = int64_t{1} << 30;   // of a page: K and V, or of all heads' queries
constexpr int64_t kThreadBytes = int64_t{1} << 20;  // a start costs 11 us (docs/copy.md), a MiB takes some 150

struct Split {
    int64_t row, begin, end;  // tokens
};

// Scores of tokens that lie `token_floats` apart, four at a time: independent sums hide the latency of an addition.
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

// sum = rescale * sum + weights * values
[[gnu::always_inline]] inline void add(const float* weights, const float* value, int64_t token_floats, int32_t n,
                                       int32_t dim, float rescale, float* sum) {
#pragma omp simd
    for (int32_t i = 0; i < dim; ++i) sum[i] *= rescale;
    int32_t t = 0;
    for (; t + 4 <= n; t += 4) {
        const float *const a = value + t * token_floats, *const b = a + token_floats, *const c = b + token_floats,
                           *const d = c + token_floats;
        const float wa = weights[t], wb = weights[t + 1], wc = weights[t + 2], wd = weights[t + 3];
#pragma omp simd
        for (int32_t i = 0; i < dim; ++i) sum[i] += (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
    }
    for (; t < n; ++t) {
#pragma omp simd
        for (int32_t i = 0; i < dim; ++i) sum[i] += weights[t] * value[t * token_floats + i];
    }
}

// Asks for one of `n` shares of what is read next, so that memory and arithmetic are at work together.
[[gnu::always_inline]] inline void fetch_share(const float* next, int64_t floats, int64_t i, int64_t n) {
    for (int64_t at = floats * i / n; at < floats * (i + 1) / n; at += kLineFloats) __builtin_prefetch(next + at);
}

// out [heads, dim + 2]: values weighted by exp(score - highest), the sum of the weights, the highest score.
[[gnu::always_inline]] inline void attend_any(const kvc_attention& d, const Split& split, float* out) {
    const int32_t dim = d.head_dim;
    const int64_t heads = int64_t{d.kv_heads} * d.group, block = d.block_tokens;
    const int64_t token_floats = int64_t{d.kv_heads} * dim;
    const float* const queries = d.queries + split.row * d.query_stride;
    const int32_t* const table = d.tables + split.row * d.table_stride;
    const auto page = [&](int64_t token) {
        return std::bit_cast<const float*>(d.base + static_cast<uint64_t>(d.page_stride) *
                                                        static_cast<uint64_t>(table[token / block]));
    };
    for (int64_t head = 0; head < heads; ++head) {
        std::fill_n(out + head * (dim + 2), dim + 1, 0.0F);
        // Not infinity: of scores that all are -inf, none would be left a number.
        out[head * (dim + 2) + dim + 1] = std::numeric_limits<float>::lowest();
    }
    float scores[kSplitTokens];
    for (int64_t first = split.begin; first < split.end;) {
        const int64_t next = std::min(split.end, (first / block + 1) * block);
        const auto n = static_cast<int32_t>(next - first);
        const float* const keys = page(first) + first % block * token_floats;
        const float* const values = keys + d.value_offset;
        const float* const ahead = next < split.end ? page(next) : keys;
        const int64_t page_floats = std::min(split.end - next, block) * token_floats;
        for (int64_t k = 0; k < d.kv_heads; ++k)
            for (int64_t g = 0; g < d.group; ++g) {
                const int64_t head = k * d.group + g;
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
                const float rescale = std::exp(before - highest);
                found[dim] = found[dim] * rescale + weight;
                found[dim + 1] = highest;
                add(scores, value, token_floats, n, dim, rescale, found);
            }
        first = next;
    }
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void attend_avx2(const kvc_attention& d, const Split& split, float* out) {
    attend_any(d, split, out);
}
#else
constexpr auto attend_avx2 = attend_any;
#endif

void attend(VectorPath path, const kvc_attention& d, const Split& split, float* out) {
    (path == VectorPath::kPortable ? attend_any : attend_avx2)(d, split, out);
}

class Attention {
  public:
    explicit Attention(const kvc_attention& d) : d_(d), floats_(int64_t{d.kv_heads} * d.group * (d.head_dim + 2)) {
        for (int64_t row = 0; row < d.rows; ++row)
            for (int64_t begin = d.begin[row]; begin < d.end[row]; begin += kSplitTokens) {
                splits_.push_back({row, begin, std::min(d.end[row], begin + kSplitTokens)});
                tokens_ += splits_.back().end - begin;
            }
        found_.resize(splits_.size() * static_cast<size_t>(floats_));
    }

    void run(int32_t threads) {
        const int64_t bytes = tokens_ * d_.kv_heads * d_.head_dim * 2 * static_cast<int64_t>(sizeof(float));
        const int64_t worth = std::min(static_cast<int64_t>(splits_.size()), bytes / kThreadBytes);
        kvc::work_together(kvc::threads_for(worth, threads), [this] { work(); });
        const float* found = found_.data();
        for (int64_t row = 0; row < d_.rows; ++row) {
            const int64_t n = (d_.end[row] - d_.begin[row] + kSplitTokens - 1) / kSplitTokens;
            merge(row, found, n);
            found += n * floats_;
        }
    }

  private:
    void work() noexcept {
        for (size_t i = next_++; i < splits_.size(); i = next_++)
            attend(path_, d_, splits_[i], &found_[i * static_cast<size_t>(floats_)]);
    }

    void merge(int64_t row, const float* splits, int64_t n) const {
        const int32_t dim = d_.head_dim;
        const int64_t heads = int64_t{d_.kv_heads} * d_.group;
        for (int64_t h = 0; h < heads; ++h) {
            const float* const first = splits + h * (dim + 2);
            float* const out = d_.out + (row * heads + h) * dim;
            float highest = first[dim + 1], weight = 0;
            for (int64_t i = 1; i < n; ++i) highest = std::max(highest, first[i * floats_ + dim + 1]);
            std::fill_n(out, dim, 0.0F);
            for (int64_t i = 0; i < n; ++i) {
                const float* const split = first + i * floats_;
                const float rescale = std::exp(split[dim + 1] - highest);
                weight += rescale * split[dim];
                for (int32_t j = 0; j < dim; ++j) out[j] += rescale * split[j];
            }
            for (int32_t j = 0; j < dim; ++j) out[j] /= weight;
        }
    }

    const kvc_attention& d_;
    int64_t floats_;  // of one split
    std::vector<Split> splits_;
    std::vector<float> found_;
    int64_t tokens_ = 0;
    VectorPath path_ = kvc::vector_path();
    std::atomic<size_t> next_ = 0;
};

int32_t check_attention(const kvc_attention* d) {
    if (!d) return fail(KVC_E_ARGUMENT, "attention is NULL");
    if (d->rows < 0) return fail(KVC_E_ARGUMENT, "rows is %lld: must not be negative", static_cast<Longs>(d->rows));
    if (d->rows == 0) return KVC_OK;
    if (!d->queries || !d->out || !d->base || !d->tables || !d->begin || !d->end)
        return fail(KVC_E_ARGUMENT, "queries, out, base, tables, begin or end is NULL");
    const int64_t heads = int64_t{d->kv_heads} * d->group;
    if (d->kv_heads < 1 || d->group < 1 || d->head_dim < 1 || d->block_tokens < 1 || heads > kMostFloats ||
        heads * (int64_t{d->head_dim} + 2) > kMostFloats ||
        int64_t{d->block_tokens} * d->kv_heads > kMostFloats / d->head_dim)
        return fail(
            KVC_E_ARGUMENT,
            "%d KV heads with %d queries each, of dimension %d, in blocks of %d tokens: all must be above 0, and"
            " K of a block, or a row's queries, at most %lld elements",
            d->kv_heads, d->group, d->head_dim, d->block_tokens, static_cast<Longs>(kMostFloats));
    const int64_t half = int64_t{d->block_tokens} * d->kv_heads * d->head_dim;
    uint64_t last = 0;
    if (d->pages < 1 || d->base % 4 || d->page_stride % 4 || d->value_offset < half ||
        d->value_offset > 2 * kMostFloats || d->page_stride / 4 < d->value_offset + half ||
        __builtin_mul_overflow(static_cast<uint64_t>(d->page_stride), static_cast<uint64_t>(d->pages), &last) ||
        __builtin_add_overflow(last, d->base, &last))
        return fail(
            KVC_E_ARGUMENT,
            "%lld pages from %#llx, %lld bytes apart, V %lld elements behind K: K and V take %lld elements each,"
            " one after the other within the bytes of a page, in whole floats, in memory that does not pass its"
            " end",
            static_cast<Longs>(d->pages), static_cast<Longs>(d->base), static_cast<Longs>(d->page_stride),
            static_cast<Longs>(d->value_offset), static_cast<Longs>(half));
    if (d->query_stride < heads * d->head_dim || d->query_stride > INT64_MAX / 4 / d->rows || d->table_stride < 1 ||
        d->table_stride > INT64_MAX / 4 / d->rows)
        return fail(KVC_E_ARGUMENT,
                    "%lld rows: their queries are %lld elements apart and take %lld, their tables of %lld blocks must"
                    " have at least one",
                    static_cast<Longs>(d->rows), static_cast<Longs>(d->query_stride),
                    static_cast<Longs>(heads * d->head_dim), static_cast<Longs>(d->table_stride));
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

extern "C" int32_t kvc_attend(const kvc_attention* attention, int32_t threads) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = kvc::check_threads(threads)) return status;
        if (const auto status = check_attention(attention)) return status;
        if (attention->rows) Attention(*attention).run(threads);
        return KVC_OK;
    });
}
