// check(): everything recounted.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

// Adds the request's references to refs[class][page]; returns what is broken, or nullptr.
const char* Manager::check_request(const Request& r, std::vector<std::vector<int32_t>>* refs) const {
    int64_t pages = 0;
    bool outside = false;
    each_page(r, [&](int32_t g, int32_t page) {
        ++pages;
        if (!arena_.contains(g, page)) outside = true;
        else ++(*refs)[static_cast<size_t>(rules(g).size_class)][static_cast<size_t>(page)];
    });
    if (outside) return "a request holds a page that its class does not own";
    if (r.state == RequestState::kWaiting && pages) return "a waiting request holds pages";
    if ((r.load != 0) != (r.state == RequestState::kLoading)) return "a load and its request disagree";
    if (r.load && !loads_.contains(r.load)) return "a request waits for a load that is not open";
    if (r.drafts > r.granted - r.committed) return "more guesses than granted tokens";
    if (r.last_step > last_step_) return "a request takes part in a step that never was";
    if (r.computed > r.committed || r.committed > r.granted) return "computed, committed, granted do not ascend";
    for (size_t i = 0; i < r.points.size(); ++i)
        if (!r.points[i].frozen || (i && r.points[i].position <= r.points[i - 1].position))
            return "snapshots are not frozen in ascending order";
    for (size_t g = 0; g < r.tables.size(); ++g)
        if (groups_[g].full() && r.tables[g].keyed > r.tables[g].end()) return "more keys are settled than blocks";
    if (r.state != RequestState::kRunning) return nullptr;
    for (int32_t g = 0; g < n_groups_; ++g) {
        const Table& table = r.tables[static_cast<size_t>(g)];
        if (rules(g).blocks() && table.end() != std::max(rules(g).blocks_upto(r.granted), table.first))
            return "a table does not end with the grant";
    }
    const int64_t told = std::min(r.computed, r.n_tokens) / grid_ * grid_;
    for (const int32_t g : spans_) {
        const Table& table = r.tables[static_cast<size_t>(g)];
        if (table.first != rules(g).need_begin(told) / rules(g).block_tokens)
            return "a span group does not hold what its last grid point needs";
        auto holds = [&](int64_t position) {
            for (int64_t b = rules(g).need_begin(position) / rules(g).block_tokens; b < rules(g).blocks_upto(position);
                 ++b)
                if (b >= table.first && table.page(b) == kNoPage) return false;
            return true;
        };
        if (!holds(r.computed) || (told <= r.key_limit && !holds(told))) return "a block that will be read has no page";
    }
    return nullptr;
}

// A pending key is some load's, or being written by an open step for a request that takes part in it.
const char* Manager::check_pending() const {
    int64_t owned = 0;
    std::vector<std::vector<bool>> seen(pages_per_slab_.size());
    auto count = [&](int32_t g, int32_t page) {
        auto& pages = seen[static_cast<size_t>(rules(g).size_class)];
        if (static_cast<size_t>(page) >= pages.size()) pages.resize(static_cast<size_t>(page) + 1);
        const Page& target = arena_.page(g, page);
        if (target.key != Page::kPending || pages[static_cast<size_t>(page)]) return;
        pages[static_cast<size_t>(page)] = true;
        ++owned;
    };
    for (const auto& [id, load] : loads_)
        for (const kvc_keyed& item : load.items) count(item.group, item.page);
    for (const Slot& slot : slots_)
        if (slot.request && open_step(slot.request->last_step)) each_page(*slot.request, count);
    return owned == arena_.pending() ? nullptr : "a key is pending that nobody writes";
}

// R is the oldest, and what the arena knows of it is true.
const char* Manager::check_guaranteed() const {
    const Request* r = peek(guaranteed_);
    if (!r) return frozen_ ? "frozen, though no request is guaranteed" : nullptr;
    for (const Slot& slot : slots_)
        if (slot.request && slot.request->order < r->order) return "the guaranteed request is not the oldest";
    if (pages_per_slab_ == std::vector<int32_t>{1}) return nullptr;  // not counted where nothing depends on it
    std::vector<std::vector<bool>> seen(pages_per_slab_.size());
    std::vector<int64_t> slabs(pages_per_slab_.size(), 0);
    each_page(*r, [&](int32_t g, int32_t page) {
        const auto c = static_cast<size_t>(rules(g).size_class);
        const auto slab = static_cast<size_t>(page / pages_per_slab_[c]);
        if (slab >= seen[c].size()) seen[c].resize(slab + 1);
        slabs[c] += !seen[c][slab];
        seen[c][slab] = true;
    });
    for (size_t c = 0; c < slabs.size(); ++c)
        if (slabs[c] != arena_.pinned_slabs(static_cast<int32_t>(c)))
            return "the slabs that the guaranteed request pins are miscounted";
    return nullptr;
}

// What is counted by namespace, but for the arena's keys and the runs of events.
const char* Manager::check_namespaces() const {
    std::vector<uint32_t> users, keyed;
    for (const Slot& slot : slots_)
        if (slot.request) users.push_back(slot.request->ns);
    for (const auto& [id, load] : loads_) users.push_back(load.ns);
    for (const kvc_keyed& item : keyed_) keyed.push_back(item.ns);
    const auto counted = [](const std::vector<uint32_t>& all, const NamespaceCounts& counts) {
        NamespaceCounts anew;
        for (const uint32_t ns : all) anew.add(ns);
        return counts.total() == anew.total() &&
               std::ranges::all_of(all, [&](uint32_t ns) { return counts.of(ns) == anew.of(ns); });
    };
    if (!counted(users, users_)) return "the requests and loads of a namespace are miscounted";
    return counted(keyed, keyed_of_) ? nullptr : "the namespaces of what tiers may store are miscounted";
}

int32_t Manager::check() {
    if (const char* broken = arena_.check()) return fail(KVC_E_INVARIANT, "arena: %s", broken);
    std::vector<std::vector<int32_t>> refs;
    for (const int32_t k : pages_per_slab_) refs.emplace_back(static_cast<size_t>(arena_.created_slabs() * k), 0);
    auto add = [&](int32_t g, int32_t page) {
        ++refs[static_cast<size_t>(rules(g).size_class)][static_cast<size_t>(page)];
    };
    Holders holders;
    int64_t open = 0;
    for (const Slot& slot : slots_) {
        if (!slot.request) continue;
        ++open;
        if (const char* broken = check_request(*slot.request, &refs)) return fail(KVC_E_INVARIANT, "%s", broken);
        if (slot.request->state != RequestState::kWaiting) holders.insert(slot.request->order);
    }
    if (open != open_requests_) return fail(KVC_E_INVARIANT, "the count of open requests is wrong");
    if (const char* broken = check_namespaces()) return fail(KVC_E_INVARIANT, "%s", broken);
    if (holders != holders_) return fail(KVC_E_INVARIANT, "the requests that hold pages are not those that are listed");
    if (const char* broken = check_pending()) return fail(KVC_E_INVARIANT, "%s", broken);
    if (const char* broken = check_guaranteed()) return fail(KVC_E_INVARIANT, "%s", broken);
    if (const char* broken = history_.check()) return fail(KVC_E_INVARIANT, "%s", broken);
    for (const auto& [id, load] : loads_) {
        if (load.handle && (!find(load.handle) || find(load.handle)->load != id))
            return fail(KVC_E_INVARIANT, "load %lld has no request", static_cast<L>(id));
        for (const kvc_keyed& item : load.items) add(item.group, item.page);
    }
    for (const Step& step : steps_)
        for (const Release& freed : step.releases) add(freed.group, freed.page);
    int64_t pinned = 0, held = 0;
    std::vector<int32_t> group_of(pages_per_slab_.size(), 0);
    for (int32_t g = n_groups_; g-- > 0;) group_of[static_cast<size_t>(rules(g).size_class)] = g;
    for (size_t c = 0; c < refs.size(); ++c) {
        for (size_t page = 0; page < refs[c].size(); ++page) {
            if (!arena_.contains(group_of[c], static_cast<int64_t>(page))) continue;
            const Page& target = arena_.page(group_of[c], static_cast<int32_t>(page));
            const auto pins = static_cast<int32_t>(target.pins);
            pinned += pins;
            held += target.refs > 0;
            if (target.refs != refs[c][page] + pins)
                return fail(KVC_E_INVARIANT, "page %zu of class %zu has %d references, %d are accounted for", page, c,
                            target.refs, refs[c][page] + pins);
        }
        held -= arena_.held_pages(static_cast<int32_t>(c));
    }
    if (held) return fail(KVC_E_INVARIANT, "the count of held pages is wrong");
    if (pinned != pinned_) return fail(KVC_E_INVARIANT, "the count of pins is wrong");
    return KVC_OK;
}

}  // namespace kvc
