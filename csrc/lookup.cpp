// The longest prefix that every group can serve, and why the rest was lost.
//
// A full group is downward closed: its hit is the first miss from the left. A span or state group serves single
// positions: a state is one page at exactly the hit's end, a span the blocks of [need_begin(H), H). So the common hit is the
// highest grid point at or below the full groups' hit that every sparse group serves. Draft groups have no say.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

// ---- what is there --------------------------------------------------------------------------------------------------

int64_t Manager::known_tokens(const Request& r) const { return static_cast<int64_t>(r.digests.size()) * unit_; }

// Keys of blocks [begin, end) of a group with links_per_block.
DigestRun Manager::run_of(const Request& r, int32_t group, int64_t begin, int64_t end) const {
    const GroupRules& g = rules(group);
    DigestRun run;
    run.first =
        reinterpret_cast<const uint8_t*>(r.digests.data()) + ((begin + 1) * g.links_per_block + g.ahead_links - 1) * 32;
    run.stride_bytes = g.links_per_block * 32;
    run.count = end - begin;
    return run;
}

bool Manager::is_present(const Request& r, int32_t group, int64_t index) const {
    if (r.present.empty()) return false;
    const auto& bytes = r.present[static_cast<size_t>(group)];
    return index < static_cast<int64_t>(bytes.size()) && bytes[static_cast<size_t>(index)];
}

// Pages of the blocks from the first on that are visible, as far as they go without a gap.
const std::vector<int32_t>& Manager::resident(const Request& r, int32_t group, int64_t blocks) const {
    Request::Resident& known = r.resident[static_cast<size_t>(group)];
    const int64_t count = std::max(blocks, static_cast<int64_t>(known.pages.size()));
    arena_.follow(group, run_of(r, group, 0, count), r.ns, known.version, &known.pages);
    known.version = arena_.version();
    return known.pages;
}

int64_t Manager::full_hit(const Request& r, int32_t group, int64_t limit, unsigned sources) const {
    const DigestRun run = run_of(r, group, 0, std::min(known_tokens(r), limit) / rules(group).block_tokens);
    int64_t blocks = std::min(static_cast<int64_t>(resident(r, group, run.count).size()), run.count);
    while (true) {
        const int64_t before = blocks;
        if (sources & kPresent)
            while (blocks < run.count && is_present(r, group, blocks)) ++blocks;
        if (blocks > before || sources & kPending)
            blocks += arena_.run_length(group, run, r.ns, blocks, sources & kPending);
        if (blocks == before) break;
    }
    return blocks * rules(group).block_tokens / grid_ * grid_;
}

bool Manager::block_at(const Request& r, int32_t group, int64_t block, unsigned sources) const {
    Digest key;
    if (!block_key(r, group, block, &key)) return false;
    const int32_t page = arena_.find(group, key, r.ns);
    if (page != kNoPage && (arena_.page(group, page).key == Page::kVisible || sources & kPending)) return true;
    return sources & kPresent && is_present(r, group, block);
}

bool Manager::state_at(const Request& r, int32_t group, int64_t position, unsigned sources) const {
    const Digest* key = digest_at(r, position);
    if (!key) return false;
    const int32_t page = arena_.find(group, *key, r.ns);
    if (page != kNoPage && (arena_.page(group, page).key == Page::kVisible || sources & kPending)) return true;
    return sources & kPresent && is_present(r, group, position / grid_ - 1);
}

// Where positions have to be asked again that an earlier walk has ruled out: those that read a key of the request which has
// appeared since.
Manager::Reopened Manager::reopened(const Request& r, const Request::Served& before) const {
    Reopened again;
    again.known = before.upto >= 0 && arena_.each_appeared(before.appeared, [&](const Arena::Appeared& key) {
        const GroupRules& g = rules(key.group);
        const int64_t reads = g.state() ? 0 : g.chunk_tokens + g.lead_tokens;  // so far behind the block, at most
        if (key.end > before.upto || key.end + reads <= before.hit) return;
        Digest own;
        if (!key_at(r, key.group, key.end, &own)) return;
        if (arena_.index_hash(key.group, own, r.ns) == key.hash) again.ranges.push_back({key.end, key.end + reads});
    });
    std::ranges::sort(again.ranges, std::greater<>{}, &Reopened::Range::last);
    return again;
}

// The highest grid point at or below the position that is not ruled out. Asked for ever lower ones.
int64_t Manager::not_ruled_out(Reopened* again, const Request::Served& before, int64_t position) const {
    if (!again->known || position > before.upto || position <= before.hit) return position;
    for (; again->next < again->ranges.size(); ++again->next) {
        const auto& [first, last] = again->ranges[again->next];
        const int64_t highest = std::min(position, last) / grid_ * grid_;
        if (highest >= first) return std::max(before.hit, highest);
    }
    return before.hit;
}

// What a walk has ruled out, from `from` down to the hit. Below a hit that was found before nothing is learnt of what lies above
// it, and that stays ruled out; so does what lies above `from`, unless a part of it has to be asked again: that was not done.
void Manager::rule_out(const Reopened& again, int64_t from, int64_t hit, Request::Served* before) const {
    if (again.known && from < before->hit) return;
    const bool unasked = !again.ranges.empty() && again.ranges.front().last > from;
    *before = {hit, again.known && !unasked ? std::max(from, before->upto) : from, arena_.appeared()};
}

// The highest grid point up to `position` at which a hit may read something that a tier has; `least` if none lies above it.
// Asked for ever lower ones: `found`, of each group, is where its map has something last, so that all of it is gone over once.
int64_t Manager::last_present(const Request& r, int64_t position, int64_t least, GroupPlaces* found) const {
    const auto last = [&](int32_t g, int64_t end) {
        const auto& bytes = r.present[static_cast<size_t>(g)];
        int64_t& i = (*found)[static_cast<size_t>(g)];
        if (i >= end) i = std::min(end, static_cast<int64_t>(bytes.size())) - 1;
        while (i >= 0 && !bytes[static_cast<size_t>(i)]) --i;
        return i;
    };
    for (const int32_t g : states_) least = std::max(least, (last(g, position / grid_) + 1) * grid_);
    for (const int32_t g : spans_) {
        const GroupRules& of = rules(g);
        const int64_t block = of.draft() ? -1 : last(g, position / of.block_tokens);
        if (block < 0) continue;
        const int64_t reach = (block + 1) * of.block_tokens + of.chunk_tokens + of.lead_tokens;
        least = std::max(least, std::min(position, reach / grid_ * grid_));
    }
    return least;
}

// Whether every sparse group serves the position; if not, the highest one below that may be. A missing block rules out every
// position above its begin that it is not past, so that a walk looks at each block once. `seen`, of each span: from here on,
// up to the position, its blocks were seen.
int64_t Manager::served_upto(const Request& r, int64_t position, unsigned sources, GroupPlaces* seen) const {
    for (const int32_t g : states_)
        if (!state_at(r, g, position, sources)) return position - grid_;
    for (size_t i = 0; i < spans_.size(); ++i) {
        const int32_t g = spans_[i];
        if (rules(g).draft()) continue;
        const int64_t block = rules(g).block_tokens;
        const int64_t begin = rules(g).need_begin(position);
        int64_t& there = (*seen)[static_cast<size_t>(g)];
        int64_t b = std::min(position, there) / block - 1;
        while (b >= 0 && (b + 1) * block > begin && block_at(r, g, b, sources)) --b;
        const bool all = b < 0 || (b + 1) * block <= begin;
        there = all ? std::min(there, (b + 1) * block) : INT64_MAX;
        if (!all) return b * block / grid_ * grid_;
    }
    return position;
}

// The highest grid point at or below `from` that every sparse group serves. What an earlier walk has ruled out stays so until a
// key appears there.
int64_t Manager::sparse_hit(const Request& r, int64_t from, unsigned sources) const {
    const bool pending = sources & kPending, tiers = sources & kPresent && !r.present.empty();
    // Walks beside a tier's map begin where the tier's attention ends, not the arena's: they keep a record of their own.
    Request::Served& before = r.served[(tiers ? 3 : 0) + (pending ? 1 : 0)];
    Reopened again = reopened(r, before);
    GroupPlaces seen;
    seen.fill(INT64_MAX);
    int64_t hit = from;
    while ((hit = not_ruled_out(&again, before, hit)) > 0) {
        const int64_t next = served_upto(r, hit, sources & ~kPresent, &seen);
        if (next == hit) break;
        hit = next;
    }
    hit = std::max<int64_t>(hit, 0);
    rule_out(again, from, hit, &before);
    if (!tiers) return hit;
    // Above, only what the tier has can make a difference.
    seen.fill(INT64_MAX);
    GroupPlaces found = seen;
    int64_t with = from;
    while ((with = last_present(r, with, hit, &found)) > hit) {
        const int64_t next = served_upto(r, with, sources, &seen);
        if (next == with) break;
        with = next;
    }
    return std::max(with, hit);
}

Manager::Walk Manager::longest(const Request& r, unsigned sources, int64_t limit) const {
    if (full_.empty() && !sparse_votes_) return {0, 0};  // nothing is kept that a hit could be made of
    int64_t full = std::min(limit, known_tokens(r) / grid_ * grid_);
    for (const int32_t group : full_) full = std::min(full, full_hit(r, group, full, sources));
    return {full, sparse_votes_ ? sparse_hit(r, full, sources) : full};
}

// ---- why the rest was lost ------------------------------------------------------------------------------------------

// Splits (hit, n] from left to right; each region's cause is the first that applies, see kvc_cause.
void Manager::attribute_losses(const Request& r, const Walk& walk, const Walk& pending, Request::Losses* out) const {
    const int64_t limit = hit_limit(r);
    int64_t at = walk.hit;
    auto lose = [&](int32_t cause, int64_t upto) {
        if (upto <= at) return;
        out->lose(cause, at, upto);
        at = upto;
    };
    lose(KVC_LOST_PENDING, pending.hit);
    // Up to where the full groups would have carried a hit without eviction.
    const bool evicted_any = arena_.evictions() > 0;
    int64_t reach = full_.empty() || evicted_any ? limit : walk.full;
    for (const int32_t group : full_) {
        if (reach == walk.full) break;
        const int64_t resident = full_hit(r, group, reach, kPresent);
        reach = std::min(reach, std::max(resident, deepest_evicted(r, group, resident, limit)));
    }
    if (sparse_votes_) {
        if (evicted_any && reach > at) lose(KVC_LOST_EVICTED, last_sparse_known(r, reach, at));
        if (!full_.empty() && walk.full > at) {
            lose(KVC_LOST_STATE, walk.full);
            out->lacking = lacking_group(r, walk.full);
        }
    }
    if (!full_.empty()) {
        lose(KVC_LOST_PENDING, pending.full);
        lose(KVC_LOST_EVICTED, reach);
    }
    lose(KVC_LOST_NEW, limit);
    lose(KVC_LOST_LAST, r.n_tokens);
}

// A group that has not what a hit here needs; -1: all have.
int32_t Manager::lacking_group(const Request& r, int64_t position) const {
    for (const int32_t g : states_)
        if (!state_at(r, g, position, kPresent)) return g;
    for (const int32_t g : spans_) {
        if (rules(g).draft()) continue;
        const int64_t block = rules(g).block_tokens;
        for (int64_t b = position / block - 1; b >= 0 && (b + 1) * block > rules(g).need_begin(position); --b)
            if (!block_at(r, g, b, kPresent)) return g;
    }
    return -1;
}

// The highest position up to `from` at which every sparse group has, or had, what a hit needs; `least` if there is none above.
int64_t Manager::last_sparse_known(const Request& r, int64_t from, int64_t least) const {
    Request::Served& before = r.served[2];
    Reopened again = reopened(r, before);
    int64_t found = from;
    while ((found = not_ruled_out(&again, before, found)) > least && !sparse_known(r, found)) found -= grid_;
    found = std::max(found, least);
    rule_out(again, from, found, &before);
    return found;
}

// Every sparse group has, or had, what a hit here needs: with the hit below, at least one page of it was evicted.
bool Manager::sparse_known(const Request& r, int64_t position) const {
    auto known = [&](int32_t group, const Digest& key) {
        const int32_t page = arena_.find(group, key, r.ns);
        return (page != kNoPage && arena_.page(group, page).key == Page::kVisible) ||
               arena_.was_evicted(group, key, r.ns, r.since);
    };
    for (const int32_t g : states_) {
        const Digest* key = digest_at(r, position);
        if (!key || !known(g, *key)) return false;
    }
    for (const int32_t g : spans_) {
        if (rules(g).draft()) continue;
        const int64_t block = rules(g).block_tokens;
        for (int64_t b = position / block - 1; b >= 0 && (b + 1) * block > rules(g).need_begin(position); --b) {
            Digest key;
            if (!block_key(r, g, b, &key) || !known(g, key)) return false;
        }
    }
    return true;
}

// Keys are chained: a block that was evicted, or is still there behind a gap, tells that its whole prefix was stored. The
// deepest one counts. Only asked where something was evicted.
int64_t Manager::deepest_evicted(const Request& r, int32_t group, int64_t begin, int64_t limit) const {
    const DigestRun run = run_of(r, group, 0, std::min(known_tokens(r), limit) / rules(group).block_tokens);
    const int64_t block = rules(group).block_tokens;
    return arena_.last_known(group, run, r.ns, begin / block, r.since) * block / grid_ * grid_;
}

// ---- lookup ---------------------------------------------------------------------------------------------------------

int32_t Manager::lookup(int64_t handle, const uint8_t* const* present, const int64_t* n_present, kvc_hit* out) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (r->state != RequestState::kWaiting)
        return fail(KVC_E_STATE, "request %lld holds pages: look it up before its first allocate, or preempt it",
                    static_cast<long long>(handle));
    if (present && !n_present) return fail(KVC_E_ARGUMENT, "present has no lengths");
    r->looked_up = false;
    r->present.clear();
    if (present) {
        r->present.resize(groups_.size());
        for (size_t g = 0; g < groups_.size(); ++g) {
            if (n_present[g] < 0) return fail(KVC_E_ARGUMENT, "present[%zu] has a negative length", g);
            if (n_present[g] && !present[g]) return fail(KVC_E_ARGUMENT, "present[%zu] is NULL", g);
            if (n_present[g]) r->present[g].assign(present[g], present[g] + n_present[g]);
        }
    }
    const int64_t limit = reach_of(*r);
    const Walk device = longest(*r, kDevice, limit);
    const Walk walk = present ? longest(*r, kPresent, limit) : device;
    const Walk pending = arena_.pending() ? longest(*r, kPresent | kPending, limit) : walk;
    *out = {};
    out->hit_tokens = walk.hit;
    out->device_tokens = device.hit;
    out->pending_tokens = std::max(pending.hit, walk.hit);
    out->junction = !full_.empty() && pending.full > pending.hit ? pending.full : 0;
    // The same find has the same losses: only the first lookup of a request that waits looks for what was evicted.
    const std::array<int64_t, 6> of = {r->n_tokens, device.hit, walk.hit, walk.full, pending.hit, pending.full};
    if (!r->losses.current || of != r->losses.of) {
        r->losses = {.of = of,
                     .regions = {},
                     .tick = ++tick_,
                     .order = last_order_,
                     .evictions = arena_.evictions(),
                     .evicted_slabs = arena_.evicted_slabs(),
                     .reached = r->reached,
                     .cleared = r->cleared > 0,
                     .retired = r->retired};
        attribute_losses(*r, walk, pending, &r->losses);
        r->losses.current = true;
    }
    for (size_t i = 0; i < r->losses.n; ++i) {
        const Request::Lost& lost = r->losses.regions[i];
        out->lost[lost.cause] += lost.end - lost.begin;
    }
    r->looked_up = true;
    r->hit = r->hit_left = walk.hit;
    r->hit_version = arena_.version();
    return KVC_OK;
}

}  // namespace kvc
