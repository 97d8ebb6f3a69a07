// The longest prefix that every group can serve, and why the rest was lost.
//
// Attention is downward closed: its hit is the first miss from the left. A recurrent hit is one page at exactly the
// hit's end. So the common hit is the highest grid point at or below the attention hit with a state in every group.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

DigestRun Manager::run_of(const Request& r, int32_t group, int64_t limit) const {
    const int64_t units = groups_[static_cast<size_t>(group)].block_tokens / unit_;
    const int64_t known = static_cast<int64_t>(r.digests.size()) / units;
    const int64_t wanted = limit / groups_[static_cast<size_t>(group)].block_tokens;
    return {reinterpret_cast<const uint8_t*>(r.digests.data()) + (units - 1) * 32, units * 32, std::min(known, wanted)};
}

const Digest* Manager::digest_at(const Request& r, int64_t position) const {
    const auto link = static_cast<size_t>(position / unit_);
    return link >= 1 && link <= r.digests.size() ? &r.digests[link - 1] : nullptr;
}

bool Manager::is_present(const Request& r, int32_t group, int64_t index) const {
    if (r.present.empty()) return false;
    const auto& bytes = r.present[static_cast<size_t>(group)];
    return index < static_cast<int64_t>(bytes.size()) && bytes[static_cast<size_t>(index)];
}

int64_t Manager::attention_hit(const Request& r, int32_t group, int64_t limit, unsigned sources) const {
    const Pool& pool = pools_[static_cast<size_t>(group)];
    const DigestRun run = run_of(r, group, limit);
    int64_t blocks = 0;
    while (true) {
        blocks += pool.run_length(run, r.ns, blocks, sources & kPending);
        const int64_t before = blocks;
        if (sources & kPresent)
            while (blocks < run.count && is_present(r, group, blocks)) ++blocks;
        if (blocks == before) break;
    }
    return blocks * groups_[static_cast<size_t>(group)].block_tokens / grid_ * grid_;
}

bool Manager::state_at(const Request& r, int64_t position, unsigned sources) const {
    const Digest* digest = digest_at(r, position);
    if (!digest) return false;
    for (const int32_t group : states_) {
        const Pool& pool = pools_[static_cast<size_t>(group)];
        const int32_t page = pool.find(*digest, r.ns);
        if (page != kNoPage && (pool.page(page).key == Page::kVisible || sources & kPending)) continue;
        if (sources & kPresent && is_present(r, group, position / grid_ - 1)) continue;
        return false;
    }
    return true;
}

Manager::Walk Manager::longest(const Request& r, unsigned sources) const {
    int64_t attention = hit_limit(r);
    for (const int32_t group : attention_) attention = std::min(attention, attention_hit(r, group, attention, sources));
    int64_t hit = attention;
    if (!states_.empty())
        while (hit > 0 && !state_at(r, hit, sources)) hit -= grid_;
    return {attention, hit};
}

uint64_t Manager::version() const {
    uint64_t sum = 0;
    for (const Pool& pool : pools_) sum += pool.version();
    return sum;
}

// Splits (hit, n] from left to right; each region's cause is the first that applies, see kvc_cause.
void Manager::attribute_losses(const Request& r, const Walk& walk, const Walk& pending, kvc_hit* out) const {
    const int64_t limit = hit_limit(r);
    int64_t at = walk.hit;
    auto lose = [&](int32_t cause, int64_t upto) {
        if (upto <= at) return;
        out->lost[cause] += upto - at;
        at = upto;
    };
    lose(KVC_LOST_PENDING, pending.hit);
    // Up to where attention would have carried a hit without eviction.
    int64_t reach = attention_.empty() || evicted_any() ? limit : walk.attention;
    for (const int32_t group : attention_) {
        if (reach == walk.attention) break;
        const int64_t resident = attention_hit(r, group, reach, kPresent);
        reach = std::min(reach, std::max(resident, deepest_evicted(r, group, resident, limit)));
    }
    if (!states_.empty()) {
        int64_t evicted = reach;
        while (evicted > at && !state_known(r, evicted)) evicted -= grid_;
        lose(KVC_LOST_EVICTED, evicted);
        if (!attention_.empty()) lose(KVC_LOST_STATE, walk.attention);
    }
    if (!attention_.empty()) {
        lose(KVC_LOST_PENDING, pending.attention);
        lose(KVC_LOST_EVICTED, reach);
    }
    lose(KVC_LOST_NEW, limit);
    lose(KVC_LOST_LAST, r.n_tokens);
}

bool Manager::evicted_any() const {
    return std::any_of(pools_.begin(), pools_.end(), [](const Pool& pool) { return pool.evictions() > 0; });
}

// Every recurrent group has a state here, or had one: with the hit below, at least one of them was evicted.
bool Manager::state_known(const Request& r, int64_t position) const {
    const Digest* digest = digest_at(r, position);
    return digest && std::all_of(states_.begin(), states_.end(), [&](int32_t group) {
               const Pool& pool = pools_[static_cast<size_t>(group)];
               const int32_t page = pool.find(*digest, r.ns);
               return (page != kNoPage && pool.page(page).key == Page::kVisible) || pool.was_evicted(*digest, r.ns);
           });
}

// Keys are chained: a block that was evicted, or is still there behind a gap, tells that its whole prefix was stored. The
// deepest one counts. Only asked where something was evicted.
int64_t Manager::deepest_evicted(const Request& r, int32_t group, int64_t begin, int64_t limit) const {
    const Pool& pool = pools_[static_cast<size_t>(group)];
    const DigestRun run = run_of(r, group, limit);
    const int64_t block = groups_[static_cast<size_t>(group)].block_tokens;
    auto stored = [&](const Digest& digest) {
        const int32_t page = pool.find(digest, r.ns);
        return (page != kNoPage && pool.page(page).key == Page::kVisible) || pool.was_evicted(digest, r.ns);
    };
    int64_t i = run.count;
    while (i * block > begin && !stored(run.at(i - 1))) --i;
    return i * block / grid_ * grid_;
}

int32_t Manager::lookup(int64_t handle, const uint8_t* const* present, const int64_t* n_present, kvc_hit* out) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (r->state != RequestState::kWaiting)
        return fail(KVC_E_STATE, "request %lld holds pages: look it up before its first allocate, or preempt it",
                    static_cast<long long>(handle));
    r->looked_up = false;
    r->present.clear();
    if (present) {
        r->present.resize(groups_.size());
        for (size_t g = 0; g < groups_.size(); ++g) {
            if (n_present[g] < 0) return fail(KVC_E_ARGUMENT, "present[%zu] has a negative length", g);
            if (n_present[g]) r->present[g].assign(present[g], present[g] + n_present[g]);
        }
    }
    const Walk device = longest(*r, kDevice);
    const Walk walk = present ? longest(*r, kPresent) : device;
    const bool any_pending = std::any_of(pools_.begin(), pools_.end(), [](const Pool& p) { return p.pending() > 0; });
    const Walk pending = any_pending ? longest(*r, kPresent | kPending) : walk;
    *out = {};
    out->hit_tokens = walk.hit;
    out->device_tokens = device.hit;
    out->pending_tokens = std::max(pending.hit, walk.hit);
    out->junction = !attention_.empty() && !states_.empty() && walk.attention > walk.hit ? walk.attention : 0;
    attribute_losses(*r, walk, pending, out);
    r->looked_up = true;
    r->hit = walk.hit;
    r->hit_version = version();
    return KVC_OK;
}

}  // namespace kvc
