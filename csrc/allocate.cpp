// Grants: which pages the next tokens of a request are written to. Atomic: counted first, taken after.
#include <algorithm>
#include <utility>

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
    Request* oldest = nullptr;
    for (const Slot& slot : slots_)
        if (slot.request && (!oldest || slot.request->order < oldest->order)) oldest = slot.request.get();
    if (!oldest) return nullptr;
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
    return quiet && holders_ == (r.state == RequestState::kWaiting ? 0 : 1) && loads_.empty() && pinned_ == 0;
}

int32_t Manager::no_space(Request& r) {
    const bool oldest = r.handle == guaranteed_;
    frozen_ |= oldest;
    bool younger = false;
    for (const Slot& slot : slots_)
        younger |= slot.request && slot.request->order > r.order && slot.request->state != RequestState::kWaiting;
    if (younger) r.blockage = KVC_BLOCKED_PREEMPT;
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

// ---- what a first grant takes over ----------------------------------------------------------------------------------

// False where a page of the hit is neither on the device nor in the tier (evicted since the lookup).
bool Manager::gather(const Request& r, Adoption* adoption) const {
    adoption->pages.assign(groups_.size(), {});
    adoption->loads = 0;
    if (!adoption->hit) return true;
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        auto& pages = adoption->pages[static_cast<size_t>(g)];
        auto add = [&](const Digest* key, int64_t index) {
            const int32_t page = key ? arena_.find(g, *key, r.ns) : kNoPage;
            const bool visible = page != kNoPage && arena_.page(g, page).key == Page::kVisible;
            if (visible) {
                pages.push_back(page);
            } else if (key && is_present(r, g, index)) {
                pages.push_back(kNoPage);
                ++adoption->loads;
            } else if (group.draft()) {
                pages.push_back(kHole);
            } else {
                return false;
            }
            return true;
        };
        if (group.state() && !add(digest_at(r, adoption->hit), adoption->hit / grid_ - 1)) return false;
        if (!group.blocks()) continue;
        const int64_t first = group.need_begin(adoption->hit) / group.block_tokens;
        const int64_t end = adoption->hit / group.block_tokens;
        pages.reserve(static_cast<size_t>(end - first));
        Digest key;
        for (int64_t b = first; b < end; ++b)
            if (!add(block_key(r, g, b, &key) ? &key : nullptr, b)) return false;
    }
    return true;
}

// Would the oldest request keep its quota with this hit?
bool Manager::keeps_quota(const Adoption& adoption, const Request& r) const {
    std::vector<int64_t> needs = class_needs(r.max_tokens);
    std::vector<std::vector<bool>> seen(needs.size());
    std::vector<int64_t> pinned(needs.size(), 0);
    for (int32_t g = 0; g < n_groups_; ++g) {
        const auto c = static_cast<size_t>(rules(g).size_class);
        seen[c].resize(static_cast<size_t>(arena_.created_slabs()));
        for (const int32_t page : adoption.pages[static_cast<size_t>(g)]) {
            if (page < 0) continue;
            auto slab = seen[c][static_cast<size_t>(page / pages_per_slab_[c])];
            pinned[c] += !slab;
            slab = true;
        }
    }
    int64_t quota = 0;
    for (size_t c = 0; c < needs.size(); ++c) quota += std::max(needs[c], pinned[c]);
    return quota <= arena_.slabs();
}

// The hit of the last lookup, found again if keys came or went since. The oldest request's is cut to what keeps its quota:
// no hit always does.
Manager::Adoption Manager::adopt(Request& r, bool oldest) const {
    Adoption adoption;
    if (r.looked_up && r.hit_version != arena_.version()) {
        r.hit = longest(r, kPresent, reach_of(r)).hit;
        r.hit_version = arena_.version();
    }
    adoption.hit = r.looked_up ? r.hit : 0;
    if (!gather(r, &adoption)) {
        adoption.hit = 0;
        gather(r, &adoption);
    }
    if (!oldest || pages_per_slab_.size() == 1 || keeps_quota(adoption, r)) return adoption;
    int64_t good = 0, bad = adoption.hit / grid_;  // in grid units
    while (bad - good > 1) {
        const int64_t middle = good + (bad - good) / 2;
        adoption.hit = longest(r, kPresent, middle * grid_).hit;
        (gather(r, &adoption) && keeps_quota(adoption, r) ? good : bad) = middle;
    }
    adoption.hit = longest(r, kPresent, good * grid_).hit;
    if (!gather(r, &adoption)) adoption = {};
    if (adoption.pages.empty()) gather(r, &adoption);
    return adoption;
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
    Demand demand{start,
                  end,
                  make_plan(r, start, end, drafts),
                  {},
                  std::vector<int64_t>(groups_.size(), 0),
                  std::vector<int64_t>(pages_per_slab_.size(), 0)};
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
    std::vector<int64_t> held = demand.classes;
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
    const std::vector<int64_t> needs = class_needs(r.max_tokens);
    int64_t slabs = 0;
    for (size_t c = 0; c < held.size(); ++c)
        slabs += std::max(needs[c], (held[c] + pages_per_slab_[c] - 1) / pages_per_slab_[c]);
    return slabs;
}

// The longest grant up to `end` that the request could ever hold, if it were alone; one token where there is none (states
// of open steps count, and go away).
Manager::Demand Manager::fitting_demand(const Request& r, const Adoption* adoption, int64_t start, int64_t end,
                                        int64_t sure) const {
    end = plan_limit(r, start, end);
    Demand demand = demand_of(r, adoption, start, end, sure);
    if (slabs_after(r, adoption, demand) <= arena_.slabs()) return demand;
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
    if (n_tokens < 0 || n_drafts < 0 || (n_drafts && !n_tokens))
        return fail(KVC_E_ARGUMENT, "a grant of %lld tokens and %lld drafts", static_cast<L>(n_tokens),
                    static_cast<L>(n_drafts));
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
    std::copy(demand.pages.begin(), demand.pages.end(), pages);
    return KVC_OK;
}

// ---- taking ---------------------------------------------------------------------------------------------------------

int32_t Manager::take_page(const Request& r, int32_t group) {
    return r.handle == guaranteed_ ? arena_.take_mine(group) : arena_.take(group);
}

// A waiting request takes over its hit; pages of it that must be loaded are taken.
void Manager::start(Request& r, const Adoption& adoption, Point state, Load* load) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        const auto i = static_cast<size_t>(g);
        Table& table = r.tables[i];
        if (group.blocks()) table.first = group.need_begin(adoption.hit) / group.block_tokens;
        for (const int32_t found : adoption.pages[i]) {
            const int32_t page = found >= 0 ? found : take_page(r, g);
            if (found == kHole) r.holes[i].push_back(table.end());
            (group.state() ? state.pages : table.pages).push_back(page);
        }
        if (group.kind == KVC_PRIVATE)
            for (int32_t n = 0; n < group.request_pages; ++n) table.pages.push_back(take_page(r, g));
        r.keyed_blocks[i] = group.full() ? table.end() : 0;
        r.span_pending[i] = r.span_settled[i] = adoption.hit;
        if (is_declared(r, adoption.hit))
            for (const int32_t page : adoption.pages[i])
                if (page >= 0 && !group.full()) arena_.keep(g, page);
    }
    if (!state.pages.empty()) r.points.push_back(std::move(state));
    ++r.run;
    ++holders_;
    r.present.clear();
    r.looked_up = false;
    r.granted = adoption.hit;
    r.drafts = 0;
    r.state = RequestState::kRunning;
    if (load) start_load(r, adoption, load);
    else r.computed = r.committed = adoption.hit;
}

// The table ends at token `end`, and from the first range on exactly these blocks have pages. Those of an uncommitted grant
// that this one replaces go to other blocks, or back.
void Manager::grant_blocks(Request& r, int32_t group, std::span<const BlockRange> blocks, int64_t end) {
    Table& table = r.tables[static_cast<size_t>(group)];
    const int64_t fresh = rules(group).blocks_upto(r.committed);
    const int64_t past = std::max(rules(group).blocks_upto(end), table.first);
    while (table.end() < past) table.pages.push_back(kNoPage);
    int64_t unwanted = fresh;  // no block before this one has a page to spare
    size_t range = 0;
    auto spare = [&] {
        for (; unwanted < table.end(); ++unwanted) {
            while (range < blocks.size() && blocks[range].end <= unwanted) ++range;
            const bool wanted = range < blocks.size() && blocks[range].first <= unwanted;
            if (!wanted && table.page(unwanted) != kNoPage) return std::exchange(table.at(unwanted), kNoPage);
        }
        return kNoPage;
    };
    for (const BlockRange& wanted : blocks)
        for (int64_t b = wanted.first; b < wanted.end; ++b) {
            if (table.page(b) != kNoPage) continue;
            const int32_t page = spare();
            table.at(b) = page != kNoPage ? page : take_page(r, group);
        }
    for (int32_t page = spare(); page != kNoPage; page = spare()) unused_.push_back({group, page, Arena::kLru});
    table.pages.resize(static_cast<size_t>(past - table.first));
}

// Tables grow to the end; the plan's points get their pages.
void Manager::grant(Request& r, Demand demand) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!rules(g).blocks()) continue;
        const BlockRange all{rules(g).blocks_upto(demand.start), rules(g).blocks_upto(demand.end)};
        if (rules(g).transient) grant_blocks(r, g, demand.blocks[static_cast<size_t>(g)], demand.end);
        else grant_blocks(r, g, {&all, 1}, demand.end);
    }
    std::vector<Point>& plan = demand.plan;
    const std::vector<Point> old = r.plan_open ? std::move(r.plan) : std::vector<Point>{};
    for (size_t s = 0; s < states_.size(); ++s) {
        size_t reused = 0;
        for (size_t i = 0; i < plan.size(); ++i) {
            int32_t page;
            if (reused < old.size()) page = old[reused++].pages[s];
            else if (i == 0 && !r.working.pages.empty()) page = r.working.pages[s];
            else page = take_page(r, states_[s]);
            plan[i].pages.push_back(page);
        }
        // An uncommitted grant's first page is the working state itself where there is one: it stays.
        for (size_t i = reused; i < old.size(); ++i)
            if (i > 0 || r.working.pages.empty()) unused_.push_back({states_[s], old[i].pages[s], Arena::kLru});
    }
    for (const Release& dropped : unused_) {  // no step has touched them
        if (r.handle == guaranteed_) arena_.mine(dropped.group, dropped.page, -1);
        arena_.release(dropped.group, dropped.page);
    }
    unused_.clear();
    r.plan = std::move(plan);
    r.plan_open = !r.plan.empty();
    r.granted = demand.end;
}

// All memory that the call needs is set aside first, so that running out of it changes nothing. Pages of the hit get their
// reference before anything is evicted.
bool Manager::try_grant(Request& r, const Adoption* adoption, Demand demand) {
    std::vector<int64_t> keys(groups_.size(), 0);
    if (adoption && adoption->loads) keys = demand.pages;
    arena_.reserve(demand.classes, keys);
    if (adoption) {
        r.tables.assign(groups_.size(), {});
        r.holes.assign(groups_.size(), {});
        for (auto* cursors : {&r.keyed_blocks, &r.span_pending, &r.span_settled}) cursors->assign(groups_.size(), 0);
        r.points.reserve(r.points.size() + 1);
    }
    for (int32_t g = 0; g < n_groups_; ++g) {
        const auto i = static_cast<size_t>(g);
        const size_t found = adoption ? adoption->pages[i].size() : 0;
        auto& pages = r.tables[i].pages;
        int64_t more = demand.pages[i];
        if (rules(g).transient)  // blocks without a page have their place too
            more =
                rules(g).blocks_upto(demand.end) - (adoption ? rules(g).blocks_upto(demand.start) : r.tables[i].end());
        const size_t wanted = pages.size() + found + static_cast<size_t>(std::max<int64_t>(more, 0));
        if (!rules(g).state() && wanted > pages.capacity()) pages.reserve(std::max(wanted, 2 * pages.size()));
        if (rules(g).draft()) r.holes[i].reserve(found);
    }
    size_t unused = r.plan.size() * states_.size();
    for (int32_t g = 0; g < n_groups_; ++g)
        if (rules(g).blocks())
            unused += static_cast<size_t>(
                std::max<int64_t>(r.tables[static_cast<size_t>(g)].end() - rules(g).blocks_upto(demand.start), 0));
    unused_.reserve(unused);
    for (Point& point : demand.plan) point.pages.reserve(states_.size());
    Point state{.position = adoption ? adoption->hit : 0, .pages = {}, .frozen = true, .wanted = state_set_};
    state.pages.reserve(states_.size());
    std::vector<int32_t> source;
    source.reserve(states_.size());
    if (!r.working.pages.empty()) source = r.working.pages;
    else if (!r.points.empty()) source = r.points.back().pages;
    std::unordered_map<int64_t, Load> fresh;
    if (adoption && adoption->loads) {
        Load& load = fresh[last_load_ + 1];
        load.items.reserve(static_cast<size_t>(adoption->loads));
        load.parents.reserve(static_cast<size_t>(adoption->loads));
        loads_.reserve(loads_.size() + 1);
    }

    const bool oldest = r.handle == guaranteed_;
    int64_t adopted_pages = 0;
    for (size_t g = 0; adoption && g < groups_.size(); ++g)
        adopted_pages += static_cast<int64_t>(adoption->pages[g].size());
    arena_.mark(adopted_pages);
    bool secured = false, counted = false;
    auto each_adopted = [&](auto&& visit) {
        for (int32_t g = 0; adoption && g < n_groups_; ++g)
            for (const int32_t page : adoption->pages[static_cast<size_t>(g)])
                if (page >= 0) visit(g, page);
    };
    try {
        each_adopted([&](int32_t g, int32_t page) { arena_.adopt(g, page); });
        if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, +1); });
        counted = oldest;
        secured = oldest ? arena_.secure_mine(demand.classes) : arena_.secure(demand.classes);
    } catch (...) {
        if (counted) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, -1); });
        arena_.rollback();
        throw;
    }
    if (!secured) {
        if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, -1); });
        arena_.rollback();
        if (adoption) r.tables.clear();
        return false;
    }
    arena_.commit_mark();
    if (adoption) {
        Load* load = fresh.empty() ? nullptr : &loads_.insert(fresh.extract(fresh.begin())).position->second;
        start(r, *adoption, std::move(state), load);
        if (source.empty() && !r.points.empty()) source = r.points.back().pages;
    }
    if (!adoption || !adoption->loads) {
        r.plan_source = std::move(source);
        grant(r, std::move(demand));
    }
    return true;
}

int32_t Manager::allocate(int64_t handle, int64_t n_tokens, int64_t n_drafts, kvc_grant* out) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    const bool oldest = r == guaranteed();
    const bool waiting = r->state == RequestState::kWaiting;
    Adoption adoption;
    if (waiting && (oldest || !frozen_)) adoption = adopt(*r, oldest);
    const Adoption* adopted = waiting ? &adoption : nullptr;
    const int64_t at = waiting ? adoption.hit : r->committed;
    if (const auto status = check_allocate(*r, n_tokens, n_drafts, at)) return status;
    r->blockage = KVC_BLOCKED_NOT;
    if (frozen_ && !oldest) {
        r->blockage = KVC_BLOCKED_FROZEN;
        return KVC_NO_SPACE;
    }
    const int64_t sure = at + (adoption.loads ? 0 : n_tokens);
    Demand demand = fitting_demand(*r, adopted, at, adoption.loads ? sure : sure + n_drafts, sure);
    int64_t end = demand.end;
    bool granted = false;
    try {
        granted = try_grant(*r, adopted, std::move(demand));
        // Nothing but the oldest request itself is left: it gets on, if only by one token.
        while (!granted && oldest && end - at > 1 && alone(*r)) {
            end = at + (end - at) / 2;
            granted = try_grant(*r, adopted, demand_of(*r, adopted, at, end, sure));
        }
    } catch (...) {
        if (waiting) r->tables.clear();
        throw;
    }
    if (!granted) return no_space(*r);
    if (oldest) frozen_ = false;
    r->drafts = std::max<int64_t>(end - sure, 0);
    *out = {waiting ? adoption.hit : 0, at, end, r->load, adoption.loads};
    return KVC_OK;
}

}  // namespace kvc
