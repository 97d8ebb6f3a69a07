// The keys of `arena.h`: the index of each group, what becomes visible, what goes.
#include <algorithm>
#include <cassert>
#include <chrono>

#include "arena.h"

namespace kvc {

int32_t Arena::find(int32_t group, const Digest& digest, uint32_t ns) const {
    const Group& g = group_of(group);
    return g.index.find(of(g.size_class).pages.data(), digest, ns, g.index.hash(digest, ns));
}

int64_t Arena::run_length(int32_t group, const DigestRun& run, uint32_t ns, int64_t begin, bool allow_pending) const {
    const Group& g = group_of(group);
    return g.index.run_length(of(g.size_class).pages.data(), run, ns, begin, allow_pending);
}

void Arena::find_run(int32_t group, const DigestRun& run, uint32_t ns, int32_t* ids) const {
    const KeyIndex& index = group_of(group).index;
    const Page* pages = of(class_of(group)).pages.data();
    uint64_t hashes[kInFlight];
    constexpr int64_t batch = kInFlight;
    for (int64_t base = 0; base < run.count; base += batch) {
        const int64_t n = std::min(batch, run.count - base);
        for (int64_t i = 0; i < n; ++i) index.prefetch(hashes[i] = index.hash(run.at(base + i), ns));
        for (int64_t i = 0; i < n; ++i) index.prefetch(pages, hashes[i]);
        for (int64_t i = 0; i < n; ++i) {
            const int32_t id = index.find(pages, run.at(base + i), ns, hashes[i]);
            ids[base + i] = id != kNoPage && pages[id].key == Page::kVisible ? id : kNoPage;
        }
    }
}

void Arena::follow(int32_t group, const DigestRun& run, uint32_t ns, uint64_t version,
                   std::vector<int32_t>* ids) const {
    const SizeClass& c = of(class_of(group));
    const KeyIndex& index = group_of(group).index;
    const Page* pages = c.pages.data();
    std::vector<int32_t>& known = *ids;
    for (size_t i = 0; version != version_ && i < known.size(); ++i) {
        if (c.left[region_of(known[i])] <= version) continue;
        const Digest digest = run.at(static_cast<int64_t>(i));
        const Page& page = pages[known[i]];
        if (page.key == Page::kVisible && static_cast<int32_t>(page.group) == group && page.ns == ns &&
            page.digest == digest)
            continue;
        known[i] = index.find(pages, digest, ns, index.hash(digest, ns));  // it may have changed its page
        if (known[i] == kNoPage || pages[known[i]].key != Page::kVisible) known.resize(i);
    }
    int32_t more[kInFlight];
    constexpr int64_t batch = kInFlight;
    while (static_cast<int64_t>(known.size()) < run.count) {
        DigestRun next = run;
        next.first += static_cast<int64_t>(known.size()) * run.stride_bytes;
        next.count = std::min(batch, run.count - static_cast<int64_t>(known.size()));
        find_run(group, next, ns, more);
        const auto found = std::find(more, more + next.count, kNoPage) - more;
        known.insert(known.end(), more, more + found);
        if (found < next.count) return;
    }
}

int64_t Arena::last_known(int32_t group, const DigestRun& run, uint32_t ns, int64_t begin, uint64_t since) const {
    const KeyIndex& index = group_of(group).index;
    const Page* pages = of(class_of(group)).pages.data();
    uint64_t hashes[kInFlight];
    constexpr int64_t batch = kInFlight;
    for (int64_t end = run.count; end > begin; end -= batch) {
        const int64_t n = std::min(batch, end - begin);
        for (int64_t i = 0; i < n; ++i) {
            hashes[i] = index.hash(run.at(end - 1 - i), ns);
            index.prefetch(hashes[i]);
            ghosts_.prefetch(hashes[i]);
        }
        for (int64_t i = 0; i < n; ++i) {
            if (const uint64_t episode = ghosts_.find(hashes[i]); episode && episode >= since) return end - i;
            const int32_t id = index.find(pages, run.at(end - 1 - i), ns, hashes[i]);
            if (id != kNoPage && pages[id].key == Page::kVisible) return end - i;
        }
    }
    return begin;
}

void Arena::present(int32_t group, const DigestRun& run, uint32_t ns, uint8_t* out) const {
    for (int64_t begin = 0; begin < run.count;) {
        const int64_t length = run_length(group, run, ns, begin, false);
        std::fill_n(out + begin, length, uint8_t{1});
        begin += length;
        if (begin < run.count) out[begin++] = 0;
    }
}

bool Arena::publish(int32_t group, int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key) {
    reserve_keys(group, 1);  // what can fail comes before what changes
    return publish(group, id, digest, ns, end, key, group_of(group).index.hash(digest, ns));
}

bool Arena::publish(int32_t group, int32_t id, const Digest& digest, uint32_t ns, int64_t end, Page::Key key,
                    uint64_t hash) {
    assert(page(group, id).key == Page::kNone && page(group, id).refs > 0);
    Group& g = group_of(group);
    Page* pages = of(g.size_class).pages.data();
    const int32_t other = g.index.find(pages, digest, ns, hash);
    if (other != kNoPage) {
        if (key == Page::kPending) return false;
        if (pages[other].key == Page::kVisible)
            return pages[other].refs == static_cast<int32_t>(pages[other].pins) && take_over(group, id, other, hash);
        unpublish(group, other);  // bytes that are there win over bytes that are still being written
    }
    g.index.insert(hash, id);
    namespaces_.add(ns);
    PageMarks marks;  // bit by bit the page's would be read and written five times
    marks.end = static_cast<uint64_t>(end) & ((uint64_t{1} << 48) - 1);
    marks.group = static_cast<uint64_t>(group) & 63;
    marks.key = key;
    static_cast<PageMarks&>(pages[id]) = marks;
    pages[id].digest = digest;
    pages[id].ns = ns;
    if (g.watched) note(group, end, hash);
    if (key == Page::kPending) {
        ++pending_;
        return true;
    }
    ++version_;
    if (listener_) listener_->stored(group, id);
    return true;
}

int64_t Arena::key_run(int32_t group, const int32_t* ids, const DigestRun& run, uint32_t ns, int64_t begin,
                       int64_t block_tokens, Page::Key key) {
    const KeyIndex& index = group_of(group).index;
    const Page* pages = of(class_of(group)).pages.data();
    uint64_t hashes[kInFlight];
    constexpr int64_t ahead = kInFlight;
    const bool fresh = key == Page::kPending;  // otherwise nearly all have their key, and are confirmed
    auto prepare = [&](int64_t i) {
        __builtin_prefetch(pages + ids[i], 1);
        if (!fresh) return;
        index.prefetch(hashes[i % ahead] = index.hash(run.at(i), ns));
    };
    int64_t without = 0;
    for (int64_t i = 0; i < std::min(run.count, ahead); ++i) prepare(i);
    for (int64_t i = 0; i < run.count; ++i) {
        const int32_t id = ids[i];
        if (pages[id].key == Page::kNone) {
            const Digest digest = run.at(i);
            const uint64_t hash = fresh ? hashes[i % ahead] : index.hash(digest, ns);
            without += !publish(group, id, digest, ns, begin + (i + 1) * block_tokens, key, hash);
        } else if (pages[id].key == Page::kPending && !fresh) {
            confirm(group, id);
        }
        if (i + ahead < run.count) prepare(i + ahead);
    }
    return without;
}

// The key of a page that nobody holds but readers outside goes on to a held page with the same bytes, which was used later.
// Nobody is told: the key was there before and is there now.
bool Arena::take_over(int32_t group, int32_t id, int32_t from, uint64_t hash) {
    SizeClass& c = of(class_of(group));
    Page& old = page_in(c, from);
    const bool cached = old.list != 0;
    if (cached) unlink(c, from);
    Page keyed = old;
    keyed.rest = 0;
    const Page& held = page_in(c, id);
    keyed.age = held.age;
    keyed.pins = held.pins;
    keyed.refs = held.refs;
    page_in(c, id) = keyed;
    group_of(group).index.move(hash, from, id);
    old.key = Page::kNone;
    old.rest = 0;
    if (cached) free_page(c, from);  // else a reader outside holds it still
    leave(c, from, ++version_);
    return true;
}

void Arena::confirm(int32_t group, int32_t id) {
    Page& page = page_of(group, id);
    assert(page.key == Page::kPending);
    page.key = Page::kVisible;
    --pending_;
    ++version_;
    if (group_of(group).watched) note(group, static_cast<int64_t>(page.end), index_hash(group, page.digest, page.ns));
    if (listener_) listener_->stored(group, id);
}

// Out of the index. The page stays where it is: the caller unlinks or frees it.
void Arena::drop_key(SizeClass& c, int32_t id) {
    const Page& page = page_in(c, id);
    const KeyIndex& index = group_of(static_cast<int32_t>(page.group)).index;
    drop_key(c, id, index.hash(page.digest, page.ns));
}

void Arena::drop_key(SizeClass& c, int32_t id, uint64_t hash) {
    Page& page = page_in(c, id);
    const auto group = static_cast<int32_t>(page.group);
    group_of(group).index.erase(hash, id);
    namespaces_.remove(page.ns);
    const bool visible = page.key == Page::kVisible;
    page.key = Page::kNone;
    if (!visible) {
        --pending_;
        return;
    }
    leave(c, id, ++version_);
    if (listener_) listener_->removed(group, page.digest, page.ns);
}

// Of a cached page. The slab still counts it as used: the caller gives the page out, fills it or frees it.
void Arena::evict(SizeClass& c, int32_t id) {
    const Page& page = page_in(c, id);
    Group& group = group_of(static_cast<int32_t>(page.group));
    const uint64_t hash = group.index.hash(page.digest, page.ns);
    if (!episode_open_) begin_episode();
    ghosts_.add(hash);
    ++group.evictions;
    ++evictions_;
    unlink(c, id);
    drop_key(c, id, hash);
}

void Arena::unpublish(int32_t group, int32_t id) {
    SizeClass& c = of(class_of(group));
    const Page& page = page_in(c, id);
    if (page.key == Page::kNone) return;
    const bool cached = page.list != 0;
    if (cached) unlink(c, id);
    drop_key(c, id);
    if (cached) free_page(c, id);
}

void Arena::watch(int32_t group) {
    group_of(group).watched = true;
    noted_.resize(kNoted);
}

// No clock for each page: once for all that one request's allocate evicts.
[[gnu::noinline]] void Arena::begin_episode() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    ghosts_.begin({std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), evictions_, evicted_slabs(),
                   taker_, taker_session_});
    episode_open_ = true;
}

double Arena::evicted_slabs() const {
    double slabs = 0;
    for (const Group& group : groups_)
        slabs += static_cast<double>(group.evictions) / static_cast<double>(of(group.size_class).k);
    return slabs;
}

uint64_t Arena::evicted_in(int32_t group, const Digest& digest, uint32_t ns, uint64_t since) const {
    const uint64_t episode = ghosts_.find(group_of(group).index.hash(digest, ns));
    return episode >= since ? episode : 0;
}

template <typename Chosen>
void Arena::forget_if(Chosen&& chosen) {
    for (const SizeClass& c : classes_)
        for (int32_t id = 0; id < static_cast<int32_t>(c.pages.size()); ++id) {
            const Page& page = page_in(c, id);
            if (page.key != Page::kNone && chosen(page)) unpublish(static_cast<int32_t>(page.group), id);
        }
}

void Arena::forget_all() {
    forget_if([](const Page&) { return true; });
    ghosts_.clear();
}

void Arena::forget(const NamespaceCounts& chosen) {
    forget_if([&](const Page& page) { return chosen.of(page.ns) > 0; });
}

}  // namespace kvc
