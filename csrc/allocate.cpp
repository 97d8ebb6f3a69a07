// Grants: who gets space, what a grant needs, how long it may be. Atomic: counted first, taken after (grant.cpp).
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

// ---- the oldest request ---------------------------------------------------------------------------------------------

// The oldest open request: the arena keeps its quota, and while it waits for space nobody else gets any.
Request* Manager::guaranteed() {
    if (Request* r = find(guaranteed_)) return r;
    frozen_ = false;
    guaranteed_ = 0;
    while (!by_age_.empty() && !find(by_age_.front())) by_age_.pop_front();
    if (by_age_.empty()) return nullptr;
    Request* oldest = find(by_age_.front());
    std::vector<int64_t> needs(pages_per_slab_.size(), 0);
    for (const GroupRules& group : groups_)
        needs[static_cast<size_t>(group.size_class)] += group.need(oldest->max_tokens, grid_);
    guaranteed_ = oldest->handle;
    arena_.guarantee(needs);
    each_page(*oldest, [&](int32_t g, int32_t page) { arena_.mine(g, page, +1); });
    return oldest;
}

// Nothing else holds a page, now or until a step ends.
bool Manager::alone(const Request& r) const {
    const bool quiet = std::all_of(steps_.begin(), steps_.end(),
                                   [](const Step& step) { return step.entries.empty() && step.releases.empty(); });
    return quiet && holders_.size() == (r.state == RequestState::kWaiting ? 0 : 1) && loads_.empty() && pinned_ == 0;
}

int32_t Manager::no_space(Request& r) {
    const bool oldest = r.handle == guaranteed_;
    frozen_ |= oldest;
    if (!holders_.empty() && *holders_.rbegin() > r.order) r.blockage = KVC_BLOCKED_PREEMPT;
    else if (oldest && alone(r)) r.blockage = KVC_BLOCKED_RESTART;
    else r.blockage = KVC_BLOCKED_WAIT;
    return KVC_NO_SPACE;
}

int32_t Manager::blockage(int64_t handle, int32_t* reason) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    *reason = r->blockage;
    return KVC_OK;
}

// ---- counting -------------------------------------------------------------------------------------------------------

// For the blocks from `start` on. Pages of an uncommitted grant go to other blocks.
int64_t Manager::new_pages(const Request& r, int32_t group, const Demand& demand, bool first) const {
    const GroupRules& g = rules(group);
    const int64_t fresh = g.blocks_upto(demand.start);
    int64_t wanted = 0;
    if (!g.transient) wanted = g.blocks_upto(demand.end) - fresh;
    else
        for (const BlockRange& range : demand.blocks[static_cast<size_t>(group)]) wanted += range.end - range.first;
    if (first) return wanted;
    const Table& table = r.tables[static_cast<size_t>(group)];
    return std::max<int64_t>(wanted - (g.transient ? table.count(fresh) : table.end() - fresh), 0);
}

// What a grant up to `end` takes: new pages of each group. Tokens from `sure` on are guesses.
Manager::Demand Manager::demand_of(const Request& r, const Adoption* adoption, int64_t start, int64_t end,
                                   int64_t sure) const {
    const int64_t drafts = std::max<int64_t>(end - sure, 0);
    Demand demand{start, end, make_plan(r, start, end, drafts), {}, {}, {}};
    const auto points = static_cast<int64_t>(demand.plan.size());
    const bool in_place = !adoption && !r.working.pages.empty();
    // Pages of an uncommitted grant are used again; the one in place is the working state's.
    const int64_t reusable = r.plan_open ? static_cast<int64_t>(r.plan.size()) : (in_place ? 1 : 0);
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        int64_t& count = demand.pages[static_cast<size_t>(g)];
        if (group.transient) {
            demand.blocks.resize(groups_.size());
            demand.blocks[static_cast<size_t>(g)] = paged_blocks(r, g, start, sure, end);
        }
        if (adoption) {
            const auto& found = adoption->pages[static_cast<size_t>(g)];
            count = std::count_if(found.begin(), found.end(), [](int32_t page) { return page < 0; });
            if (group.state()) count += points;
            else if (group.blocks()) count += new_pages(r, g, demand, true);
            else count = group.request_pages;
        } else if (group.state()) {
            count = std::max<int64_t>(points - reusable, 0);
        } else if (group.blocks()) {
            count = new_pages(r, g, demand, false);
        }
        demand.classes[static_cast<size_t>(group.size_class)] += count;
    }
    return demand;
}

// Slabs that the request alone would fill after the grant, at least what it was admitted with.
int64_t Manager::slabs_after(const Request& r, const Adoption* adoption, const Demand& demand) const {
    std::array<int64_t, kMostGroups> held = demand.classes;
    for (int32_t g = 0; g < n_groups_; ++g) {
        const auto c = static_cast<size_t>(rules(g).size_class);
        const auto i = static_cast<size_t>(g);
        if (adoption) {
            const auto& found = adoption->pages[i];
            held[c] += std::count_if(found.begin(), found.end(), [](int32_t page) { return page >= 0; });
        } else {
            const Table& table = r.tables[i];
            held[c] += rules(g).transient ? table.count(table.first) : static_cast<int64_t>(table.pages.size());
        }
    }
    if (!adoption) {
        int64_t states = static_cast<int64_t>(r.points.size()) + !r.working.pages.empty();
        if (r.plan_open) states += static_cast<int64_t>(r.plan.size()) - !r.working.pages.empty();
        for (const int32_t g : states_) held[static_cast<size_t>(rules(g).size_class)] += states;
    }
    int64_t slabs = 0;
    for (size_t c = 0; c < pages_per_slab_.size(); ++c)
        slabs += std::max(r.needs[c], (held[c] + pages_per_slab_[c] - 1) / pages_per_slab_[c]);
    return slabs;
}

// The longest grant up to `end` that the request could ever hold, if it were alone; one token where there is none (states
// of open steps count, and go away).
Manager::Demand Manager::fitting_demand(const Request& r, const Adoption* adoption, int64_t start, int64_t end,
                                        int64_t sure) const {
    if (end - start > 1) end = plan_limit(r, start, end);
    Demand demand = demand_of(r, adoption, start, end, sure);
    if (end - start <= 1 || slabs_after(r, adoption, demand) <= arena_.slabs()) return demand;
    int64_t good = std::min(start + 1, end), bad = end;
    while (bad - good > 1) {
        const int64_t middle = good + (bad - good) / 2;
        demand = demand_of(r, adoption, start, middle, sure);
        (slabs_after(r, adoption, demand) <= arena_.slabs() ? good : bad) = middle;
    }
    return demand_of(r, adoption, start, good, sure);
}

int32_t Manager::check_allocate(const Request& r, int64_t n_tokens, int64_t n_drafts, int64_t start) const {
    if (r.state == RequestState::kLoading)
        return fail(KVC_E_STATE, "request %lld waits for load %lld: end it first", static_cast<L>(r.handle),
                    static_cast<L>(r.load));
    if (!arena_.moves().empty() && static_cast<int64_t>(arena_.moves().size()) > most_untaken())
        return fail(KVC_E_STATE, "%zu moves of pages wait: take them, and copy, after every allocate",
                    arena_.moves().size());
    if (n_tokens < 0 || n_drafts < 0 || (n_drafts && !n_tokens))
        return fail(KVC_E_ARGUMENT, "a grant of %lld tokens and %lld drafts", static_cast<L>(n_tokens),
                    static_cast<L>(n_drafts));
    if (n_drafts > kMostDrafts)
        return fail(KVC_E_ARGUMENT, "%lld drafts: at most %lld fit into one grant", static_cast<L>(n_drafts),
                    static_cast<L>(kMostDrafts));
    if (n_tokens > r.max_tokens - start || n_drafts > r.max_tokens - start - n_tokens)
        return fail(KVC_E_ARGUMENT,
                    "%lld tokens and %lld drafts from token %lld on were asked for, but max_tokens is %lld: raise it in"
                    " open()",
                    static_cast<L>(n_tokens), static_cast<L>(n_drafts), static_cast<L>(start),
                    static_cast<L>(r.max_tokens));
    return KVC_OK;
}

int32_t Manager::need(int64_t handle, int64_t n_tokens, int64_t n_drafts, int64_t* pages) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    const bool waiting = r->state == RequestState::kWaiting;
    Adoption adoption;
    if (waiting) adoption = adopt(*r, r == guaranteed());
    const int64_t start = waiting ? adoption.hit : r->committed;
    if (const auto status = check_allocate(*r, n_tokens, n_drafts, start)) return status;
    const int64_t sure = start + (adoption.loads ? 0 : n_tokens);
    const int64_t end = adoption.loads ? sure : sure + n_drafts;
    const Demand demand = fitting_demand(*r, waiting ? &adoption : nullptr, start, end, sure);
    std::copy_n(demand.pages.begin(), n_groups_, pages);
    return KVC_OK;
}

// Grants that need no plan: of few tokens, for a running request that goes on in the states that it has.
Manager::Granted Manager::grant_on(Request& r, bool oldest, int64_t end, int64_t drafts) {
    const int64_t at = r.committed;
    if (drafts || r.granted != at) return kNeedsPlan;
    if (!states_.empty() && (end == at || end / grid_ != at / grid_ || r.working.pages.empty())) return kNeedsPlan;
    const bool within = (at + piece_ - 1) / piece_ == (end + piece_ - 1) / piece_;  // the blocks that it has
    if (!within && (end > at + 1 || unpaged_tokens_)) return kNeedsPlan;
    std::vector<int32_t> pages;  // memory first
    if (!states_.empty()) {
        (r.plan.empty() ? pages : r.plan[0].pages).reserve(states_.size());
        r.plan.reserve(1);
        r.plan_source.reserve(states_.size());
    }
    if (!within && !take_next_blocks(r, oldest)) return kNoRoom;
    if (!states_.empty()) {
        if (r.plan.empty()) r.plan.push_back({.position = end, .pages = std::move(pages)});
        r.plan.resize(1);
        Point& point = r.plan[0];
        point.position = end;
        point.pages = r.working.pages;
        point.frozen = point.declared = false;
        point.wanted = 0;
        r.plan_source = r.working.pages;
        r.plan_open = true;
    }
    r.granted = end;
    r.drafts = 0;
    return kGranted;
}

// The block of the token at r.granted, for each group in which that is the first one. False: there is no space, and nothing is
// changed.
bool Manager::take_next_blocks(Request& r, bool oldest) {
    std::array<int64_t, kMostGroups> pages{};  // of each class
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!starts_block(r, g)) continue;
        ++pages[static_cast<size_t>(rules(g).size_class)];
        make_room(r.tables[static_cast<size_t>(g)].pages, 1);
    }
    const auto wanted = std::span(pages).first(pages_per_slab_.size());
    arena_.reserve(wanted, {});
    arena_.taken_by(r.handle, r.session);
    if (!(oldest ? arena_.secure_mine(wanted) : arena_.secure(wanted))) return false;
    for (int32_t g = 0; g < n_groups_; ++g)
        if (starts_block(r, g)) r.tables[static_cast<size_t>(g)].pages.push_back(take_page(r, g));
    return true;
}

// ---- the call -----------------------------------------------------------------------------------------------------

int32_t Manager::allocate(int64_t handle, int64_t n_tokens, int64_t n_drafts, kvc_grant* out) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    const bool oldest = r == guaranteed();
    if (r->state != RequestState::kRunning || (frozen_ && !oldest))
        return grant_beyond(*r, oldest, n_tokens, n_drafts, out);
    const int64_t at = r->committed;
    if (const auto status = check_allocate(*r, n_tokens, n_drafts, at)) return status;
    const Granted granted = grant_on(*r, oldest, at + n_tokens, n_drafts);
    if (granted == kNeedsPlan) return grant_beyond(*r, oldest, n_tokens, n_drafts, out);
    if (granted == kNoRoom) return no_space(*r);
    r->blockage = KVC_BLOCKED_NOT;
    if (oldest) frozen_ = false;
    *out = {0, at, r->granted, 0, 0};
    return KVC_OK;
}

// With a plan: first grants, drafts, more than one new block, snapshots. Or while the oldest request waits for space.
int32_t Manager::grant_beyond(Request& r, bool oldest, int64_t n_tokens, int64_t n_drafts, kvc_grant* out) {
    const bool waiting = r.state == RequestState::kWaiting;
    Adoption adoption;
    if (waiting && (oldest || !frozen_)) adoption = adopt(r, oldest);
    const Adoption* adopted = waiting ? &adoption : nullptr;
    const int64_t at = waiting ? adoption.hit : r.committed;
    if (const auto status = check_allocate(r, n_tokens, n_drafts, at)) return status;
    r.blockage = KVC_BLOCKED_NOT;
    if (frozen_ && !oldest) {
        r.blockage = KVC_BLOCKED_FROZEN;
        return KVC_NO_SPACE;
    }
    const int64_t sure = at + (adoption.loads ? 0 : n_tokens);
    Demand demand = fitting_demand(r, adopted, at, adoption.loads ? sure : sure + n_drafts, sure);
    int64_t end = demand.end;
    bool granted = false;
    arena_.taken_by(r.handle, r.session);
    try {
        granted = try_grant(r, adopted, std::move(demand));
        // Nothing but the oldest request itself is left: it gets on, if only by one token.
        while (!granted && oldest && end - at > 1 && alone(r)) {
            end = at + (end - at) / 2;
            granted = try_grant(r, adopted, demand_of(r, adopted, at, end, sure));
        }
    } catch (...) {
        if (waiting) r.tables.clear();
        throw;
    }
    if (!granted) return no_space(r);
    if (oldest) frozen_ = false;
    r.drafts = std::max<int64_t>(end - sure, 0);
    *out = {waiting ? adoption.hit : 0, at, end, r.load, adoption.loads};
    return KVC_OK;
}

}  // namespace kvc
