// Tiers: loads in flight, newly keyed pages, references of outside readers.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

// The load holds a reference of its own on each page, so that it outlives its request. Keys are pending, so that a twin
// can wait for the load instead of starting another.
void Manager::start_load(Request& r, const Adoption& adoption, Load* load) {
    load->handle = r.handle;
    load->ns = r.ns;
    users_.add(r.ns);
    for (int32_t g = 0; g < n_groups_; ++g) {
        const auto i = static_cast<size_t>(g);
        const bool state = rules(g).state();
        const auto s = static_cast<size_t>(std::find(states_.begin(), states_.end(), g) - states_.begin());
        for (size_t n = 0; n < adoption.pages[i].size(); ++n) {
            if (adoption.pages[i][n] != kNoPage) continue;
            const int64_t block = r.tables[i].first + static_cast<int64_t>(n);
            kvc_keyed item{};
            item.handle = r.handle;
            item.ns = r.ns;
            item.group = g;
            item.page = state ? r.points.back().pages[s] : r.tables[i].page(block);
            item.end = state ? adoption.hit : (block + 1) * rules(g).block_tokens;
            Digest key;
            if (state) key = *digest_at(r, item.end);
            else block_key(r, g, block, &key);
            std::memcpy(item.digest, key.bytes, 32);
            arena_.acquire(g, item.page);
            arena_.publish(g, item.page, key, r.ns, item.end, Page::kPending);
            if (!rules(g).full() && is_declared(r, adoption.hit)) arena_.keep(g, item.page);
            load->items.push_back(item);
            load->parents.push_back(parent_key(r, g, item.end));
        }
    }
    r.load = ++last_load_;
    r.state = RequestState::kLoading;
}

void Manager::detach_load(Request& r) {
    loads_.at(r.load).handle = 0;
    r.load = 0;
}

int32_t Manager::load_items(int64_t load, kvc_keyed* items, int64_t cap, int64_t* n) {
    const auto at = loads_.find(load);
    if (at == loads_.end()) return fail(KVC_E_HANDLE, "load %lld is not open", static_cast<L>(load));
    *n = static_cast<int64_t>(at->second.items.size());
    std::copy_n(at->second.items.begin(), std::min(*n, cap), items);
    return KVC_OK;
}

int32_t Manager::abandon_load(int64_t load) {
    const auto at = loads_.find(load);
    if (at == loads_.end()) return fail(KVC_E_HANDLE, "load %lld is not open", static_cast<L>(load));
    Request* r = at->second.handle ? find(at->second.handle) : nullptr;
    if (r) reserve_drop(*r);
    // Its keys go at once: a twin must not wait for a load that may never end.
    for (const kvc_keyed& item : at->second.items)
        if (arena_.page(item.group, item.page).key == Page::kPending) arena_.unpublish(item.group, item.page);
    if (r) drop_pages(*r);
    return KVC_OK;
}

int32_t Manager::end_load(int64_t id, const uint8_t* ok, int64_t n) {
    const auto at = loads_.find(id);
    if (at == loads_.end()) return fail(KVC_E_HANDLE, "load %lld is not open", static_cast<L>(id));
    if (n != static_cast<int64_t>(at->second.items.size()))
        return fail(KVC_E_ARGUMENT, "%lld results for load %lld of %zu pages", static_cast<L>(n), static_cast<L>(id),
                    at->second.items.size());
    for (int32_t g = 0; g < n_groups_; ++g) arena_.reserve_keys(g, n);
    Request* r = at->second.handle ? find(at->second.handle) : nullptr;
    if (r) reserve_drop(*r);
    const Load load = std::move(at->second);
    loads_.erase(at);
    users_.remove(load.ns);
    writer_ = r;
    bool complete = true;
    for (int64_t i = 0; i < n; ++i) {
        const kvc_keyed& item = load.items[static_cast<size_t>(i)];
        const Page& page = arena_.page(item.group, item.page);
        complete &= ok[i] != 0;
        parent_ = &load.parents[static_cast<size_t>(i)];
        if (!ok[i]) {
            if (page.key != Page::kNone) arena_.unpublish(item.group, item.page);
            continue;
        }
        Digest digest;
        std::memcpy(digest.bytes, item.digest, 32);
        bool keyed = true;
        if (page.key == Page::kPending) arena_.confirm(item.group, item.page);
        else if (page.key == Page::kNone && !load.muted)
            keyed = arena_.publish(item.group, item.page, digest, item.ns, item.end, Page::kVisible);
        if (r && !keyed && rules(item.group).full()) ++r->tables[static_cast<size_t>(item.group)].keyless;
    }
    writer_ = nullptr;
    parent_ = nullptr;
    if (r && complete) {
        r->load = 0;
        r->state = RequestState::kRunning;
        r->computed = r->committed = r->granted;
    } else if (r) {
        r->load = 0;
        drop_pages(*r);
    }
    // Tail first, as everywhere: in items of one group the later block comes later.
    for (int64_t i = n; i-- > 0;) {
        const kvc_keyed& item = load.items[static_cast<size_t>(i)];
        arena_.release(item.group, item.page, rules(item.group).draft() ? Arena::kVictims : Arena::kLru);
    }
    return KVC_OK;
}

// ---- what tiers store -----------------------------------------------------------------------------------------------

// So much may wait to be taken: two rounds over all pages.
int64_t Manager::most_untaken() const {
    const int32_t k = *std::max_element(pages_per_slab_.begin(), pages_per_slab_.end());
    return std::max<int64_t>(2 * arena_.created_slabs() * k, 64);
}

static kvc_keyed item_of(const Page& page, int32_t group, int32_t id) {
    kvc_keyed item{};
    item.end = page.end;
    item.ns = page.ns;
    item.group = group;
    item.page = id;
    std::memcpy(item.digest, page.digest.bytes, 32);
    return item;
}

void Manager::push_keyed(int64_t handle, int32_t group, int32_t page) {
    if (!journal_) return;
    if (static_cast<int64_t>(keyed_.size()) >= most_untaken()) {
        keyed_of_.remove(keyed_.front().ns);
        keyed_.pop_front();
        ++keyed_dropped_;
    }
    kvc_keyed item = item_of(arena_.page(group, page), group, page);
    item.handle = handle;
    try {
        keyed_of_.reserve(1);
        keyed_.push_back(item);
        keyed_of_.add(item.ns);
    } catch (const std::bad_alloc&) {  // a tier goes without; the step itself must end
        ++keyed_dropped_;
    }
}

int32_t Manager::take_keyed(kvc_keyed* items, int64_t cap, int64_t* n) {
    *n = static_cast<int64_t>(keyed_.size());
    if (*n > cap) return KVC_OK;  // the caller comes back with more room
    std::copy(keyed_.begin(), keyed_.end(), items);
    keyed_.clear();
    keyed_of_.clear();
    return KVC_OK;
}

// In the order in which the arena would let them go, were it to take `slabs` slabs of space now; what is free counts first.
int32_t Manager::next_evicted(int64_t slabs, kvc_keyed* items, int64_t cap, int64_t* n) const {
    if (slabs < 0) return fail(KVC_E_ARGUMENT, "%lld slabs of space", static_cast<L>(slabs));
    const auto wanted = static_cast<double>(slabs);
    double room = static_cast<double>(arena_.slabs() - arena_.created_slabs() + arena_.empty_slabs());
    for (int32_t c = 0; c < static_cast<int32_t>(pages_per_slab_.size()); ++c)
        room += static_cast<double>(arena_.free_pages(c)) / arena_.pages_per_slab(c);
    *n = 0;
    if (room >= wanted) return KVC_OK;
    arena_.each_coldest([&](int32_t group, int32_t id) {
        if (*n < cap) items[*n] = item_of(arena_.page(group, id), group, id);
        ++*n;
        room += 1.0 / arena_.pages_per_slab(arena_.class_of(group));
        return room < wanted;
    });
    return KVC_OK;
}

// By key: a page may have moved since it was told. While the oldest request waits for space nothing is pinned.
int32_t Manager::pin(kvc_keyed* items, int64_t n, uint8_t* pinned) {
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages to pin", static_cast<L>(n));
    for (int64_t i = 0; i < n; ++i)
        if (const auto status = check_group(items[i].group)) return status;
    for (int64_t i = 0; i < n; ++i) {
        Digest digest;
        std::memcpy(digest.bytes, items[i].digest, 32);
        const int32_t page = frozen_ ? kNoPage : arena_.find(items[i].group, digest, items[i].ns);
        pinned[i] = page != kNoPage && arena_.page(items[i].group, page).key == Page::kVisible &&
                    arena_.pin(items[i].group, page);
        if (!pinned[i]) continue;
        items[i].page = page;
        ++pinned_;
    }
    return KVC_OK;
}

int32_t Manager::unpin(int32_t group, const int32_t* pages, int64_t n) {
    if (const auto status = check_group(group)) return status;
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages to unpin", static_cast<L>(n));
    std::unordered_map<int32_t, int64_t> times;
    for (int64_t i = 0; i < n; ++i) {
        const bool its = arena_.contains(group, pages[i]) && arena_.page(group, pages[i]).group == uint64_t(group);
        const int64_t pins = its ? static_cast<int64_t>(arena_.page(group, pages[i]).pins) : 0;
        if (++times[pages[i]] > pins)
            return fail(KVC_E_STATE, "page %d of group %d is pinned %lld times, not %lld: nothing was unpinned",
                        pages[i], group, static_cast<L>(pins), static_cast<L>(times[pages[i]]));
    }
    // In the order of their ages each finds its place beside the one before.
    std::vector<int32_t> ordered(pages, pages + n);
    std::ranges::sort(ordered, {}, [&](int32_t page) { return static_cast<uint64_t>(arena_.page(group, page).age); });
    for (const int32_t page : ordered) arena_.unpin(group, page);
    pinned_ -= n;
    return KVC_OK;
}

// ---- moves ----------------------------------------------------------------------------------------------------------

int32_t Manager::take_moves(kvc_move* moves, int64_t cap, int64_t* n) {
    const auto all = arena_.moves();
    *n = static_cast<int64_t>(all.size());
    if (*n > cap) return KVC_OK;
    for (size_t i = 0; i < all.size(); ++i) moves[i] = {all[i].size_class, all[i].from, all[i].to};
    arena_.forget_moves();
    return KVC_OK;
}

}  // namespace kvc
