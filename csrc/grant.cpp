// Taking the pages of a grant. All memory is set aside first, so that running out of it changes nothing.
#include <algorithm>
#include <utility>

#include "manager.h"

namespace kvc {

int32_t Manager::take_page(const Request& r, int32_t group) {
    return r.handle == guaranteed_ ? arena_.take_mine(group) : arena_.take(group);
}

// A waiting request takes over its hit; pages of it that must be loaded are taken.
void Manager::start(Request& r, const Adoption& adoption, Point state, Load* load, Holders::node_type holder) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        const auto i = static_cast<size_t>(g);
        Table& table = r.tables[i];
        if (group.blocks()) table.first = group.need_begin(adoption.hit) / group.block_tokens;
        for (const int32_t found : adoption.pages[i]) {
            const int32_t page = found >= 0 ? found : take_page(r, g);
            if (found == kHole) table.holes.push_back(table.end());
            (group.state() ? state.pages : table.pages).push_back(page);
        }
        if (group.kind == KVC_PRIVATE)
            for (int32_t n = 0; n < group.request_pages; ++n) table.pages.push_back(take_page(r, g));
        table.keyed = group.full() ? table.end() : 0;
        table.pending = table.confirmed = table.settled = adoption.hit;
        if (is_declared(r, adoption.hit))
            for (const int32_t page : adoption.pages[i])
                if (page >= 0 && !group.full()) arena_.keep(g, page);
    }
    if (!state.pages.empty()) r.points.push_back(std::move(state));
    r.settle_at = {};
    ++r.run;
    holders_.insert(std::move(holder));
    r.present.clear();
    for (auto& known : r.resident) known = {};
    r.served = {};
    r.losses.current = false;
    r.started = ++tick_;
    r.cleared = 0;
    r.looked_up = false;
    r.granted = adoption.hit;
    r.drafts = 0;
    r.state = RequestState::kRunning;
    if (load) start_load(r, adoption, load);
    else r.computed = r.committed = adoption.hit;
}

// The table ends at token `end`. Pages of an uncommitted grant that this one replaces stay, or go back: with
// the step that may compute it.
void Manager::grant_blocks(Request& r, int32_t group, int64_t end) {
    Table& table = r.tables[static_cast<size_t>(group)];
    const int64_t past = std::max(rules(group).blocks_upto(end), table.first);
    const int64_t more = past - table.end();
    for (int64_t b = past; b < table.end(); ++b) unused_.push_back({group, table.page(b), Arena::kLru});
    table.pages.resize(static_cast<size_t>(past - table.first));
    if (more > 0) arena_.take_run(group, more, r.handle == guaranteed_, &table.at(past - more));
}

// The same for a transient group: from the first range on exactly these blocks have pages. Those of an uncommitted grant go
// to other blocks, or back.
void Manager::grant_ranges(Request& r, int32_t group, std::span<const BlockRange> blocks, int64_t end) {
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
        if (rules(g).transient) grant_ranges(r, g, demand.blocks[static_cast<size_t>(g)], demand.end);
        else grant_blocks(r, g, demand.end);
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
    for (const Release& dropped : unused_) release(r, dropped.group, dropped.page, dropped.list);
    unused_.clear();
    r.plan = std::move(plan);
    r.plan_open = !r.plan.empty();
    r.granted = demand.end;
}

// All memory that a grant needs, so that running out of it changes nothing.
void Manager::reserve_grant(Request& r, const Adoption* adoption, Demand* demand) {
    const auto groups = static_cast<size_t>(adoption && adoption->loads ? n_groups_ : 0);  // that get keys at once
    arena_.reserve(std::span(demand->classes).first(pages_per_slab_.size()), std::span(demand->pages).first(groups));
    if (adoption) {
        r.tables.assign(groups_.size(), {});
        r.points.reserve(r.points.size() + 1);
    }
    size_t unused = r.plan.size() * states_.size();
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        const auto i = static_cast<size_t>(g);
        const size_t found = adoption ? adoption->pages[i].size() : 0;
        Table& table = r.tables[i];
        int64_t more = demand->pages[i];
        if (group.transient)  // blocks without a page have their place too
            more = group.blocks_upto(demand->end) - (adoption ? group.blocks_upto(demand->start) : table.end());
        const size_t wanted = table.pages.size() + found + static_cast<size_t>(std::max<int64_t>(more, 0));
        if (!group.state() && wanted > table.pages.capacity())
            table.pages.reserve(std::max(wanted + wanted / 8 + 8, 2 * table.pages.size()));  // it will decode, too
        if (group.draft()) table.holes.reserve(found);
        if (group.blocks())
            unused += static_cast<size_t>(std::max<int64_t>(table.end() - group.blocks_upto(demand->start), 0));
    }
    unused_.reserve(unused);
    if (Step* step = fence_of(r)) make_room(step->releases, unused);
    for (Point& point : demand->plan) point.pages.reserve(states_.size());
}

// References on the pages of the hit, before anything is evicted, and space for the new ones; or nothing at all.
bool Manager::secure_grant(const Request& r, const Adoption* adoption, const Demand& demand) {
    const bool oldest = r.handle == guaranteed_;
    auto each_adopted = [&](auto&& visit) {
        for (int32_t g = 0; adoption && g < n_groups_; ++g)
            for (const int32_t page : adoption->pages[static_cast<size_t>(g)])
                if (page >= 0) visit(g, page);
    };
    size_t adopted = 0;
    for (int32_t g = 0; adoption && g < n_groups_; ++g) adopted += adoption->pages[static_cast<size_t>(g)].size();
    arena_.mark(static_cast<int64_t>(adopted));
    auto undo = [&] {
        if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, -1); });
        arena_.rollback();
    };
    for (int32_t g = 0; adoption && g < n_groups_; ++g) arena_.adopt_run(g, adoption->pages[static_cast<size_t>(g)]);
    if (oldest) each_adopted([&](int32_t g, int32_t page) { arena_.mine(g, page, +1); });
    const auto pages = std::span(demand.classes).first(pages_per_slab_.size());
    try {
        if (oldest ? arena_.secure_mine(pages) : arena_.secure(pages)) {
            arena_.commit_mark();
            return true;
        }
    } catch (...) {
        undo();
        throw;
    }
    undo();
    return false;
}

bool Manager::try_grant(Request& r, const Adoption* adoption, Demand demand) {
    reserve_grant(r, adoption, &demand);
    Point state{.position = adoption ? adoption->hit : 0, .pages = {}, .frozen = true, .wanted = state_set_};
    state.pages.reserve(states_.size());
    std::vector<int32_t> source;
    source.reserve(states_.size());
    if (!r.working.pages.empty()) source = r.working.pages;
    else if (!r.points.empty()) source = r.points.back().pages;
    Holders holder;  // what is inserted later cannot fail
    if (adoption) holder.insert(r.order);
    std::unordered_map<int64_t, Load> fresh;
    if (adoption && adoption->loads) {
        Load& load = fresh[last_load_ + 1];
        load.items.reserve(static_cast<size_t>(adoption->loads));
        load.parents.reserve(static_cast<size_t>(adoption->loads));
        loads_.reserve(loads_.size() + 1);
        users_.reserve(1);
    }
    if (!secure_grant(r, adoption, demand)) {
        if (adoption) r.tables.clear();
        return false;
    }
    if (adoption) {
        Load* load = fresh.empty() ? nullptr : &loads_.insert(fresh.extract(fresh.begin())).position->second;
        start(r, *adoption, std::move(state), load, holder.extract(holder.begin()));
        if (source.empty() && !r.points.empty()) source = r.points.back().pages;
    }
    if (!adoption || !adoption->loads) {
        r.plan_source = std::move(source);
        grant(r, std::move(demand));
    }
    return true;
}

}  // namespace kvc
