// Steps: keys become visible when the step that wrote the bytes has ended; pages freed meanwhile wait for it.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

int32_t Manager::begin_step(int64_t* step) {
    if (static_cast<int64_t>(steps_.size()) >= max_open_steps_)
        return fail(KVC_E_STATE, "%zu steps are open: end step %lld first, or raise max_open_steps", steps_.size(),
                    static_cast<L>(steps_.front().id));
    steps_.push_back({.id = ++last_step_, .entries = {}, .releases = {}});
    *step = last_step_;
    return KVC_OK;
}

Step* Manager::open_step(int64_t id) {
    const auto at = std::find_if(steps_.begin(), steps_.end(), [id](const Step& step) { return step.id == id; });
    return at == steps_.end() ? nullptr : &*at;
}

// ---- releasing ------------------------------------------------------------------------------------------------------

// At once, or with the newest open step that the request takes part in: until then its pages may be read or written.
void Manager::release(Request& r, int32_t group, int32_t page, Pool::List list) {
    if (Step* step = open_step(r.last_step)) step->releases.push_back({group, page, list});
    else pools_[static_cast<size_t>(group)].release(page, list);
}

void Manager::release_point(Request& r, const Point& point, Pool::List list) {
    for (size_t s = 0; s < point.pages.size(); ++s) release(r, states_[s], point.pages[s], list);
}

// A later state of the request is there. What was declared, or served several requests, keeps its place.
void Manager::release_superseded(Request& r, const Point& point) {
    for (size_t s = 0; s < point.pages.size(); ++s) {
        const Page& page = pools_[static_cast<size_t>(states_[s])].page(point.pages[s]);
        release(r, states_[s], point.pages[s], page.kept || page.hits > 1 ? Pool::kLru : Pool::kVictims);
    }
}

// ---- keys -----------------------------------------------------------------------------------------------------------

// Gives a page of the request the key that belongs to `end`, unless that is unknown yet or on another page.
bool Manager::key_page(const Request& r, int32_t group, int32_t page, int64_t end, Page::Key key) {
    Pool& pool = pools_[static_cast<size_t>(group)];
    if (pool.page(page).key == Page::kVisible) return false;
    if (pool.page(page).key == Page::kPending) {
        if (key == Page::kPending) return false;
        pool.confirm(page);
        push_keyed(r, group, page);
        return true;
    }
    const Digest* digest = digest_at(r, end);
    if (!digest || !pool.publish(page, *digest, r.ns, end, key)) return false;
    if (key == Page::kVisible) push_keyed(r, group, page);
    return true;
}

// Settles the keys of all blocks that are computed and whose tokens are known.
void Manager::key_blocks(Request& r) {
    for (const int32_t group : attention_) {
        const auto g = static_cast<size_t>(group);
        const int64_t block = groups_[g].block_tokens;
        int64_t& i = r.keyed_blocks[g];
        for (; (i + 1) * block <= r.computed && digest_at(r, (i + 1) * block); ++i)
            key_page(r, group, r.tables[g][static_cast<size_t>(i)], (i + 1) * block, Page::kVisible);
    }
}

// Index of the newest frozen point whose step has ended; points.size() if there is none.
size_t Manager::newest_complete(const Request& r) const {
    for (size_t i = r.points.size(); i-- > 0;)
        if (steps_.empty() || r.points[i].step < steps_.front().id) return i;
    return r.points.size();
}

// Keys the complete points that the policy wants, and lets go of all but the newest.
void Manager::key_points(Request& r) {
    const size_t newest = newest_complete(r);
    if (newest == r.points.size()) return;
    for (size_t i = 0; i <= newest; ++i) {
        const Point& point = r.points[i];
        if (!point.policy) continue;
        for (size_t s = 0; s < point.pages.size(); ++s) {
            Pool& pool = pools_[static_cast<size_t>(states_[s])];
            key_page(r, states_[s], point.pages[s], point.position, Page::kVisible);
            const Digest* digest = point.kept ? digest_at(r, point.position) : nullptr;
            const int32_t owner = digest ? pool.find(*digest, r.ns) : kNoPage;  // maybe another request's page
            if (owner != kNoPage) pool.keep(owner);
        }
    }
    for (size_t i = 0; i < newest; ++i) release_superseded(r, r.points[i]);
    r.points.erase(r.points.begin(), r.points.begin() + static_cast<std::ptrdiff_t>(newest));
}

// ---- commit and end -------------------------------------------------------------------------------------------------

int32_t Manager::commit(int64_t handle, int64_t upto) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (steps_.empty()) return fail(KVC_E_STATE, "commit outside a step: call begin_step() first");
    if (r->state != RequestState::kRunning)
        return fail(KVC_E_STATE, "request %lld is not running: allocate first", static_cast<L>(handle));
    if (upto <= r->committed || upto > r->granted)
        return fail(KVC_E_ARGUMENT, "commit up to %lld: the grant of request %lld covers %lld to %lld",
                    static_cast<L>(upto), static_cast<L>(handle), static_cast<L>(r->committed),
                    static_cast<L>(r->granted));
    if (!states_.empty() && upto != r->granted)
        return fail(KVC_E_ARGUMENT,
                    "commit up to %lld of a grant to %lld: a state cannot stop in between, allocate fewer tokens",
                    static_cast<L>(upto), static_cast<L>(r->granted));
    Step& step = steps_.back();
    std::vector<Point> points = states_.empty() ? std::vector<Point>{} : r->plan;
    r->points.reserve(r->points.size() + points.size());
    step.entries.reserve(step.entries.size() + 1);
    for (const int32_t group : attention_) {
        const int64_t block = groups_[static_cast<size_t>(group)].block_tokens;
        pools_[static_cast<size_t>(group)].reserve(0, upto / block - r->committed / block);
    }
    for (const int32_t group : states_)
        pools_[static_cast<size_t>(group)].reserve(0, static_cast<int64_t>(points.size()));

    for (const int32_t group : attention_) {
        const auto g = static_cast<size_t>(group);
        const int64_t block = groups_[g].block_tokens;
        for (int64_t i = r->committed / block; (i + 1) * block <= upto; ++i)
            key_page(*r, group, r->tables[g][static_cast<size_t>(i)], (i + 1) * block, Page::kPending);
    }
    if (!states_.empty()) {
        for (Point& point : points) {
            point.step = step.id;
            if (!point.frozen) {
                r->working = std::move(point);
                continue;
            }
            if (point.policy)
                for (size_t s = 0; s < point.pages.size(); ++s)
                    key_page(*r, states_[s], point.pages[s], point.position, Page::kPending);
            r->points.push_back(std::move(point));
            r->working = {};  // it was updated in place and is frozen now, or there was none
        }
        r->plan_open = false;
    }
    step.entries.push_back({handle, r->run, upto});
    r->last_step = step.id;
    r->committed = upto;
    return KVC_OK;
}

// Memory that ending the step needs, so that running out of it changes nothing.
void Manager::set_aside(const Step& step) {
    size_t releases = 0;
    for (const Step::Entry& entry : step.entries) {
        const Request* r = find(entry.handle);
        if (!r || r->run != entry.run) continue;
        releases += r->points.size() * states_.size();
        for (const int32_t g : states_)
            pools_[static_cast<size_t>(g)].reserve(0, static_cast<int64_t>(r->points.size()));
        for (const int32_t g : attention_)
            pools_[static_cast<size_t>(g)].reserve(0, static_cast<int64_t>(r->tables[static_cast<size_t>(g)].size()) -
                                                          r->keyed_blocks[static_cast<size_t>(g)]);
    }
    if (steps_.size() > 1) steps_.back().releases.reserve(steps_.back().releases.size() + releases);
}

int32_t Manager::end_step(int64_t id) {
    if (steps_.empty() || id > last_step_ || id < steps_.front().id)
        return fail(KVC_E_HANDLE, "step %lld is not open", static_cast<L>(id));
    if (id != steps_.front().id)
        return fail(KVC_E_STATE, "step %lld must end before step %lld", static_cast<L>(steps_.front().id),
                    static_cast<L>(id));
    set_aside(steps_.front());
    const Step step = std::move(steps_.front());
    steps_.pop_front();
    for (const Step::Entry& entry : step.entries) {
        Request* r = find(entry.handle);
        if (!r || r->run != entry.run || r->state != RequestState::kRunning) continue;
        r->computed = std::max(r->computed, entry.upto);
        key_blocks(*r);
        key_points(*r);
    }
    for (const Release& freed : step.releases) pools_[static_cast<size_t>(freed.group)].release(freed.page, freed.list);
    return KVC_OK;
}

// ---- closing --------------------------------------------------------------------------------------------------------

// Takes all pages from a running or loading request. What open steps write for it leaves no key; the newest complete
// state gets one.
void Manager::drop_pages(Request& r) {
    if (r.state == RequestState::kWaiting) return;
    const bool loading = r.state == RequestState::kLoading;  // nothing was computed; keys are the load's affair
    if (Step* step = open_step(r.last_step)) {
        size_t pages = (r.points.size() + r.plan.size() + 1) * states_.size();
        for (const auto& table : r.tables) pages += table.size();
        step->releases.reserve(step->releases.size() + pages);  // the last thing that can fail
    }
    if (r.load) detach_load(r);
    const size_t newest = newest_complete(r);
    for (size_t i = 0; i < r.points.size() && !loading; ++i) {
        const Point& point = r.points[i];
        for (size_t s = 0; s < point.pages.size(); ++s) {
            Pool& pool = pools_[static_cast<size_t>(states_[s])];
            if (i == newest) key_page(r, states_[s], point.pages[s], point.position, Page::kVisible);
            else if (pool.page(point.pages[s]).key == Page::kPending) pool.unpublish(point.pages[s]);
        }
    }
    for (size_t i = 0; i < r.points.size(); ++i) {
        if (i < newest) release_superseded(r, r.points[i]);
        else release_point(r, r.points[i], Pool::kLru);
    }
    if (r.plan_open)
        for (const Point& point : r.plan)
            if (r.working.pages.empty() || point.pages != r.working.pages) release_point(r, point, Pool::kLru);
    release_point(r, r.working, Pool::kLru);
    for (const int32_t group : attention_) {
        auto& table = r.tables[static_cast<size_t>(group)];
        Pool& pool = pools_[static_cast<size_t>(group)];
        for (size_t i = table.size(); i-- > 0;) {  // the tail is evicted before the head
            if (static_cast<int64_t>(i) >= r.keyed_blocks[static_cast<size_t>(group)] &&
                pool.page(table[i]).key == Page::kPending)
                pool.unpublish(table[i]);
            release(r, group, table[i], Pool::kLru);
        }
    }
    r.tables.clear();
    r.points.clear();
    r.plan.clear();
    r.plan_source.clear();
    r.plan_open = false;
    r.working = {};
    r.computed = r.committed = r.granted = 0;
    r.looked_up = false;
    r.state = RequestState::kWaiting;
    ++r.run;
}

int32_t Manager::close(int64_t handle) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    drop_pages(*r);
    const auto index = static_cast<size_t>(handle & 0xffffffff);
    slots_[index].request.reset();
    ++slots_[index].generation;
    free_slots_.push_back(index);
    --open_requests_;
    return KVC_OK;
}

int32_t Manager::preempt(int64_t handle) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (r->state == RequestState::kWaiting)
        return fail(KVC_E_STATE, "request %lld holds no pages: there is nothing to preempt", static_cast<L>(handle));
    drop_pages(*r);
    return KVC_OK;
}

}  // namespace kvc
