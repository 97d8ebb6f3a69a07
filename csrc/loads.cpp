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
    for (size_t g = 0; g < groups_.size(); ++g) {
        const bool state = groups_[g].kind == KVC_RECURRENT;
        const auto at = std::find(states_.begin(), states_.end(), static_cast<int32_t>(g)) - states_.begin();
        for (size_t i = 0; i < adoption.pages[g].size(); ++i) {
            if (adoption.pages[g][i] != kNoPage) continue;
            kvc_keyed item{};
            item.handle = r.handle;
            item.ns = r.ns;
            item.group = static_cast<int32_t>(g);
            item.page = state ? r.points.back().pages[static_cast<size_t>(at)] : r.tables[g][i];
            item.end = state ? adoption.hit : static_cast<int64_t>(i + 1) * groups_[g].block_tokens;
            const Digest* digest = digest_at(r, item.end);
            std::memcpy(item.digest, digest->bytes, 32);
            pools_[g].acquire(item.page);
            pools_[g].publish(item.page, *digest, r.ns, item.end, Page::kPending);
            if (state && is_declared(r, item.end)) pools_[g].keep(item.page);
            load->items.push_back(item);
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
    // Its keys go at once: a twin must not wait for a load that may never end.
    for (const kvc_keyed& item : at->second.items) {
        Pool& pool = pools_[static_cast<size_t>(item.group)];
        if (pool.page(item.page).key == Page::kPending) pool.unpublish(item.page);
    }
    if (r) drop_pages(*r);
    return KVC_OK;
}

int32_t Manager::end_load(int64_t id, const uint8_t* ok, int64_t n) {
    const auto at = loads_.find(id);
    if (at == loads_.end()) return fail(KVC_E_HANDLE, "load %lld is not open", static_cast<L>(id));
    if (n != static_cast<int64_t>(at->second.items.size()))
        return fail(KVC_E_ARGUMENT, "%lld results for load %lld of %zu pages", static_cast<L>(n), static_cast<L>(id),
                    at->second.items.size());
    for (const kvc_keyed& item : at->second.items) pools_[static_cast<size_t>(item.group)].reserve(0, n);
    const Load load = std::move(at->second);
    loads_.erase(at);
    Request* r = load.handle ? find(load.handle) : nullptr;
    bool complete = true;
    for (int64_t i = 0; i < n; ++i) {
        const kvc_keyed& item = load.items[static_cast<size_t>(i)];
        Pool& pool = pools_[static_cast<size_t>(item.group)];
        const Page& page = pool.page(item.page);
        complete &= ok[i] != 0;
        if (!ok[i]) {
            pool.unpublish(item.page);
            continue;
        }
        Digest digest;
        std::memcpy(digest.bytes, item.digest, 32);
        if (page.key == Page::kPending) pool.confirm(item.page);
        else if (page.key == Page::kNone) pool.publish(item.page, digest, item.ns, item.end, Page::kVisible);
    }
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
        pools_[static_cast<size_t>(item.group)].release(item.page);
    }
    return KVC_OK;
}

// ---- what tiers store -----------------------------------------------------------------------------------------------

void Manager::push_keyed(const Request& r, int32_t group, int32_t page) {
    if (!journal_) return;
    int64_t created = 0;
    for (const Pool& pool : pools_) created += pool.created();
    if (static_cast<int64_t>(keyed_.size()) >= std::max<int64_t>(2 * created, 64)) {
        keyed_.pop_front();
        ++keyed_dropped_;
    }
    const Page& keyed = pools_[static_cast<size_t>(group)].page(page);
    kvc_keyed item{};
    item.end = keyed.end;
    item.handle = r.handle;
    item.ns = keyed.ns;
    item.group = group;
    item.page = page;
    std::memcpy(item.digest, keyed.digest.bytes, 32);
    try {
        keyed_.push_back(item);
    } catch (const std::bad_alloc&) {  // a tier goes without; the step itself must end
        ++keyed_dropped_;
    }
}

int32_t Manager::take_keyed(kvc_keyed* items, int64_t cap, int64_t* n) {
    *n = static_cast<int64_t>(keyed_.size());
    if (*n > cap) return KVC_OK;  // the caller comes back with more room
    std::copy(keyed_.begin(), keyed_.end(), items);
    keyed_.clear();
    return KVC_OK;
}

int32_t Manager::pin(const kvc_keyed* items, int64_t n, uint8_t* pinned) {
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages to pin", static_cast<L>(n));
    for (int64_t i = 0; i < n; ++i)
        if (const auto status = check_group(items[i].group)) return status;
    for (int64_t i = 0; i < n; ++i) {
        const kvc_keyed& item = items[i];
        Pool& pool = pools_[static_cast<size_t>(item.group)];
        Digest digest;
        std::memcpy(digest.bytes, item.digest, 32);
        pinned[i] = pool.contains(item.page) && pool.page(item.page).key == Page::kVisible &&
                    pool.page(item.page).ns == item.ns && pool.page(item.page).digest == digest;
        if (!pinned[i]) continue;
        pool.pin(item.page);
        ++pinned_;
    }
    return KVC_OK;
}

int32_t Manager::unpin(int32_t group, const int32_t* pages, int64_t n) {
    if (const auto status = check_group(group)) return status;
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld pages to unpin", static_cast<L>(n));
    Pool& pool = pools_[static_cast<size_t>(group)];
    std::unordered_map<int32_t, int32_t> times;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t pins = pool.contains(pages[i]) ? pool.page(pages[i]).pins : 0;
        if (++times[pages[i]] > pins)
            return fail(KVC_E_STATE, "page %d of group %d is pinned %d times, not %d: nothing was unpinned", pages[i],
                        group, pins, times[pages[i]]);
    }
    for (int64_t i = 0; i < n; ++i) pool.unpin(pages[i]);
    pinned_ -= n;
    return KVC_OK;
}

}  // namespace kvc
