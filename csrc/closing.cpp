// Giving pages back, in one order over all groups: by where they end, the tail first; a state or the block of a span before
// the full block that ends there, because it is worth nothing without it.
#include <algorithm>
#include <array>
#include <utility>

#include "error.h"
#include "manager.h"

namespace kvc {

// At once, or with the step that fences the request: until then its pages may be read or written.
void Manager::release(Request& r, int32_t group, int32_t page, Arena::List list) {
    if (r.handle == guaranteed_) arena_.mine(group, page, -1);
    if (rules(group).draft()) list = Arena::kVictims;
    if (Step* step = fence_of(r)) step->releases.push_back({group, page, list});
    else arena_.release(group, page, list);
}

// The same for a run of blocks, the last first.
void Manager::release_run(Request& r, int32_t group, std::span<const int32_t> pages, Arena::List list) {
    if (r.handle == guaranteed_)
        for (const int32_t page : pages) arena_.mine(group, page, -1);
    if (rules(group).draft()) list = Arena::kVictims;
    Step* step = fence_of(r);
    if (!step) return arena_.release_run(group, pages, list);
    for (size_t i = pages.size(); i-- > 0;) step->releases.push_back({group, pages[i], list});
}

void Manager::release_point(Request& r, const Point& point, Arena::List list) {
    for (size_t s = 0; s < point.pages.size(); ++s) release(r, states_[s], point.pages[s], list);
}

// A later boundary of the request is there. What was declared, or served several requests, keeps its place.
Arena::List Manager::superseded_list(int32_t group, int32_t page) const {
    const Page& old = arena_.page(group, page);
    return old.kept || old.hits > 1 ? Arena::kLru : Arena::kVictims;
}

// Snapshots: the newest complete one gets its key, what open steps write gets none.
void Manager::collect_points(Request& r, bool loading) {
    const size_t newest = loading ? r.points.size() : newest_complete(r);
    for (size_t i = 0; i < r.points.size(); ++i) {
        const Point& point = r.points[i];
        for (size_t s = 0; s < point.pages.size(); ++s) {
            const int32_t g = states_[s], page = point.pages[s];
            if (i == newest) key_state(r, point, g, Page::kVisible);
            else if (!loading && arena_.page(g, page).key == Page::kPending) arena_.unpublish(g, page);
            filed_.push_back(
                {point.position, {g, page, i < newest && !loading ? superseded_list(g, page) : Arena::kLru}});
        }
    }
    auto unkeyed = [&](const Point& point) {
        for (size_t s = 0; s < point.pages.size(); ++s)
            filed_.push_back({point.position, {states_[s], point.pages[s], Arena::kLru}});
    };
    if (r.plan_open)
        for (const Point& point : r.plan)
            if (r.working.pages.empty() || point.pages != r.working.pages) unkeyed(point);
    unkeyed(r.working);
}

// Spans: what a lookup at the last completed grid point reads gets its keys.
void Manager::collect_spans(Request& r, bool loading) {
    const int64_t last = r.settled() / grid_ * grid_;
    for (const int32_t g : spans_) {
        const int64_t block = rules(g).block_tokens;
        Table& table = r.tables[static_cast<size_t>(g)];
        int64_t none = 0;  // all that a hit there reads: a key may have been on the page of a twin
        SpanWalk anew;
        if (!loading && last) key_span(r, g, last, &none, false, Page::kVisible, &anew);
        for (int64_t b = table.end(); b-- > table.first;) {
            const int32_t page = table.page(b);
            if (page == kNoPage) continue;
            const int64_t end = (b + 1) * block;
            if (!loading) end_pending(r, g, page, end <= last);
            filed_.push_back({end, {g, page, Arena::kLru}});
        }
    }
}

// visit(position, the declared boundary below it) for those that are reached, ascending: blocks up to the one below are its.
template <typename Visit>
void Manager::each_declared(const Request& r, Visit&& visit) const {
    int64_t below = 0;
    for (const Kept& kept : r.kept) {
        if (kept.position > r.settled()) break;
        if (kept.declared) visit(kept.position, std::exchange(below, kept.position));
    }
}

// What was kept for declared boundaries, and lies in the cache by now, goes back in the same order: it is as fresh as the
// prefix that it belongs to.
void Manager::collect_touched(Request& r) {
    auto touch = [&](int32_t g, const Digest& key, int64_t position) {
        const int32_t page = arena_.find(g, key, r.ns);
        if (page == kNoPage) return;
        const Page& at = arena_.page(g, page);
        if (at.refs > static_cast<int32_t>(at.pins) || at.key != Page::kVisible) return;
        arena_.acquire(g, page);
        if (r.handle == guaranteed_) arena_.mine(g, page, +1);
        filed_.push_back({position, {g, page, Arena::kLru}});
    };
    each_declared(r, [&](int64_t position, int64_t below) {
        for (const int32_t g : states_)
            if (const Digest* key = digest_at(r, position)) touch(g, *key, position);
        for (const int32_t g : spans_) {
            const int64_t block = rules(g).block_tokens;
            const int64_t begin = std::max(rules(g).need_begin(position), below);
            Digest key;
            for (int64_t b = position / block - 1; b >= 0 && (b + 1) * block > begin; --b)
                if (!rules(g).draft() && block_key(r, g, b, &key)) touch(g, key, (b + 1) * block);
        }
    });
}

void Manager::release_all(Request& r) {
    std::stable_sort(filed_.begin(), filed_.end(),
                     [](const Filed& a, const Filed& b) { return a.position > b.position; });
    size_t next = 0;
    auto release_filed = [&](int64_t position) {
        for (; next < filed_.size() && filed_[next].position >= position; ++next)
            release(r, filed_[next].release.group, filed_[next].release.page, filed_[next].release.list);
    };
    std::array<int64_t, kMostGroups> left{};  // full blocks still to go
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!rules(g).full()) continue;
        const Table& table = r.tables[static_cast<size_t>(g)];
        left[static_cast<size_t>(g)] = table.end();
        for (int64_t b = table.keyed; b < table.end(); ++b)
            if (arena_.page(g, table.page(b)).key == Page::kPending) arena_.unpublish(g, table.page(b));
    }
    while (true) {
        int32_t deepest = -1;
        int64_t end = 0, others = 0;  // what the deepest group has left ends there, and the next one's
        for (int32_t g = 0; g < n_groups_; ++g) {
            const int64_t at = left[static_cast<size_t>(g)] * rules(g).block_tokens;
            others = std::max(others, std::min(at, end));
            if (at <= end) continue;
            end = at;
            deepest = g;
        }
        if (deepest < 0) break;
        release_filed(end);
        if (next < filed_.size()) others = std::max(others, filed_[next].position);
        const Table& table = r.tables[static_cast<size_t>(deepest)];
        int64_t& past = left[static_cast<size_t>(deepest)];
        const int64_t first = std::min(std::max<int64_t>(others, 0) / rules(deepest).block_tokens, past - 1);
        release_run(r, deepest,
                    std::span(table.pages).subspan(static_cast<size_t>(first), static_cast<size_t>(past - first)),
                    Arena::kLru);
        past = first;
    }
    release_filed(INT64_MIN);
    for (int32_t g = 0; g < n_groups_; ++g)
        if (rules(g).kind == KVC_PRIVATE)
            for (const int32_t page : r.tables[static_cast<size_t>(g)].pages) release(r, g, page, Arena::kLru);
}

// Memory that drop_pages() needs, so that nothing can fail in it.
void Manager::reserve_drop(const Request& r) {
    if (r.state == RequestState::kWaiting) return;
    size_t pages = (r.points.size() + r.plan.size() + 1) * states_.size();
    for (const Table& table : r.tables) pages += table.pages.size();
    each_declared(r, [&](int64_t position, int64_t below) {
        pages += states_.size();
        for (const int32_t g : spans_) {
            const int64_t begin = std::max(rules(g).need_begin(position), below);
            pages += static_cast<size_t>((position - begin) / rules(g).block_tokens + 1);
        }
    });
    filed_.reserve(pages);
    for (int32_t g = 0; g < n_groups_; ++g) arena_.reserve_keys(g, r.tables[static_cast<size_t>(g)].keyless);
    for (const int32_t g : states_) arena_.reserve_keys(g, 1);
    for (const int32_t g : spans_)
        arena_.reserve_keys(g, static_cast<int64_t>(r.tables[static_cast<size_t>(g)].pages.size()));
    if (Step* step = fence_of(r)) make_room(step->releases, pages);
}

// Takes all pages from a running or loading request, after reserve_drop(). What open steps write for it leaves no key; the
// newest complete grid point gets its keys.
void Manager::drop_pages(Request& r) {
    if (r.state == RequestState::kWaiting) return;
    const bool loading = r.state == RequestState::kLoading;  // nothing was computed; keys are the load's affair
    filed_.clear();
    if (r.load) detach_load(r);
    if (!loading) key_twins(r);
    collect_points(r, loading);
    collect_spans(r, loading);
    if (!loading) collect_touched(r);
    release_all(r);
    r.ended = ++tick_;
    if (!loading) r.reached = std::max(r.reached, r.settled());
    r.tables.clear();
    r.points.clear();
    r.plan.clear();
    r.plan_source.clear();
    r.plan_open = false;
    r.working = {};
    r.computed = r.committed = r.granted = r.drafts = 0;
    r.looked_up = false;
    r.muted = false;
    r.state = RequestState::kWaiting;
    ++r.run;
    holders_.erase(r.order);
    if (r.handle == guaranteed_) frozen_ = false;
}

int32_t Manager::close(int64_t handle, bool aborted) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    reserve_drop(*r);
    drop_pages(*r);
    if (handle == guaranteed_) {
        guaranteed_ = 0;
        frozen_ = false;
        arena_.guarantee({});
    }
    const auto index = static_cast<size_t>(handle & 0xffffffff);
    users_.remove(r->ns);
    if (history_.keeps_any()) remember(std::move(*r), aborted);
    slots_[index].request.reset();
    // A slot whose generations are used up is left alone: no handle is ever used twice.
    if (++slots_[index].generation < kMostGenerations) free_slots_.push_back(index);
    --open_requests_;
    return KVC_OK;
}

void Manager::remember(Content&& content, bool aborted) {
    content.closed = ++tick_;
    content.aborted = aborted;
    content.closed_ns = now_ns();
    history_.add(std::move(content));
}

int32_t Manager::preempt(int64_t handle) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (r->state == RequestState::kWaiting)
        return fail(KVC_E_STATE, "request %lld holds no pages: there is nothing to preempt",
                    static_cast<long long>(handle));
    reserve_drop(*r);
    drop_pages(*r);
    return KVC_OK;
}

}  // namespace kvc
