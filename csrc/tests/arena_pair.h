// The arena and the naive one side by side, and everything that can be compared between them.
#pragma once

#include <cstring>

#include "arena_model.h"

namespace model {

using kvc::Arena;
using kvc::Digest;
using kvc::Page;

constexpr int kNumbers = 400;  // keys: few, so that the same one comes again
constexpr int kPerUnit = 4;

// Key number = unit * 4 + (blocks that follow in the unit), which is XORed into the end of the unit's digest.
inline Digest digest_of(int number) {
    Digest digest{};
    const int unit = number / kPerUnit;
    std::memcpy(digest.bytes, &unit, sizeof unit);
    digest.bytes[28] = static_cast<uint8_t>(0xf0 ^ (number % kPerUnit));
    return digest;
}

inline int number_of(const Digest& digest) {
    int unit;
    std::memcpy(&unit, digest.bytes, sizeof unit);
    return unit * kPerUnit + (digest.bytes[28] ^ 0xf0);
}

struct Recorder : kvc::KeyListener {
    std::vector<Event> events;
    void stored(int32_t group, int32_t page) override { add({true, group, page, 0}); }
    void removed(int32_t group, const Digest& digest, uint32_t ns) override {
        add({false, group, number_of(digest), ns});
    }
    void add(Event event) { events.push_back(event); }
};

class Pair {
  public:
    Pair(int slabs, const std::vector<int>& k, const std::vector<int>& class_of_group, bool movable, uint64_t seed)
        : model_(slabs, k, class_of_group, movable),
          arena_(slabs, {k.begin(), k.end()}, {class_of_group.begin(), class_of_group.end()}, movable, seed,
                 &recorder_) {}

  protected:
    // Keys first, first + 1, ... as a run of digests that do not touch each other in memory.
    void compare_run(int g, uint32_t ns, int first, int count, int begin, bool allow_pending) {
        const int64_t stride = allow_pending ? 32 : 45;
        std::vector<uint8_t> digests(static_cast<size_t>(count * stride));
        for (int i = 0; i < count; ++i)
            std::memcpy(&digests[static_cast<size_t>(i * stride)], digest_of(first + i).bytes, 32);
        const kvc::DigestRun run{digests.data(), stride, count};
        int length = 0;
        std::vector<uint8_t> present(static_cast<size_t>(count));
        arena_.present(g, run, ns, present.data());
        bool running = true;
        for (int i = 0; i < count; ++i) {
            const int number = first + i;
            const int id = model_.find(g, number, ns);
            if (arena_.find(g, run.at(i), ns) != id) fail("key %d is not on page %d", number, id);
            const int key = id == kNone ? Page::kNone : model_.cell(g, id).key;
            if (present[static_cast<size_t>(i)] != (key == Page::kVisible)) fail("present is wrong for key %d", number);
            if (i < begin) continue;
            running &= key == Page::kVisible || (key == Page::kPending && allow_pending);
            length += running;
            const bool evicted = arena_.was_evicted(g, run.at(i), ns);
            if (evicted && !model_.ghosts.contains({g, ns, number})) fail("key %d was never evicted", number);
            remembered_ += evicted;
            forgotten_ += !evicted && model_.ghosts.contains({g, ns, number});
        }
        if (arena_.run_length(g, run, ns, begin, allow_pending) != length) fail("run_length is not %d", length);
    }
    void compare_counts() {
        if (recorder_.events != model_.events) fail("the events differ");
        if (!model_.events.empty() && arena_.version() == version_) fail("a key changed, the version did not");
        version_ = arena_.version();
        recorder_.events.clear();
        model_.events.clear();
        for (int c = 0; c < model_.classes(); ++c) {
            const int64_t cached = model_.cached(c), used = std::ssize(model_.pages[c]), owned = model_.owned(c);
            if (arena_.owned_slabs(c) != owned || arena_.cached_pages(c) != cached ||
                arena_.held_pages(c) != used - cached || arena_.free_pages(c) != owned * model_.k[c] - used ||
                arena_.pinned_slabs(c) != model_.pinned(c))
                fail("the counts of class %d differ", c);
        }
        if (arena_.quota() != model_.quota() || arena_.moved_pages() != model_.moved ||
            arena_.reclaimed_slabs() != model_.reclaimed || arena_.created_slabs() != std::ssize(model_.owner) ||
            arena_.empty_slabs() + arena_.slabs() - arena_.created_slabs() != model_.empty())
            fail("the counts of slabs differ");
    }
    void compare_pages() {
        if (const char* broken = arena_.check()) fail("check: %s", broken);
        Counts keys(model_.class_of.size()), held(model_.class_of.size());
        std::map<uint32_t, int64_t> of_namespace{{0, 0}, {1000003, 0}, {2000006, 0}, {7, 0}};
        int64_t pending = 0;
        for (int g = 0; g < std::ssize(model_.class_of); ++g) {
            const int c = model_.class_of[g];
            for (int id = 0; id < std::ssize(model_.owner) * model_.k[c]; ++id) {
                if (arena_.contains(g, id) != (model_.owner[id / model_.k[c]] == c))
                    fail("slab of page %d has another owner", id);
                if (!arena_.contains(g, id)) continue;
                const auto found = model_.pages[c].find(id);
                compare_page(id, arena_.page(g, id), found == model_.pages[c].end() ? Cell{} : found->second);
            }
            for (const auto& [id, x] : model_.pages[c])
                if (x.group == g)
                    keys[g] += x.key > 0, held[g] += x.refs > 0, pending += x.key == Page::kPending,
                        of_namespace[x.ns] += x.key > 0;
            if (arena_.keyed(g) != keys[g] || arena_.held_of(g) != held[g] ||
                arena_.evictions(g) != model_.evicted_of[g])
                fail("the counts of group %d differ", g);
        }
        if (arena_.pending() != pending) fail("pending is not %lld", static_cast<long long>(pending));
        for (const auto& [ns, n] : of_namespace)
            if (arena_.keyed_in(ns) != n) fail("namespace %u has not %lld keys", ns, static_cast<long long>(n));
    }
    static void compare_page(int id, const Page& page, const Cell& x) {
        bool same = page.refs == x.refs && page.pins == static_cast<uint64_t>(x.pins) &&
                    page.key == static_cast<uint64_t>(x.key) && page.list == static_cast<uint64_t>(x.list) &&
                    page.rest == static_cast<uint64_t>(x.rest);
        if (x.key)
            same &= number_of(page.digest) == x.number && page.ns == x.ns &&
                    page.group == static_cast<uint64_t>(x.group) && page.hits == static_cast<uint64_t>(x.hits) &&
                    page.kept == x.kept && page.end == static_cast<uint64_t>(x.end);
        if (x.list) same &= page.age == x.age;
        if (!same) fail("page %d differs from the model", id);
    }

    Recorder recorder_;
    Model model_;
    Arena arena_;
    uint64_t version_ = 0;
    int remembered_ = 0, forgotten_ = 0;  // evicted keys, as looked up
};

}  // namespace model
