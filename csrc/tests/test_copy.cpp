// test_copy [ROUNDS [SEED]]: random copy plans in one memory, against a copy byte by byte: what is moved, what is refused
// and that nothing is moved then, which moves a plan comes to. Every instruction path, threads, quotas of control groups.
// Exit 1 at the first difference, with the seed.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "copy_stream.h"
#include "cores.h"
#include "fuzz.h"

namespace {

using fuzz::broken;
using fuzz::Random;
using fuzz::Where;
using kvc::VectorPath;
using Bytes = std::vector<uint8_t>;
using Longs = long long;

constexpr int64_t kGuard = 300;

Bytes noise(Random& random, int64_t bytes) {
    Bytes made(static_cast<size_t>(bytes + 8));
    for (int64_t i = 0; i < bytes; i += 8) {
        const uint64_t next = random.next();
        std::memcpy(&made[static_cast<size_t>(i)], &next, sizeof next);
    }
    made.resize(static_cast<size_t>(bytes));
    return made;
}

// ---- plans ----------------------------------------------------------------------------------------------------------

// Both sides lie in one memory: sources in its first half and destinations in its second, or anywhere.
class Plan {
  public:
    Plan(Random& random, bool large) : random_(random) {
        const int64_t part =
            large ? random.one_of<int64_t>({2111, 4096, 16'000, 16'384, 65'536, 300'001}) : random.between(1, 400);
        const int64_t pages = large ? (int64_t{1} << 21) / part + 2 : random.between(1, 9);
        const bool layered = random.chance(40);  // source: a memory for each segment; destination: side by side
        n_ = random.between(1, large ? 3 : 4);
        const int64_t stride = part + (random.chance(60) ? 0 : random.one_of<int64_t>({1, 3, 64, part}));
        const int64_t slot = layered ? n_ * part + random.below(3) : stride;
        const int64_t half = std::max(n_ * stride, layered ? slot : n_ * slot) * pages + 2 * kGuard;
        memory = noise(random, 2 * half);
        const auto begin = reinterpret_cast<uint64_t>(memory.data());
        const bool anywhere = random.chance(25);
        const auto place = [&](int64_t in_half, int64_t used, int64_t which) {
            const int64_t room = 2 * half - used;
            return begin + static_cast<uint64_t>(anywhere ? random.below(room) : which * half + in_half);
        };
        const int64_t shift[2] = {random.below(130), random.below(130)};
        for (int64_t s = 0; s < n_; ++s) {
            kvc_segment segment{};
            segment.bytes = part;
            segment.src_stride = stride, segment.dst_stride = slot;
            segment.src_pages = segment.dst_pages = pages;
            segment.src_base = place(shift[0] + s * stride * pages, stride * pages, 0);
            segment.dst_base = layered && s ? segments_[0].dst_base + static_cast<uint64_t>(s * part)
                                            : place(shift[1] + (layered ? 0 : s * slot * pages), slot * pages, 1);
            segments_.push_back(segment);
        }
        if (random.chance(50)) turn();
        choose_pages(pages);
    }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    kvc_copy_plan plan() const {
        return {segments_.data(), src_.data(), dst_.data(), n_, static_cast<int64_t>(src_.size())};
    }

    // The memory afterwards, by the definition; empty: it must be refused.
    Bytes expected() const {
        Bytes after = memory, used(memory.size());
        enum : uint8_t { kRead = 1, kWritten = 2 };
        for (const auto& segment : segments_)
            for (const int32_t page : src_) {
                const int64_t at = offset(segment.src_base, segment.src_stride, page);
                std::fill_n(used.begin() + at, segment.bytes, uint8_t{kRead});
            }
        for (const auto& segment : segments_)
            for (size_t i = 0; i < dst_.size(); ++i) {
                const int64_t from = offset(segment.src_base, segment.src_stride, src_[i]);
                const int64_t to = offset(segment.dst_base, segment.dst_stride, dst_[i]);
                const auto begin = used.begin() + to;
                if (std::any_of(begin, begin + segment.bytes, [](uint8_t use) { return use != 0; })) return {};
                std::fill_n(begin, segment.bytes, uint8_t{kWritten});
                std::copy_n(memory.begin() + from, segment.bytes, after.begin() + to);
            }
        return after;
    }

    // How many moves, when neighbours that rise or fall together are one.
    int64_t expected_ranges() const {
        int64_t count = 0;
        for (const auto& segment : segments_) {
            const bool packed = segment.src_stride == segment.bytes && segment.dst_stride == segment.bytes;
            int64_t step = 0;  // of the run so far; 0: none
            for (size_t i = 0; i < src_.size(); ++i) {
                const int64_t down = i ? int64_t{src_[i]} - src_[i - 1] : 0,
                              across = i ? int64_t{dst_[i]} - dst_[i - 1] : 0;
                const bool joins =
                    packed && i && (down == 1 || down == -1) && down == across && (step == 0 || step == down);
                count += !joins;
                step = joins ? down : 0;
            }
        }
        return count;
    }

    Bytes memory;

  private:
    int64_t offset(uint64_t base, int64_t stride, int32_t page) const {
        return static_cast<int64_t>(base - reinterpret_cast<uint64_t>(memory.data())) + stride * page;
    }

    void turn() {  // a scatter of what would be a gather
        for (auto& segment : segments_) {
            std::swap(segment.src_base, segment.dst_base);
            std::swap(segment.src_stride, segment.dst_stride);
        }
    }

    // Runs up, runs down and single pages.
    void choose_pages(int64_t pages) {
        std::vector<int32_t> free;
        for (int32_t page = 0; page < pages; ++page) free.push_back(page);
        while (!free.empty() && random_.chance(96)) {
            const int64_t at = random_.below(static_cast<int64_t>(free.size()));
            const int64_t most = random_.one_of<int64_t>({1, 2, 5, 100}),
                          n = std::min<int64_t>(most, static_cast<int64_t>(free.size()) - at);
            std::vector<int32_t> piece(free.begin() + at, free.begin() + at + n);
            free.erase(free.begin() + at, free.begin() + at + n);
            if (random_.chance(40)) std::reverse(piece.begin(), piece.end());
            const int64_t from = random_.below(pages), step = random_.one_of<int64_t>({1, 1, -1, -1, 0, 3});
            for (int64_t i = 0; i < n; ++i) {
                src_.push_back(static_cast<int32_t>(((from + step * i) % pages + pages) % pages));
                dst_.push_back(piece[static_cast<size_t>(i)]);
            }
        }
        if (random_.chance(3) && !dst_.empty()) src_.push_back(0), dst_.push_back(random_.in(dst_));
    }

    Random& random_;
    int64_t n_ = 0;
    std::vector<kvc_segment> segments_;
    std::vector<int32_t> src_, dst_;
};

struct Count {
    int64_t moved = 0, refused = 0, merged = 0;
};

void try_plan(uint64_t seed, bool large, Count* count) {
    Random random(seed);
    const Where where{.seed = seed, .function = large ? "kvc_copy, large" : "kvc_copy"};
    Plan made(random, large);
    const kvc_copy_plan plan = made.plan();
    const Bytes before = made.memory, expected = made.expected();
    std::vector<kvc_range> ranges(static_cast<size_t>(plan.n_segments * plan.n_pairs));
    int64_t n = -1;
    const auto room = static_cast<int64_t>(ranges.size());
    const int32_t listed = kvc_copy_ranges(&plan, ranges.data(), room, &n);
    const int32_t copied = kvc_copy(&plan, static_cast<int32_t>(random.between(1, 4)));
    if (listed != copied) broken(where, "moves: status %d, copy: status %d", listed, copied);
    if (expected.empty()) {
        if (copied != KVC_E_ARGUMENT) broken(where, "status %d, but bytes are used twice", copied);
        if (made.memory != before) broken(where, "refused, but bytes were moved");
        ++count->refused;
        return;
    }
    if (copied != KVC_OK) broken(where, "refused: %s", kvc_last_error());
    if (made.memory != expected) broken(where, "other bytes than a copy byte by byte");
    if (n != made.expected_ranges())
        broken(where, "%lld moves, not %lld", static_cast<Longs>(n), static_cast<Longs>(made.expected_ranges()));
    count->moved += n > 0;
    count->merged += n < room;
    made.memory = before;
    for (int64_t i = 0; i < n; ++i) {
        const kvc_range& range = ranges[static_cast<size_t>(i)];
        std::memcpy(reinterpret_cast<void*>(range.dst), reinterpret_cast<const void*>(range.src),
                    static_cast<size_t>(range.bytes));
    }
    if (made.memory != expected) broken(where, "the moves come to other bytes");
    const int64_t cap = random.below(n + 1);
    std::vector<kvc_range> few(static_cast<size_t>(cap));  // what is written past its end, AddressSanitizer sees
    int64_t again = -1;
    if (kvc_copy_ranges(&plan, few.data(), cap, &again) != KVC_OK || again != n ||
        (cap && std::memcmp(few.data(), ranges.data(), few.size() * sizeof few[0]) != 0))
        broken(where, "%lld of %lld moves are others", static_cast<Longs>(cap), static_cast<Longs>(n));
}

// ---- what moves the bytes -------------------------------------------------------------------------------------------

// Ranges of any length at any place, none or several chunks of them: each path moves what memcpy does, and nothing beside.
void try_stream(uint64_t seed, VectorPath path) {
    Random random(seed);
    const Where where{.seed = seed,
                      .function = path == VectorPath::kAvx512 ? "avx512"
                                  : path == VectorPath::kAvx2 ? "avx2"
                                                              : "memcpy"};
    const int64_t n = random.below(14), most = random.one_of<int64_t>({90, 1100, 4200, 20'000});
    Bytes from = noise(random, n * (most + 2 * kGuard) + kGuard), to(from.size(), 7), expected = to;
    {
        kvc::CopyStream stream(path);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t room = i * (most + 2 * kGuard), bytes = random.below(most + 1);
            const auto source = static_cast<size_t>(room + random.below(kGuard)),
                       target = static_cast<size_t>(room + random.below(kGuard));
            std::memcpy(&expected[target], &from[source], static_cast<size_t>(bytes));
            stream.move(&to[target], &from[source], static_cast<uint64_t>(bytes));
            if (random.chance(10)) stream.finish();
        }
    }
    if (to != expected) broken(where, "other bytes than memcpy moves");
}

// ---- cores ----------------------------------------------------------------------------------------------------------

class Root {
  public:
    Root() {
        char name[] = "/tmp/test_copy_XXXXXX";
        if (!mkdtemp(name)) std::abort();
        path = name;
    }
    ~Root() { std::filesystem::remove_all(path); }
    Root(const Root&) = delete;
    Root& operator=(const Root&) = delete;
    void write(const std::string& file, const std::string& text) const {
        std::filesystem::create_directories(std::filesystem::path(path + file).parent_path());
        std::ofstream(path + file) << text;
    }
    std::string path;
};

void quotas() {
    const Where where{.function = "quota_cores"};
    const auto expect = [&](const Root& root, int32_t cpus, const char* what) {
        const int32_t found = kvc::quota_cores(root.path);
        if (found != cpus) broken(where, "%s: %d CPUs, not %d", what, found, cpus);
    };
    {
        const Root root;
        expect(root, INT32_MAX, "no control groups");
        root.write("/proc/self/cgroup", "0::/a/b\n");
        expect(root, INT32_MAX, "a group without files");
        root.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        expect(root, INT32_MAX, "no limit");
        root.write("/sys/fs/cgroup/a/cpu.max", "250000 100000\n");
        expect(root, 3, "two and a half, of the group above");
        root.write("/sys/fs/cgroup/a/b/cpu.max", "20000 100000\n");
        expect(root, 1, "a fifth");
        root.write("/sys/fs/cgroup/a/b/cpu.max", "200000 100000\n");
        expect(root, 2, "exactly two");
        root.write("/sys/fs/cgroup/a/b/cpu.max", "nonsense\n");
        expect(root, 3, "what cannot be read sets no limit");
        root.write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
        expect(root, 1, "the root of the view");
    }
    {
        const Root root;
        root.write("/proc/self/cgroup", "7:memory:/m\n4:cpuset:/s\n3:cpu,cpuacct:/a\n");
        root.write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
        root.write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
        expect(root, INT32_MAX, "version 1, no limit");
        root.write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000\n");
        expect(root, 2, "version 1, one and a half");
    }
    if (kvc_cores() < 1) broken(where, "no CPU");
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 1000;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    Count count;
    for (uint64_t seed = first; seed < first + static_cast<uint64_t>(rounds); ++seed) {
        try_plan(seed, false, &count);
        if (seed % 20 == 0) try_plan(seed, true, &count);
        for (int path = 0; path <= static_cast<int>(kvc::vector_path()); ++path)
            try_stream(seed, static_cast<VectorPath>(path));
    }
    quotas();
    if (rounds >= 400 && (count.moved * 4 < rounds || count.refused * 20 < rounds || count.merged * 10 < rounds))
        broken({}, "of %lld plans %lld moved, %lld merged, %lld refused: too few to mean anything",
               static_cast<Longs>(rounds), static_cast<Longs>(count.moved), static_cast<Longs>(count.merged),
               static_cast<Longs>(count.refused));
    std::printf("%lld plans: %lld moved, %lld merged, %lld refused\n", static_cast<Longs>(rounds),
                static_cast<Longs>(count.moved), static_cast<Longs>(count.merged), static_cast<Longs>(count.refused));
    return 0;
}
