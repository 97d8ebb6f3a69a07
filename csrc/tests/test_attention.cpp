// test_attention [ROUNDS [SEED]]: attention over pages of random shapes against the definition in double precision; the same
// bits by any number of threads and whatever the other rows are. Exit 1 at the first difference, with the seed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "fuzz.h"

namespace {

using fuzz::broken;
using fuzz::Random;
using fuzz::Where;
using Floats = std::vector<float>;

Floats noise(Random& random, int64_t n, double most) {
    Floats made(static_cast<size_t>(n));
    for (float& value : made)
        value = static_cast<float>(most * (static_cast<double>(random.below(2'000'001)) / 1e6 - 1));
    return made;
}

struct Case {
    explicit Case(Random& random) {
        kv_heads = static_cast<int32_t>(random.between(1, 3)), group = static_cast<int32_t>(random.between(1, 4));
        dim = static_cast<int32_t>(random.chance(50) ? 16 * random.between(1, 5) : random.between(1, 40));
        block = random.one_of<int32_t>({1, 3, 4, 16, 50});
        const bool large = random.chance(15);  // more than threads are started for
        if (large) kv_heads = 3, dim = 96;
        blocks = random.between(1, large ? 3000 / block + 1 : 9);
        rows = random.between(large ? 3 : 1, 5);
        half = int64_t{block} * kv_heads * dim;
        value_offset = half + random.below(3);
        stride = value_offset + half + random.below(3);
        pages = random.between(1, blocks + 3);
        memory = noise(random, (pages - 1) * stride + value_offset + half, 1);  // AddressSanitizer sees its end
        query_stride = heads() * dim + random.below(3);
        queries = noise(random, (rows - 1) * query_stride + heads() * dim, random.one_of<double>({0.1, 3, 60}));
        for (int64_t i = 0; i < rows * blocks; ++i) tables.push_back(static_cast<int32_t>(random.below(pages)));
        for (int64_t row = 0; row < rows; ++row) {
            end.push_back(random.between(1, blocks * block));
            begin.push_back(random.chance(50) ? 0 : random.below(end.back()));
        }
    }

    int64_t heads() const { return int64_t{kv_heads} * group; }
    size_t row_floats() const { return static_cast<size_t>(heads() * dim); }

    // Rows `first` to `last`.
    Floats attend(const Where& where, int64_t first, int64_t last, int32_t threads) const {
        Floats out(static_cast<size_t>(last - first) * row_floats());
        const kvc_attention attention{&queries[static_cast<size_t>(first * query_stride)],
                                      out.data(),
                                      reinterpret_cast<uint64_t>(memory.data()),
                                      &tables[static_cast<size_t>(first * blocks)],
                                      &begin[static_cast<size_t>(first)],
                                      &end[static_cast<size_t>(first)],
                                      last - first,
                                      query_stride,
                                      blocks,
                                      4 * stride,
                                      value_offset,
                                      pages,
                                      kv_heads,
                                      group,
                                      dim,
                                      block,
                                      kScale};
        if (kvc_attend(&attention, threads) != KVC_OK) broken(where, "refused: %s", kvc_last_error());
        return out;
    }

    // The definition.
    double expected(int64_t row, int64_t head, int64_t at) const {
        const float* const query = &queries[static_cast<size_t>(row * query_stride + head * dim)];
        std::vector<double> scores;
        const auto place = [&](int64_t token) {
            const int64_t page = tables[static_cast<size_t>(row * blocks + token / block)];
            return &memory[static_cast<size_t>(page * stride + (token % block * kv_heads + head / group) * dim)];
        };
        const auto r = static_cast<size_t>(row);
        for (int64_t token = begin[r]; token < end[r]; ++token) {
            double sum = 0;
            for (int32_t i = 0; i < dim; ++i) sum += double{query[i]} * place(token)[i];
            scores.push_back(sum * double{kScale});
        }
        const double highest = *std::max_element(scores.begin(), scores.end());
        double weight = 0, value = 0;
        for (int64_t token = begin[r]; token < end[r]; ++token) {
            const double share = std::exp(scores[static_cast<size_t>(token - begin[r])] - highest);
            weight += share, value += share * double{place(token)[value_offset + at]};
        }
        return value / weight;
    }

    static constexpr float kScale = 0.2F;
    int32_t kv_heads, group, dim, block;
    int64_t blocks, rows, half, value_offset, stride, pages, query_stride;
    Floats memory, queries;
    std::vector<int32_t> tables;
    std::vector<int64_t> begin, end;
};

int64_t try_case(uint64_t seed) {
    Random random(seed);
    const Where where{.seed = seed, .function = "kvc_attend"};
    const Case made(random);
    const Floats found = made.attend(where, 0, made.rows, 1);
    for (int64_t row = 0; row < made.rows; ++row)
        for (int64_t head = 0; head < made.heads(); ++head) {
            const int64_t at = random.below(made.dim);
            const auto i = static_cast<size_t>((row * made.heads() + head) * made.dim + at);
            const double wanted = made.expected(row, head, at);
            if (!(std::abs(double{found[i]} - wanted) < 2e-4))
                broken(where, "row %d, head %d, %d: %.7f, not %.7f", static_cast<int>(row), static_cast<int>(head),
                       static_cast<int>(at), double{found[i]}, wanted);
        }
    if (made.attend(where, 0, made.rows, 3) != found) broken(where, "other bits by three threads");
    const int64_t row = random.below(made.rows);
    const Floats alone = made.attend(where, row, row + 1, 1);
    if (!std::equal(alone.begin(), alone.end(), found.begin() + row * static_cast<int64_t>(made.row_floats())))
        broken(where, "other bits for row %d alone", static_cast<int>(row));
    return *std::max_element(made.end.begin(), made.end.end());
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 400;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    int64_t longest = 0;
    for (uint64_t seed = first; seed < first + static_cast<uint64_t>(rounds); ++seed)
        longest = std::max(longest, try_case(seed));
    if (rounds >= 100 && longest < 1024) broken({}, "no context of several parts");
    std::printf("%lld shapes, up to %lld tokens\n", static_cast<long long>(rounds), static_cast<long long>(longest));
    return 0;
}
