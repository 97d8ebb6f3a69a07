// Pools, hashing and copies, as a hostile caller uses them.
#include "fuzz_pool.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "journal_reader.h"

namespace fuzz {

namespace {

constexpr int64_t kKeys = 40;
constexpr int64_t kMostEvents = 2000;  // more than one pool sees between two calls of ours

// One pool, and the pages that its caller holds.
class PoolFuzz {
  public:
    PoolFuzz(uint64_t seed, Tally* tally)
        : random_(seed), where_{.seed = seed, .function = "kvc_pool_new"}, tally_(tally) {
        const int64_t capacity = random_.chance(30) ? random_.hostile() : random_.between(1, 40);
        starve_percent_ = random_.one_of<int64_t>({0, 5});
        bool starved = false;
        const int32_t status =
            starving(random_, starve_percent_, &starved, [&] { return kvc_pool_new(capacity, seed, &pool_); });
        check_status(where_, status, starved);
        ++(*tally_)["kvc_pool_new"][status];
        for (uint8_t& byte : digests_) byte = static_cast<uint8_t>(random_.next());
        reader_ = JournalReader(pool_, digests_, kKeys);
    }
    ~PoolFuzz() { kvc_pool_free(pool_); }
    PoolFuzz(const PoolFuzz&) = delete;
    PoolFuzz& operator=(const PoolFuzz&) = delete;

    void run(int64_t operations) {
        if (!pool_) return;
        for (where_.operation = 0; where_.operation < operations; ++where_.operation) one_operation();
        starve_percent_ = 0;
        while (!held_.empty()) release(false);
        call("kvc_pool_check", [&] { return kvc_pool_check(pool_); });
        kvc_pool_stats stats{};
        if (kvc_pool_get_stats(pool_, &stats) || stats.held) broken(where_, "pages are held that nobody holds");
    }

  private:
    bool spite() { return random_.chance(10); }

    template <typename Body>
    int32_t call(const char* function, Body&& body) {
        where_.function = function;
        bool starved = false;
        const int32_t status = starving(random_, starve_percent_, &starved, body);
        check_status(where_, status, starved);
        ++(*tally_)[function][status];
        return status;
    }

    void one_operation() {
        switch (random_.below(10)) {
            case 0:
                take();
                break;
            case 1:
                publish();
                break;
            case 2:
                acquire();
                break;
            case 3:
                release(true);
                break;
            case 4:
                present();
                break;
            case 5:
                call("kvc_pool_unpublish", [&] { return kvc_pool_unpublish(pool_, a_page()); });
                break;
            case 6: {
                kvc_pool_stats stats{};
                call("kvc_pool_get_stats", [&] { return kvc_pool_get_stats(pool_, &stats); });
                kvc_pool_version(pool_);
                break;
            }
            case 7:
                if (random_.chance(20)) start_journal();
                break;
            case 8:
                take_events();
                break;
            default:
                call("kvc_pool_check", [&] { return kvc_pool_check(pool_); });
        }
    }

    int32_t a_page() { return held_.empty() || spite() ? random_.hostile32() : random_.in(held_); }
    // A run of keys: begin and count within digests_, or a count or stride that is refused before anything is read.
    struct Run {
        const uint8_t* first;
        int64_t stride, n;
    };
    Run a_run() {
        Run run{digests_, 32, 0};
        const int64_t begin = random_.below(kKeys);
        run.first += begin * 32;
        run.stride = random_.one_of<int64_t>({32, 64});
        run.n = random_.below((kKeys - begin) * 32 / run.stride + 1);
        if (spite()) run.stride = std::min<int64_t>(random_.hostile(), 31);
        if (spite()) run.n = -1 - random_.below(INT64_MAX);
        return run;
    }

    void take() {
        int32_t pages[64];
        int64_t taken = 0;
        const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : random_.below(6);
        if (held_.size() > 100) return;
        if (call("kvc_pool_take", [&] { return kvc_pool_take(pool_, n, pages, &taken); }) == KVC_OK)
            held_.insert(held_.end(), pages, pages + taken);
    }

    void publish() {
        std::vector<int32_t> pages;
        for (int64_t i = random_.below(4); i-- > 0;) pages.push_back(a_page());
        std::vector<uint8_t> published(pages.size());
        const auto ns = static_cast<uint32_t>(random_.below(2));
        const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(pages.size());
        const uint8_t* first = digests_ + random_.below(kKeys - 4) * 32;
        call("kvc_pool_publish", [&] { return kvc_pool_publish(pool_, ns, first, pages.data(), n, published.data()); });
    }

    void acquire() {
        std::vector<int32_t> pages(kKeys);
        const Run run = a_run();
        if (held_.size() > 100) return;
        const auto ns = static_cast<uint32_t>(random_.below(2));
        const int32_t status = call("kvc_pool_acquire", [&] {
            return kvc_pool_acquire(pool_, ns, run.first, run.stride, run.n, pages.data());
        });
        if (status != KVC_OK) return;
        for (int64_t i = 0; i < run.n; ++i)
            if (pages[static_cast<size_t>(i)] != -1) held_.push_back(pages[static_cast<size_t>(i)]);
    }

    void present() {
        uint8_t present[kKeys];
        const Run run = a_run();
        call("kvc_pool_present", [&] { return kvc_pool_present(pool_, 0, run.first, run.stride, run.n, present); });
    }

    void start_journal() {
        const int64_t most = spite() ? random_.hostile() : random_.one_of<int64_t>({0, 1, 2, 5, 20, 1000});
        const int32_t status = call("kvc_pool_journal", [&] { return kvc_pool_journal(pool_, most); });
        if ((status == KVC_OK) != (most >= 0)) broken(where_, "a journal of %lld", static_cast<long long>(most));
        if (status == KVC_OK) reader_.started(where_, most);
    }

    // Now and then with too little room, and again at once.
    void take_events() {
        for (int64_t times = random_.between(1, 3); times-- > 0;) {
            const int64_t cap = spite()              ? -1 - random_.below(INT64_MAX)
                                : random_.chance(50) ? random_.below(4)
                                                     : kMostEvents;
            std::vector<kvc_pool_event> events(static_cast<size_t>(std::max<int64_t>(cap, 0)) + 1,
                                               JournalReader::marked());
            int64_t n = 0;
            const auto body = [&] { return kvc_pool_take_events(pool_, events.data(), cap, &n); };
            if (call("kvc_pool_take_events", body) == KVC_OK) reader_.took(where_, events, cap, n);
        }
        std::vector<uint32_t> spaces(4, 0);
        int64_t n = 0;
        const int64_t cap = spite() ? random_.hostile() | INT64_MIN : random_.below(4);
        call("kvc_pool_spaces", [&] { return kvc_pool_spaces(pool_, spaces.data(), cap, &n); });
        if (spaces[3]) broken(where_, "more was written than there was room for");
    }

    void release(bool hostile) {
        std::vector<int32_t> pages;
        if (held_.empty() || (hostile && spite())) {
            pages = {random_.hostile32() | 1 << 30, 0};
            if (call("kvc_pool_release", [&] { return kvc_pool_release(pool_, pages.data(), 2); }) == KVC_OK)
                broken(where_, "a page was released that does not exist");
            call("kvc_pool_release", [&] { return kvc_pool_release(pool_, pages.data(), INT64_MIN); });
            return;
        }
        const auto at = static_cast<size_t>(random_.below(static_cast<int64_t>(held_.size())));
        if (call("kvc_pool_release", [&] { return kvc_pool_release(pool_, &held_[at], 1); }) == KVC_OK)
            held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(at));
    }

    Random random_;
    Where where_;
    Tally* tally_;
    kvc_pool* pool_ = nullptr;
    int64_t starve_percent_ = 0;
    std::vector<int32_t> held_;
    uint8_t digests_[kKeys * 32];
    JournalReader reader_{pool_, digests_, kKeys};
};

}  // namespace

void fuzz_pool(uint64_t seed, int64_t operations, Tally* tally) { PoolFuzz(seed, tally).run(operations); }

void fuzz_hash(uint64_t seed, Tally* tally) {
    Random random(seed);
    Where where{.seed = seed, .function = "kvc_sha256"};
    uint8_t data[300] = {}, digest[32], digests[10 * 32];
    const auto path = random.chance(80) ? static_cast<int32_t>(random.below(3)) : random.hostile32();
    const int64_t n = random.chance(80) ? random.below(301) : -1 - random.below(INT64_MAX);
    int32_t status = kvc_sha256(path, data, n, digest);
    check_status(where, status, false);
    ++(*tally)[where.function][status];
    where.function = "kvc_hash_chain";
    int32_t tokens[60] = {};
    const int64_t blocks = random.chance(80) ? random.below(11) : -1 - random.below(INT64_MAX);
    const int64_t block_tokens = random.chance(80) ? random.between(1, 6) : std::min<int64_t>(random.hostile(), 0);
    bool starved = false;
    status = starving(random, 10, &starved,
                      [&] { return kvc_hash_chain(path, data, tokens, blocks, block_tokens, digests); });
    check_status(where, status, starved);
    ++(*tally)[where.function][status];
    if (!kvc_sha256_path()[0] || !kvc_copy_path()[0] || kvc_abi_version() < 1) broken(where, "no name, no version");
}

// Copies within two buffers whose pages lie one after another: what is refused writes nothing, and nothing lies beyond.
void fuzz_copy(uint64_t seed, Tally* tally) {
    Random random(seed);
    Where where{.seed = seed, .function = "kvc_copy"};
    constexpr int64_t kPages = 8, kStride = 96;
    std::vector<uint8_t> from(kPages * kStride, 1), to(kPages * kStride, 0);
    std::vector<kvc_segment> segments(static_cast<size_t>(random.below(3)));
    for (size_t i = 0; i < segments.size(); ++i)
        segments[i] = {reinterpret_cast<uint64_t>(from.data()) + 48 * i,
                       reinterpret_cast<uint64_t>(to.data()) + 48 * i,
                       kStride,
                       kStride,
                       random.between(1, 48),
                       kPages,
                       kPages};
    std::vector<int32_t> src, dst;
    for (int64_t i = random.below(5); i-- > 0;) {
        src.push_back(static_cast<int32_t>(random.below(kPages)));
        dst.push_back(static_cast<int32_t>(random.below(kPages)));
    }
    if (random.chance(20) && !src.empty())
        random.chance(50) ? src[0] = random.hostile32() : dst[0] = random.hostile32();
    auto n = static_cast<int64_t>(src.size()), m = static_cast<int64_t>(segments.size());
    if (random.chance(5)) n = -1 - random.below(INT64_MAX);
    if (random.chance(5)) m = -1 - random.below(INT64_MAX);
    if (random.chance(20) && !segments.empty()) {  // numbers that cannot be right: below 1, or past the end of memory
        kvc_segment& segment = segments[0];
        int64_t* const fields[] = {&segment.src_stride, &segment.dst_stride, &segment.bytes, &segment.src_pages,
                                   &segment.dst_pages};
        const int64_t which = random.below(7);
        if (which < 5) *fields[which] = which < 3 && random.chance(50) ? INT64_MAX : -random.below(INT64_MAX);
        else (which == 5 ? segment.src_base : segment.dst_base) = random.chance(50) ? 0 : UINT64_MAX - 100;
    }
    const kvc_copy_plan plan{segments.data(), src.data(), dst.data(), m, n};
    bool starved = false;
    const auto threads = random.chance(90) ? 1 : random.hostile32();
    int32_t status = starving(random, 10, &starved, [&] { return kvc_copy(&plan, threads); });
    check_status(where, status, starved);
    ++(*tally)[where.function][status];
    if (status && std::any_of(to.begin(), to.end(), [](uint8_t byte) { return byte != 0; }))
        broken(where, "status %d, but bytes were written", status);
    where.function = "kvc_copy_ranges";
    kvc_range ranges[8];
    int64_t found = 0;
    const int64_t cap = random.chance(90) ? random.below(9) : -1 - random.below(INT64_MAX);
    status = starving(random, 10, &starved, [&] { return kvc_copy_ranges(&plan, ranges, cap, &found); });
    check_status(where, status, starved);
    ++(*tally)[where.function][status];
    if (status == KVC_OK && found > m * n) broken(where, "%lld ranges", static_cast<long long>(found));
}

// Attention over two pages: what is refused writes nothing.
void fuzz_attend(uint64_t seed, Tally* tally) {
    Random random(seed);
    const Where where{.seed = seed, .function = "kvc_attend"};
    constexpr int64_t kBlock = 4, kDim = 16, kHalf = kBlock * kDim, kRows = 2;
    std::vector<float> pages(2 * 2 * kHalf, 1), queries(kRows * kDim, 1), out(kRows * kDim, 0);
    std::vector<int32_t> tables{0, 1, 1, 0};
    std::vector<int64_t> begin{random.below(4), 0}, end{random.between(5, 8), random.between(1, 8)};
    kvc_attention d{queries.data(),
                    out.data(),
                    reinterpret_cast<uint64_t>(pages.data()),
                    tables.data(),
                    begin.data(),
                    end.data(),
                    kRows,
                    kDim,
                    2,
                    8 * kHalf,
                    kHalf,
                    2,
                    1,
                    1,
                    kDim,
                    kBlock,
                    1};
    if (random.chance(20))
        tables[static_cast<size_t>(random.below(4))] = random.one_of<int32_t>({-1, 2, INT32_MAX, INT32_MIN});
    if (random.chance(20)) (random.chance(50) ? begin : end)[0] = random.one_of<int64_t>({-1, 9, INT64_MAX, INT64_MIN});
    if (random.chance(30)) {  // numbers that cannot be right
        int64_t* const wide[] = {&d.query_stride, &d.table_stride, &d.page_stride, &d.value_offset, &d.pages};
        int32_t* const narrow[] = {&d.kv_heads, &d.group, &d.head_dim, &d.block_tokens};
        const bool large = random.chance(50);
        if (random.chance(50)) *wide[random.below(5)] = large ? INT64_MAX - 3 : -random.below(INT64_MAX);
        else *narrow[random.below(4)] = large ? INT32_MAX : -static_cast<int32_t>(random.below(INT32_MAX));
    }
    if (random.chance(5)) d.rows = -random.below(INT64_MAX);
    const auto threads = random.chance(90) ? 2 : random.hostile32();
    bool starved = false;
    const int32_t status = starving(random, 10, &starved, [&] { return kvc_attend(&d, threads); });
    check_status(where, status, starved);
    ++(*tally)[where.function][status];
    const bool written = std::any_of(out.begin(), out.end(), [](float value) { return value != 0; });
    if (written != (status == KVC_OK && d.rows > 0)) broken(where, "status %d, written: %d", status, written);
}

}  // namespace fuzz
