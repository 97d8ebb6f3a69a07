// Where states are snapshotted: what the policy keeps, and the last grid point of every grant.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

namespace {
template <typename T>
void sort_by_position(std::vector<T>* items) {
    std::stable_sort(items->begin(), items->end(), [](const T& a, const T& b) { return a.position < b.position; });
}
}  // namespace

bool Manager::is_declared(const Request& r, int64_t position) const {
    const auto at = std::ranges::lower_bound(r.kept, position, {}, &Kept::position);
    return at != r.kept.end() && at->position == position && at->declared;
}

// The positions that the policy named, and every group's multiples.
void Manager::add_kept_between(const Request& r, int64_t start, int64_t end, GroupSet among,
                               std::vector<Kept>* out) const {
    std::vector<Kept>& all = *out;
    for (auto at = std::ranges::upper_bound(r.kept, start, {}, &Kept::position);
         at != r.kept.end() && at->position <= end; ++at)
        if (at->groups & among) all.push_back({at->position, at->groups & among, at->declared});
    GroupSet left = among;  // whose intervals are still to come
    for (int32_t g = 0; g < n_groups_; ++g) {
        const int64_t interval = r.intervals[static_cast<size_t>(g)];
        if (!interval || !has(left, g)) continue;
        GroupSet groups = 0;  // one pass for each different interval
        for (int32_t h = g; h < n_groups_; ++h)
            if (has(left, h) && r.intervals[static_cast<size_t>(h)] == interval) groups |= GroupSet{1} << h;
        left &= ~groups;
        for (int64_t p = (start / interval + 1) * interval; p <= end; p += interval) all.push_back({p, groups, false});
    }
    sort_by_position(&all);
    size_t kept = 0;
    for (const Kept& item : all) {
        if (kept && all[kept - 1].position == item.position) {
            all[kept - 1].groups |= item.groups;
            all[kept - 1].declared |= item.declared;
        } else {
            all[kept++] = item;
        }
    }
    all.resize(kept);
}

// Snapshots in (start, end]: where a state group keeps one, and the last grid point of the range.
std::vector<Point> Manager::make_points(const Request& r, int64_t start, int64_t end) const {
    std::vector<Point> points;
    if (states_.empty()) return points;
    end = std::min(end, r.key_limit / grid_ * grid_);  // without a key a snapshot is of no use
    std::vector<Kept> all;
    kept_between(r, start, end, &all);
    for (const Kept& kept : all) {
        const GroupSet wanted = kept.groups & state_set_;
        if (!wanted) continue;
        points.push_back({.position = kept.position, .pages = {}, .frozen = true, .wanted = wanted});
        points.back().declared = kept.declared;
    }
    const int64_t last = end / grid_ * grid_;
    if (last > start && (points.empty() || points.back().position < last))
        points.push_back({.position = last, .pages = {}, .frozen = true});
    return points;
}

// How far a plan may reach without more snapshots than could ever be held.
int64_t Manager::plan_limit(const Request& r, int64_t start, int64_t end) const {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const int64_t interval = r.intervals[static_cast<size_t>(g)];
        if (!interval || !(rules(g).state() || rules(g).transient)) continue;
        const int64_t pages = arena_.slabs() * pages_per_slab_[static_cast<size_t>(rules(g).size_class)];
        const int64_t most = std::min(pages, kMostStops);
        if ((end - start) / interval > most) end = (start / interval + most) * interval;
    }
    return end;
}

// Snapshots, the working state at the end, and a state after each token that is a guess: any may be the last that stands, so
// each grid point among them is a snapshot.
std::vector<Point> Manager::make_plan(const Request& r, int64_t start, int64_t end, int64_t drafts) const {
    std::vector<Point> plan;
    if (states_.empty() || end == start) return plan;
    const int64_t sure = end - drafts;
    plan = make_points(r, start, sure);
    if (sure > start && (plan.empty() || plan.back().position < sure)) plan.push_back({.position = sure, .pages = {}});
    if (!drafts) return plan;
    std::vector<Point> guesses = make_points(r, sure, end);
    for (int64_t at = sure + 1; at <= end; ++at) {
        const auto found =
            std::find_if(guesses.begin(), guesses.end(), [&](const Point& p) { return p.position == at; });
        if (found != guesses.end()) plan.push_back(std::move(*found));
        else plan.push_back({.position = at, .pages = {}, .frozen = at % grid_ == 0 && at <= r.key_limit});
    }
    return plan;
}

// Of a transient group: the blocks from token `start` on that a grant gives a page, tokens from `sure` on being guesses.
// Those that are read at a kept position, at the last grid point whose tokens are known (any grid point beyond may become
// the last one), and from `sure` on. Ascending and apart.
std::vector<BlockRange> Manager::paged_blocks(const Request& r, int32_t group, int64_t start, int64_t sure,
                                              int64_t end) const {
    const GroupRules& g = rules(group);
    std::vector<BlockRange> ranges;
    auto add = [&](int64_t begin, int64_t position) {
        const int64_t first =
            std::max(begin / g.block_tokens, ranges.empty() ? g.blocks_upto(start) : ranges.back().end);
        const int64_t past = g.blocks_upto(position);
        if (first >= past) return;
        if (!ranges.empty() && ranges.back().end == first) ranges.back().end = past;
        else ranges.push_back({first, past});
    };
    sure = std::min(sure, end);
    const int64_t limit = std::min(sure, r.key_limit);
    const int64_t last = std::min(limit, r.n_tokens) / grid_ * grid_;
    std::vector<Kept> kept;
    kept_between(r, start, limit, &kept);
    for (const Kept& at : kept)
        if (has(at.groups, group) && at.position < last) add(g.need_begin(at.position), at.position);
    for (int64_t p = std::max(last, start); p <= limit; p = (p / grid_ + 1) * grid_) add(g.need_begin(p), p);
    add(g.need_begin(sure), end);
    return ranges;
}

int32_t Manager::stops(int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (start < 0 || end < start || end > r->max_tokens)
        return fail(KVC_E_ARGUMENT, "range (%lld, %lld] does not ascend between 0 and max_tokens (%lld)",
                    static_cast<long long>(start), static_cast<long long>(end), static_cast<long long>(r->max_tokens));
    for (const int32_t g : states_) {
        const int64_t interval = r->intervals[static_cast<size_t>(g)];
        if (interval && (end - start) / interval > kMostStops)
            return fail(KVC_E_ARGUMENT, "more than %lld stops in (%lld, %lld]: ask for a shorter range",
                        static_cast<long long>(kMostStops), static_cast<long long>(start), static_cast<long long>(end));
    }
    const std::vector<Point> points = make_points(*r, start, end);
    *n = static_cast<int64_t>(points.size());
    for (int64_t i = 0; i < std::min(*n, cap); ++i) positions[i] = points[static_cast<size_t>(i)].position;
    return KVC_OK;
}

}  // namespace kvc
