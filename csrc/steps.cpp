// Steps: keys become visible when the step that wrote the bytes has ended; pages freed meanwhile wait for it.
#include <algorithm>
#include <utility>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

constexpr int64_t kCacheLine = 64;  // bytes

int32_t Manager::begin_step(int64_t* step) {
    if (static_cast<int64_t>(steps_.size()) >= max_open_steps_)
        return fail(KVC_E_STATE, "%zu steps are open: end step %lld first, or raise max_open_steps", steps_.size(),
                    static_cast<L>(steps_.front().id));
    steps_.push_back({.id = last_step_ + 1, .entries = std::exchange(entries_, {}), .releases = {}});
    *step = ++last_step_;
    return KVC_OK;
}

// Whose end the request's pages wait for: the newest open step that writes it. With a grant that is not committed that may be
// any: guesses are computed before it is known what is to be committed.
Step* Manager::fence_of(const Request& r) {
    const bool granted = r.state == RequestState::kRunning && r.granted > r.committed;
    return granted && !steps_.empty() ? &steps_.back() : open_step(r.last_step);
}

Step* Manager::open_step(int64_t id) {
    const auto at = std::find_if(steps_.begin(), steps_.end(), [id](const Step& step) { return step.id == id; });
    return at == steps_.end() ? nullptr : &*at;
}

void Manager::prefetch(int64_t handle) const {
    const Request* r = peek(handle);
    if (!r) return;
    const auto* from = reinterpret_cast<const char*>(&r->handle);
    const auto* end = reinterpret_cast<const char*>(&r->muted);
    for (; from < end; from += kCacheLine) __builtin_prefetch(from, 1);
}

void Manager::prefetch_tokens(int64_t handle) const {
    if (const Request* r = peek(handle)) __builtin_prefetch(r->tokens.data() + r->tokens.size(), 1);
}

// ---- after a step ---------------------------------------------------------------------------------------------------

// Lets go of what the newest complete grid point no longer needs: older snapshots, blocks that fell out of the spans.
void Manager::give_up_passed(Request& r) {
    if (const size_t newest = newest_complete(r); newest < r.points.size()) {
        for (size_t i = 0; i < newest; ++i)
            for (size_t s = 0; s < states_.size(); ++s) {
                const int32_t page = r.points[i].pages[s];
                release(r, states_[s], page, superseded_list(states_[s], page));
            }
        r.points.erase(r.points.begin(), r.points.begin() + static_cast<std::ptrdiff_t>(newest));
    }
    // Beyond its last key a foreign request completes nothing more: that grid point's blocks get their keys now.
    const int64_t told = std::min(r.computed, r.n_tokens) / grid_ * grid_;
    const int64_t last = r.settled() / grid_ * grid_;
    for (const int32_t g : spans_) {
        Table& table = r.tables[static_cast<size_t>(g)];
        const int64_t block = rules(g).block_tokens;
        if (rules(g).transient) give_up_unread(r, g, told);
        const int64_t first = rules(g).need_begin(told) / block;
        const int64_t passed = std::min(first, table.end()) - table.first;
        if (passed <= 0) continue;
        SpanWalk anew;
        if (told > last) key_span(r, g, last, &table.settled, false, Page::kVisible, &anew);
        for (int64_t i = 0; i < passed; ++i) {
            const int32_t page = table.pages[static_cast<size_t>(i)];
            if (page == kNoPage) continue;
            end_pending(r, g, page, true);
            const bool serves = told > last && (table.first + i + 1) * block > rules(g).need_begin(last);
            release(r, g, page, serves ? Arena::kLru : superseded_list(g, page));
        }
        table.pages.erase(table.pages.begin(), table.pages.begin() + static_cast<std::ptrdiff_t>(passed));
        table.first += passed;
        if (!rules(g).draft()) continue;  // what was kept before is settled now, with or without a key
        table.settled = std::max(table.settled, table.first * block);
    }
}

// Of a transient group: blocks that only tokens read which are computed by now. None of them has a key. What a grid point
// reads stays while that may become the last one: its tokens may be told later.
void Manager::give_up_unread(Request& r, int32_t group, int64_t told) {
    const GroupRules& g = rules(group);
    Table& table = r.tables[static_cast<size_t>(group)];
    const int64_t end = std::min(g.need_begin(r.computed) / g.block_tokens, table.end());
    for (int64_t b = std::max(g.blocks_upto(told), table.first); b < end; ++b) {
        if (table.page(b) == kNoPage) continue;
        const int64_t point = (b * g.block_tokens / grid_ + 1) * grid_;
        if (point <= std::min(r.computed, r.key_limit) && g.need_begin(point) < (b + 1) * g.block_tokens) continue;
        release(r, group, std::exchange(table.at(b), kNoPage), Arena::kVictims);
    }
}

// After a step has ended, or tokens were told. Keys, kept positions and what is given up change with whole pieces only.
void Manager::settle(Request& r) {
    const auto after = [](int64_t tokens, int64_t part) { return (tokens / part + 1) * part; };
    r.settle_at = {after(r.computed, key_piece_), after(std::min(r.computed, r.n_tokens), key_piece_),
                   r.foreign ? INT64_MAX : after(r.n_tokens, unit_)};
    r.unread_at = unread_after(r);
    key_full_blocks(r);
    key_sparse(r);
    give_up_passed(r);
}

// The same where no more than a few blocks of transient groups can go.
void Manager::settle_unread(Request& r) {
    r.unread_at = unread_after(r);
    const int64_t told = std::min(r.computed, r.n_tokens) / grid_ * grid_;
    for (const int32_t g : spans_)
        if (rules(g).transient) give_up_unread(r, g, told);
}

// ---- commit and end -------------------------------------------------------------------------------------------------

int32_t Manager::check_in_step() const {
    return steps_.empty() ? fail(KVC_E_STATE, "commit outside a step: call begin_step() first") : KVC_OK;
}

int32_t Manager::check_commit(const Request* r, int64_t handle, int64_t upto) const {
    if (!r) return unknown(handle);
    if (const auto status = check_in_step()) return status;
    if (r->state == RequestState::kLoading)
        return fail(KVC_E_STATE, "request %lld waits for load %lld: end it first", static_cast<L>(handle),
                    static_cast<L>(r->load));
    if (r->state != RequestState::kRunning)
        return fail(KVC_E_STATE, "request %lld is not running: allocate first", static_cast<L>(handle));
    if (upto <= r->committed || upto > r->granted)
        return fail(KVC_E_ARGUMENT, "commit up to %lld: the grant of request %lld covers %lld to %lld",
                    static_cast<L>(upto), static_cast<L>(handle), static_cast<L>(r->committed),
                    static_cast<L>(r->granted));
    if (whole_grants_ && upto < r->granted - r->drafts)
        return fail(KVC_E_ARGUMENT,
                    "commit up to %lld of a grant to %lld with %lld drafts: states and transient groups cannot stop in"
                    " between, allocate fewer tokens",
                    static_cast<L>(upto), static_cast<L>(r->granted), static_cast<L>(r->drafts));
    return KVC_OK;
}

// The plan's states up to `upto` are the request's now; those of guesses that were wrong go back.
void Manager::commit_points(Request& r, std::vector<Point> plan, int64_t upto, int64_t step) {
    r.plan_open = false;
    for (Point& point : plan) {
        if (point.position > upto) {
            release_point(r, point, Arena::kLru);
            continue;
        }
        point.step = step;
        if (!r.working.pages.empty() && r.working.pages != point.pages) release_point(r, r.working, Arena::kLru);
        r.working = {};
        if (!point.frozen) {
            r.working = std::move(point);
            continue;
        }
        for (const int32_t g : states_)
            if (has(point.wanted, g)) key_state(r, point, g, Page::kPending);
        r.points.push_back(std::move(point));
    }
}

// One entry for each request of a step, however often it commits.
void Manager::enter_step(Request& r, Step& step, int64_t upto) {
    if (r.entry < step.entries.size())
        if (Step::Entry& own = step.entries[r.entry]; own.handle == r.handle && own.run == r.run) {
            own.upto = upto;
            return;
        }
    step.entries.push_back({r.handle, r.run, upto});
    r.entry = step.entries.size() - 1;
}

// A commit within a piece of what gets keys, that goes on in the state that is there: most decode steps.
bool Manager::commit_within(Request& r, int64_t upto) {
    if (r.drafts || upto != r.granted || upto / key_piece_ != r.committed / key_piece_) return false;
    if (!states_.empty() && (r.plan.size() != 1 || r.plan[0].frozen || r.plan[0].pages != r.working.pages))
        return false;
    Step& step = steps_.back();
    enter_step(r, step, upto);
    if (!states_.empty()) {
        r.plan_open = false;
        r.working.position = upto;
    }
    r.last_step = step.id;
    r.committed = upto;
    return true;
}

int32_t Manager::commit(int64_t handle, int64_t upto) {
    Request* r = find(handle);
    if (const auto status = check_commit(r, handle, upto)) return status;
    if (!commit_within(*r, upto)) commit_beyond(*r, upto);
    return KVC_OK;
}

// Any other: new pending keys, snapshots, guesses that were wrong.
void Manager::commit_beyond(Request& r, int64_t upto) {
    Step& step = steps_.back();
    kept_.clear();
    if (!spans_.empty()) kept_between(r, r.committed, std::min({upto, r.n_tokens, r.key_limit}), &kept_);
    std::vector<Point> plan = r.plan;
    r.points.reserve(r.points.size() + plan.size());
    make_room(step.entries, 1);
    size_t guessed = (r.plan.size() + 1) * states_.size();
    for (const Table& table : r.tables) guessed += r.drafts ? table.pages.size() : 0;
    make_room(step.releases, guessed);
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        const int64_t first = group.full() ? r.committed / group.block_tokens : r.tables[static_cast<size_t>(g)].first;
        if (group.blocks()) arena_.reserve_keys(g, group.blocks_upto(upto) - first);
        if (group.state()) arena_.reserve_keys(g, static_cast<int64_t>(r.plan.size()));
    }

    for (int32_t g = 0; g < n_groups_; ++g)
        if (rules(g).full())
            key_full(r, g, r.committed / rules(g).block_tokens, upto / rules(g).block_tokens, Page::kPending);
    for (const int32_t g : spans_) {
        SpanWalk walked;
        int64_t& pending = r.tables[static_cast<size_t>(g)].pending;
        for (const Kept& at : kept_)
            if (has(at.groups, g) && at.position > pending)
                key_span(r, g, at.position, &pending, false, Page::kPending, &walked);
    }
    r.last_step = step.id;
    if (!states_.empty()) commit_points(r, std::move(plan), upto, step.id);
    enter_step(r, step, upto);
    r.committed = upto;
    if (r.drafts) release_guesses(r, upto);
    if (whole_grants_ || r.drafts) r.granted = upto;
    r.drafts = 0;
}

// Blocks of guesses that were wrong: the step may still write them.
void Manager::release_guesses(Request& r, int64_t upto) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!rules(g).blocks()) continue;
        Table& table = r.tables[static_cast<size_t>(g)];
        for (; table.end() > std::max(rules(g).blocks_upto(upto), table.first); table.pages.pop_back())
            if (table.pages.back() != kNoPage) release(r, g, table.pages.back(), Arena::kLru);
    }
}

// Adds the memory that settle() needs once so many tokens are computed and known, and makes room for all that was added, so
// that running out of it changes nothing.
void Manager::reserve_settle(const Request& r, int64_t computed, int64_t tokens, Room* room) {
    size_t releases = r.points.size() * states_.size();
    for (const int32_t g : states_) room->keys[static_cast<size_t>(g)] += static_cast<int64_t>(r.points.size());
    const int64_t known = std::min({computed, tokens, r.key_limit});
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!rules(g).blocks()) continue;
        const Table& table = r.tables[static_cast<size_t>(g)];
        const int64_t keyed = rules(g).full() ? table.keyed : table.first;
        int64_t& keys = room->keys[static_cast<size_t>(g)];
        const int64_t most = std::max<int64_t>(table.end() - keyed, 0);
        if (arena_.has_room(g, keys + most)) {
            keys += most;
        } else {  // before the index grows: nearly all have theirs already, pending
            for (int64_t b = keyed; b < table.end(); ++b)
                keys += table.page(b) != kNoPage && arena_.page(g, table.page(b)).key == Page::kNone;
        }
        if (!rules(g).span()) continue;
        releases += table.pages.size();
        kept_between(r, table.settled, known, &kept_, GroupSet{1} << g);
    }
    ++room->namespaces;
    for (int32_t g = 0; g < n_groups_; ++g)
        arena_.reserve_keys(g, room->keys[static_cast<size_t>(g)], room->namespaces);
    room->releases += releases;  // all of them in one step at worst
    if (Step* step = fence_of(r)) make_room(step->releases, room->releases);
}

void Manager::reserve_unread(const Request& r, Room* room) {
    for (const int32_t g : spans_)
        if (rules(g).transient) room->releases += r.tables[static_cast<size_t>(g)].pages.size();
    if (Step* step = fence_of(r)) make_room(step->releases, room->releases);
}

int32_t Manager::end_step(int64_t id) {
    if (steps_.empty() || id > last_step_ || id < steps_.front().id)
        return fail(KVC_E_HANDLE, "step %lld is not open", static_cast<L>(id));
    if (id != steps_.front().id)
        return fail(KVC_E_STATE, "step %lld must end before step %lld", static_cast<L>(steps_.front().id),
                    static_cast<L>(id));
    Room room;
    for (const Step::Entry& entry : steps_.front().entries) {
        const Request* r = find(entry.handle);
        if (!r || r->run != entry.run || r->state != RequestState::kRunning) continue;
        const int64_t computed = std::max(r->computed, entry.upto);
        if (r->unsettled(computed, r->n_tokens)) reserve_settle(*r, computed, r->n_tokens, &room);
        else if (computed >= r->unread_at) reserve_unread(*r, &room);
    }
    Step step = std::move(steps_.front());
    steps_.pop_front();
    for (const Step::Entry& entry : step.entries) {
        Request* r = find(entry.handle);
        if (!r || r->run != entry.run || r->state != RequestState::kRunning) continue;
        r->computed = std::max(r->computed, entry.upto);
        if (r->unsettled(r->computed, r->n_tokens)) settle(*r);
        else if (r->computed >= r->unread_at) settle_unread(*r);
    }
    const std::vector<Release>& freed = step.releases;
    for (size_t i = 0; i < freed.size(); ++i) {
        if (const size_t ahead = i + Arena::kInFlight; ahead < freed.size())
            arena_.prefetch(freed[ahead].group, freed[ahead].page);
        arena_.release(freed[i].group, freed[i].page, freed[i].list);
    }
    step.entries.clear();
    entries_ = std::move(step.entries);
    return KVC_OK;
}

}  // namespace kvc
