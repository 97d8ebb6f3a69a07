// Which pages get their keys, and when: full blocks, what the policy keeps of spans, snapshots of states.
#include <algorithm>

#include "manager.h"

namespace kvc {

// Gives a page of the request its key, unless another page has it.
void Manager::key_page(const Request& r, int32_t group, int32_t page, const Digest& key, int64_t end,
                       Page::Key visibility) {
    const Page& target = arena_.page(group, page);
    if (r.muted || r.retired || target.key == Page::kVisible) return;
    if (target.key == Page::kPending && visibility == Page::kPending) return;
    writer_ = &r;
    if (target.key == Page::kPending) arena_.confirm(group, page);
    else arena_.publish(group, page, key, r.ns, end, visibility);
    writer_ = nullptr;
}

// The same for blocks [begin, end) of a full group, as far as their keys are known; returns the first that is left.
int64_t Manager::key_full(Request& r, int32_t group, int64_t begin, int64_t end, Page::Key visibility) {
    const GroupRules& g = rules(group);
    const int64_t known = static_cast<int64_t>(r.digests.size()) - g.ahead_links;  // links
    end = std::min(end, std::max<int64_t>(known, 0) / g.links_per_block);
    if (begin >= end) return begin;
    if (r.muted || r.retired) return end;
    writer_ = &r;
    const int64_t without =
        arena_.key_run(group, r.tables[static_cast<size_t>(group)].pages.data() + begin, run_of(r, group, begin, end),
                       r.ns, begin * g.block_tokens, g.block_tokens, visibility);
    writer_ = nullptr;
    if (visibility == Page::kVisible) r.tables[static_cast<size_t>(group)].keyless += without;
    return end;
}

// At the end of the request: blocks whose key was on the page of a twin, which may have gone, or be an older one by now.
void Manager::key_twins(Request& r) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const Table& table = r.tables[static_cast<size_t>(g)];
        if (!table.keyless) continue;
        const int64_t begin = table.holes.empty() ? 0 : table.holes.back() + 1;  // holes have no content
        key_full(r, g, begin, table.keyed, Page::kVisible);
    }
}

void Manager::key_state(const Request& r, const Point& point, int32_t group, Page::Key visibility) {
    const Digest* key = digest_at(r, point.position);
    if (!key) return;
    const auto s = static_cast<size_t>(std::find(states_.begin(), states_.end(), group) - states_.begin());
    key_page(r, group, point.pages[s], *key, point.position, visibility);
    if (!point.declared || visibility != Page::kVisible) return;
    const int32_t owner = arena_.find(group, *key, r.ns);  // maybe another request's page
    if (owner != kNoPage) arena_.keep(group, owner);
}

// What a lookup at `position` reads of a span group. `done`: the kept position before it, whose blocks are settled. `walked`:
// what the same call has gone over, in ascending order; it would find there what it found before.
void Manager::key_span(Request& r, int32_t group, int64_t position, int64_t* done, bool declared, Page::Key visibility,
                       SpanWalk* walked) {
    const GroupRules& g = rules(group);
    const Table& table = r.tables[static_cast<size_t>(group)];
    const int64_t keyed = g.draft() ? walked->keyed : *done;  // what a draft's key depends on may be told later
    const int64_t begin = std::max(g.need_begin(position), declared ? walked->declared : keyed);
    const int64_t first = std::max(begin / g.block_tokens, table.first);
    for (int64_t b = first; b * g.block_tokens < position; ++b) {
        Digest key;
        if (!block_key(r, group, b, &key)) continue;
        if (g.draft() && std::ranges::binary_search(table.holes, b)) continue;  // no content
        // What lies before has its key. Without a page: the policy named the position too late.
        if ((b + 1) * g.block_tokens > keyed && table.page(b) != kNoPage)
            key_page(r, group, table.page(b), key, (b + 1) * g.block_tokens, visibility);
        if (!declared || visibility != Page::kVisible) continue;
        const int32_t owner = arena_.find(group, key, r.ns);
        if (owner != kNoPage) arena_.keep(group, owner);
    }
    walked->keyed = position;
    if (declared) walked->declared = position;
    // A draft's last block may get its key later, when the tokens are told that it looks ahead to.
    Digest last;
    const bool all = !g.draft() || block_key(r, group, position / g.block_tokens - 1, &last);
    if (all || visibility == Page::kPending) *done = std::max(*done, position);
}

// The request lets go of a page whose key may be pending, for a position that was not reached or is not kept any more.
void Manager::end_pending(Request& r, int32_t group, int32_t page, bool written) {
    const Page& target = arena_.page(group, page);
    if (target.key == Page::kPending && written)
        key_page(r, group, page, target.digest, static_cast<int64_t>(target.end), Page::kVisible);
    if (target.key == Page::kPending) arena_.unpublish(group, page);
}

// Settles the keys of all blocks of full groups that are computed and whose tokens are known.
void Manager::key_full_blocks(Request& r) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        if (!rules(g).full()) continue;
        int64_t& keyed = r.tables[static_cast<size_t>(g)].keyed;
        keyed = key_full(r, g, keyed, r.computed / rules(g).block_tokens, Page::kVisible);
    }
}

// Index of the newest frozen point whose step has ended; points.size() if there is none.
size_t Manager::newest_complete(const Request& r) const {
    for (size_t i = r.points.size(); i-- > 0;)
        if ((steps_.empty() || r.points[i].step < steps_.front().id) && r.points[i].position <= r.settled()) return i;
    return r.points.size();
}

// Blocks that a policy wanted when they were committed, and does not name any more.
void Manager::confirm_spans(Request& r) {
    if (!arena_.pending()) return;
    for (const int32_t g : spans_) {
        Table& table = r.tables[static_cast<size_t>(g)];
        if (table.confirmed == table.pending) continue;
        if (table.pending > r.settled()) continue;  // they wait for a position to come
        const int64_t block = rules(g).block_tokens;
        for (int64_t b = table.first; (b + 1) * block <= r.settled(); ++b)
            if (const int32_t page = table.page(b); page != kNoPage) {
                const Page& target = arena_.page(g, page);
                if (target.key == Page::kPending) key_page(r, g, page, target.digest, (b + 1) * block, Page::kVisible);
            }
        table.confirmed = table.pending;
    }
}

// Keys what the policy keeps of the span and state groups.
void Manager::key_sparse(Request& r) {
    for (const int32_t g : spans_) {
        int64_t& settled = r.tables[static_cast<size_t>(g)].settled;
        kept_between(r, settled, r.settled(), &kept_, GroupSet{1} << g);
        SpanWalk walked;
        for (const Kept& kept : kept_)
            if (kept.position > settled)
                key_span(r, g, kept.position, &settled, kept.declared, Page::kVisible, &walked);
    }
    confirm_spans(r);
    const size_t newest = newest_complete(r);
    for (const int32_t g : states_)
        for (size_t i = 0; newest < r.points.size() && i <= newest; ++i)
            if (has(r.points[i].wanted, g)) key_state(r, r.points[i], g, Page::kVisible);
}

}  // namespace kvc
