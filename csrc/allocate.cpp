// Grants: which pages the next tokens of a request are written to. Atomic: counted first, taken after.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

namespace {
constexpr int64_t kMostStops = int64_t{1} << 24;
}

// ---- where states are snapshotted -----------------------------------------------------------------------------------

bool Manager::is_declared(const Request& r, int64_t position) const {
    return std::any_of(r.retained.begin(), r.retained.end(),
                       [&](const Retained& retained) { return retained.position == position && retained.kept; });
}

// Frozen points in (start, end], ascending: the policy's, and the last grid point of the range.
void Manager::add_stops(const Request& r, int64_t start, int64_t end, std::vector<Point>* points) const {
    if (states_.empty()) return;
    auto add = [&](int64_t position, bool policy, bool kept) {
        if (position > start && position <= end)
            points->push_back({.position = position, .pages = {}, .frozen = true, .policy = policy, .kept = kept});
    };
    for (const Retained& retained : r.retained) add(retained.position, true, retained.kept);
    if (r.interval)
        for (int64_t p = (start / r.interval + 1) * r.interval; p <= end; p += r.interval) add(p, true, false);
    add(end / grid_ * grid_, false, false);
    std::stable_sort(points->begin(), points->end(),
                     [](const Point& a, const Point& b) { return a.position < b.position; });
    size_t kept = 0;
    for (Point& point : *points) {
        if (kept && (*points)[kept - 1].position == point.position) {
            (*points)[kept - 1].policy |= point.policy;
            (*points)[kept - 1].kept |= point.kept;
        } else {
            (*points)[kept++] = std::move(point);
        }
    }
    points->resize(kept);
}

int32_t Manager::stops(int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (start < 0 || end < start || end > r->max_tokens)
        return fail(KVC_E_ARGUMENT, "range (%lld, %lld] does not ascend between 0 and max_tokens (%lld)",
                    static_cast<long long>(start), static_cast<long long>(end), static_cast<long long>(r->max_tokens));
    if (r->interval && (end - start) / r->interval > kMostStops)
        return fail(KVC_E_ARGUMENT, "more than %lld stops in (%lld, %lld]: ask for a shorter range",
                    static_cast<long long>(kMostStops), static_cast<long long>(start), static_cast<long long>(end));
    std::vector<Point> points;
    add_stops(*r, start, end, &points);
    *n = static_cast<int64_t>(points.size());
    for (int64_t i = 0; i < std::min(*n, cap); ++i) positions[i] = points[static_cast<size_t>(i)].position;
    return KVC_OK;
}

// The longest grant up to `end` whose states can ever be held at one time: one page for each point of the plan, and one for
// the state that the request has. So a request that is alone always gets on, chunk by chunk.
std::vector<Point> Manager::make_plan(const Request& r, int64_t start, int64_t* end) const {
    std::vector<Point> plan;
    if (states_.empty() || *end == start) return plan;
    int64_t most = kMostStops;
    for (const int32_t group : states_) most = std::min(most, pools_[static_cast<size_t>(group)].capacity());
    if (start > 0) most = std::max<int64_t>(most - 1, 1);
    if (r.interval && (*end - start) / r.interval > most) *end = (start / r.interval + most) * r.interval;
    add_stops(r, start, *end, &plan);
    if (plan.empty() || plan.back().position < *end) plan.push_back({.position = *end, .pages = {}});
    if (static_cast<int64_t>(plan.size()) > most) plan.resize(static_cast<size_t>(most));
    *end = plan.back().position;
    return plan;
}

// ---- what a first grant takes over ----------------------------------------------------------------------------------

// False where a page of the hit is neither on the device nor in the tier (evicted since the lookup).
bool Manager::gather(const Request& r, Adoption* adoption) const {
    adoption->pages.assign(groups_.size(), {});
    adoption->loads = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
        const Pool& pool = pools_[g];
        const auto group = static_cast<int32_t>(g);
        auto add = [&](const Digest& digest, int64_t index) {
            const int32_t page = pool.find(digest, r.ns);
            const bool visible = page != kNoPage && pool.page(page).key == Page::kVisible;
            if (!visible && !is_present(r, group, index)) return false;
            adoption->pages[g].push_back(visible ? page : kNoPage);
            adoption->loads += !visible;
            return true;
        };
        if (groups_[g].kind == KVC_RECURRENT) {
            if (adoption->hit && !add(*digest_at(r, adoption->hit), adoption->hit / grid_ - 1)) return false;
            continue;
        }
        const DigestRun run = run_of(r, group, adoption->hit);
        adoption->pages[g].reserve(static_cast<size_t>(run.count));
        for (int64_t i = 0; i < run.count; ++i)
            if (!add(run.at(i), i)) return false;
    }
    return true;
}

Manager::Adoption Manager::adopt(Request& r) const {
    Adoption adoption;
    if (!r.looked_up) {
        gather(r, &adoption);
        return adoption;
    }
    if (r.hit_version != version()) r.hit = longest(r, kPresent).hit;
    r.hit_version = version();
    adoption.hit = r.hit;
    if (!gather(r, &adoption)) {
        adoption.hit = 0;
        gather(r, &adoption);
    }
    return adoption;
}

// ---- counting -------------------------------------------------------------------------------------------------------

// New pages of each group for a grant that ends at `end`.
void Manager::count_new(const Request& r, const Adoption* adoption, size_t plan_points, int64_t end,
                        std::vector<int64_t>* pages) const {
    pages->assign(groups_.size(), 0);
    const bool in_place = !adoption && !r.working.pages.empty();
    // Pages of an uncommitted grant are used again; the one in place is the working state's.
    const size_t reusable = r.plan_open ? r.plan.size() : (in_place ? 1 : 0);
    for (size_t g = 0; g < groups_.size(); ++g) {
        int64_t& count = (*pages)[g];
        if (groups_[g].kind == KVC_RECURRENT) {
            if (adoption) count = static_cast<int64_t>(plan_points);
            else count = std::max<int64_t>(static_cast<int64_t>(plan_points) - static_cast<int64_t>(reusable), 0);
            if (adoption && !adoption->pages[g].empty() && adoption->pages[g][0] == kNoPage) ++count;
            continue;
        }
        const int64_t blocks = (end + groups_[g].block_tokens - 1) / groups_[g].block_tokens;
        if (adoption) {
            const auto& found = adoption->pages[g];
            count = blocks - static_cast<int64_t>(found.size()) + std::count(found.begin(), found.end(), kNoPage);
        } else {
            count = std::max<int64_t>(blocks - static_cast<int64_t>(r.tables[g].size()), 0);
        }
    }
}

// Pages of the hit that are cached now cannot be evicted by the same call.
bool Manager::fits(const Adoption* adoption, const std::vector<int64_t>& pages) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
        int64_t available = pools_[g].available();
        if (adoption)
            for (const int32_t page : adoption->pages[g])
                available -= page != kNoPage && pools_[g].page(page).refs == 0;
        if (pages[g] > available) return false;
    }
    return true;
}

int32_t Manager::check_allocate(const Request& r, int64_t n_tokens, int64_t start) const {
    using L = long long;
    if (r.state == RequestState::kLoading)
        return fail(KVC_E_STATE, "request %lld waits for load %lld: end it first", static_cast<L>(r.handle),
                    static_cast<L>(r.load));
    if (n_tokens < 0) return fail(KVC_E_ARGUMENT, "a grant of %lld tokens", static_cast<L>(n_tokens));
    if (n_tokens > r.max_tokens - start)
        return fail(KVC_E_ARGUMENT,
                    "%lld tokens from token %lld on were asked for, but max_tokens is %lld: raise it in open()",
                    static_cast<L>(n_tokens), static_cast<L>(start), static_cast<L>(r.max_tokens));
    return KVC_OK;
}

int32_t Manager::need(int64_t handle, int64_t n_tokens, int64_t* pages) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    std::vector<int64_t> counts;
    const bool waiting = r->state == RequestState::kWaiting;
    Adoption adoption;
    if (waiting) adoption = adopt(*r);
    const int64_t start = waiting ? adoption.hit : r->committed;
    if (const auto status = check_allocate(*r, n_tokens, start)) return status;
    int64_t end = start + (adoption.loads ? 0 : n_tokens);
    const size_t points = make_plan(*r, start, &end).size();
    count_new(*r, waiting ? &adoption : nullptr, points, end, &counts);
    std::copy(counts.begin(), counts.end(), pages);
    return KVC_OK;
}

// ---- taking ---------------------------------------------------------------------------------------------------------

// All memory that the call needs is set aside first, so that running out of it changes nothing.
void Manager::start(Request& r, const Adoption& adoption) {
    std::vector<std::vector<int32_t>> tables(groups_.size());
    std::vector<int64_t> keyed_blocks(groups_.size(), 0);
    Point state{.position = adoption.hit, .pages = {}, .frozen = true, .policy = true};
    state.pages.reserve(states_.size());
    r.points.reserve(r.points.size() + 1);
    for (size_t g = 0; g < groups_.size(); ++g)
        if (groups_[g].kind == KVC_FULL) tables[g].reserve(adoption.pages[g].size());
    Load fresh;
    fresh.items.reserve(static_cast<size_t>(adoption.loads));
    Load* load = adoption.loads ? &(loads_[last_load_ + 1] = std::move(fresh)) : nullptr;

    for (size_t g = 0; g < groups_.size(); ++g)  // before anything is taken, so that nothing of the hit is evicted
        for (const int32_t page : adoption.pages[g])
            if (page != kNoPage) pools_[g].adopt(page);
    if (is_declared(r, adoption.hit))
        for (const int32_t g : states_)
            if (adoption.hit && adoption.pages[static_cast<size_t>(g)][0] != kNoPage)
                pools_[static_cast<size_t>(g)].keep(adoption.pages[static_cast<size_t>(g)][0]);
    for (size_t g = 0; g < groups_.size(); ++g) {
        auto& target = groups_[g].kind == KVC_RECURRENT ? state.pages : tables[g];
        for (const int32_t page : adoption.pages[g]) target.push_back(page != kNoPage ? page : pools_[g].take());
        if (groups_[g].kind == KVC_FULL) keyed_blocks[g] = static_cast<int64_t>(adoption.pages[g].size());
    }
    if (!state.pages.empty()) r.points.push_back(std::move(state));
    ++r.run;
    r.tables = std::move(tables);
    r.keyed_blocks = std::move(keyed_blocks);
    r.present.clear();
    r.looked_up = false;
    r.granted = adoption.hit;
    r.state = RequestState::kRunning;
    if (load) start_load(r, adoption, load);
    else r.computed = r.committed = adoption.hit;
}

// Attention tables grow to `end`; the plan's points get their pages.
void Manager::grant(Request& r, std::vector<Point> plan, int64_t end) {
    std::vector<int32_t> source;
    if (!r.working.pages.empty()) source = r.working.pages;
    else if (!r.points.empty()) source = r.points.back().pages;
    for (Point& point : plan) point.pages.reserve(states_.size());
    for (const int32_t g : attention_) {
        auto& table = r.tables[static_cast<size_t>(g)];
        const int64_t block = groups_[static_cast<size_t>(g)].block_tokens;
        const auto blocks = static_cast<size_t>((end + block - 1) / block);
        if (blocks > table.capacity()) table.reserve(std::max(blocks, 2 * table.size()));
    }

    for (const int32_t g : attention_) {
        auto& table = r.tables[static_cast<size_t>(g)];
        const int64_t block = groups_[static_cast<size_t>(g)].block_tokens;
        while (static_cast<int64_t>(table.size()) * block < end) table.push_back(pools_[static_cast<size_t>(g)].take());
    }
    for (const int32_t g : attention_) {  // what a longer grant that was not committed had taken
        auto& table = r.tables[static_cast<size_t>(g)];
        const int64_t block = groups_[static_cast<size_t>(g)].block_tokens;
        for (; static_cast<int64_t>(table.size() - 1) * block >= end && !table.empty(); table.pop_back())
            pools_[static_cast<size_t>(g)].release(table.back());
    }
    const std::vector<Point> old = r.plan_open ? std::move(r.plan) : std::vector<Point>{};
    r.plan_source = std::move(source);
    for (size_t s = 0; s < states_.size(); ++s) {
        const auto g = static_cast<size_t>(states_[s]);
        size_t reused = 0;
        for (size_t i = 0; i < plan.size(); ++i) {
            int32_t page;
            if (reused < old.size()) page = old[reused++].pages[s];
            else if (i == 0 && !r.working.pages.empty()) page = r.working.pages[s];
            else page = pools_[g].take();
            plan[i].pages.push_back(page);
        }
        // An uncommitted grant's first page is the working state itself where there is one: it stays.
        for (size_t i = reused; i < old.size(); ++i)
            if (i > 0 || r.working.pages.empty()) pools_[g].release(old[i].pages[s]);
    }
    r.plan = std::move(plan);
    r.plan_open = !r.plan.empty();
    r.granted = end;
}

int32_t Manager::allocate(int64_t handle, int64_t n_tokens, kvc_grant* out) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    const bool waiting = r->state == RequestState::kWaiting;
    Adoption adoption;
    if (waiting) adoption = adopt(*r);
    const int64_t start_at = waiting ? adoption.hit : r->committed;
    if (const auto status = check_allocate(*r, n_tokens, start_at)) return status;
    int64_t end = start_at + (adoption.loads ? 0 : n_tokens);
    std::vector<Point> plan = make_plan(*r, start_at, &end);
    std::vector<int64_t> pages;
    count_new(*r, waiting ? &adoption : nullptr, plan.size(), end, &pages);
    if (!fits(waiting ? &adoption : nullptr, pages)) return KVC_NO_SPACE;
    for (size_t g = 0; g < groups_.size(); ++g) pools_[g].reserve(pages[g], adoption.loads ? pages[g] : 0);
    if (waiting) start(*r, adoption);
    if (!adoption.loads) grant(*r, std::move(plan), end);
    *out = {waiting ? adoption.hit : 0, start_at, end, r->load, adoption.loads};
    return KVC_OK;
}

}  // namespace kvc
