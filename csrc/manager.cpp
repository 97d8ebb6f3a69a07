// Reading requests, clearing.
#include "manager.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "error.h"

namespace kvc {

using L = long long;

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

namespace {
std::vector<int32_t> classes_of(const kvc_config& config, const kvc_group* groups) {
    std::vector<int32_t> classes;
    for (int32_t g = 0; g < config.n_groups; ++g) classes.push_back(groups[g].size_class);
    return classes;
}
}  // namespace

Manager::Manager(const kvc_config& config, const kvc_group* groups)
    : n_groups_(config.n_groups),
      pages_per_slab_(config.pages_per_slab, config.pages_per_slab + config.n_classes),
      unit_(config.hash_unit_tokens),
      grid_(config.grid_tokens),
      piece_(config.hash_unit_tokens),
      key_piece_(config.hash_unit_tokens),
      max_open_steps_(config.max_open_steps),
      chain_(compress_function(ShaPath::kBest)),
      arena_(config.slabs, pages_per_slab_, classes_of(config, groups), config.movable != 0, config.seed,
             config.journal || config.events ? this : nullptr),
      history_(config.history_tokens),
      journal_(config.journal != 0),
      events_(config.events != 0) {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = groups_.emplace_back(groups[g], unit_);
        if (group.full() && group.votes()) full_.push_back(g);
        if (group.span()) spans_.push_back(g);
        if (group.block_tokens) piece_ = std::gcd(piece_, int64_t{group.block_tokens});
        if (group.block_tokens && !group.transient) key_piece_ = std::gcd(key_piece_, int64_t{group.block_tokens});
        if (group.state()) {
            states_.push_back(g);
            state_set_ |= GroupSet{1} << g;
        }
        sparse_votes_ |= group.votes() && !group.full();
        whole_grants_ |= group.state() || group.transient;
        unpaged_tokens_ |= group.transient && group.block_tokens == 1;
    }
    for (const int32_t g : states_) arena_.watch(g);
    for (const int32_t g : spans_)
        if (groups_[static_cast<size_t>(g)].votes()) arena_.watch(g);
    runs_.reserve(64);
}

// ---- what is not there ----------------------------------------------------------------------------------------------

int32_t Manager::unknown(int64_t handle) const {
    return fail(KVC_E_HANDLE, "request %lld is unknown or closed", static_cast<L>(handle));
}

int32_t Manager::check_group(int32_t group) const {
    if (group >= 0 && group < n_groups_) return KVC_OK;
    return fail(KVC_E_ARGUMENT, "there is no group %d: the geometry has %d, numbered from 0", group, n_groups_);
}

// ---- reading --------------------------------------------------------------------------------------------------------

int32_t Manager::info(int64_t handle, kvc_request_info* out) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    *out = {};
    out->n_tokens = r->n_tokens;
    out->n_prompt = r->n_prompt;
    out->computed = r->computed;
    out->committed = r->committed;
    out->granted = r->granted;
    out->n_units = static_cast<int64_t>(r->digests.size());
    out->load = r->load;
    out->state = static_cast<int32_t>(r->state);
    out->ns = r->ns;
    return KVC_OK;
}

int32_t Manager::digests(int64_t handle, int64_t first, uint8_t* digests, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    const auto links = static_cast<int64_t>(r->digests.size());
    if (first < 0 || first > links)
        return fail(KVC_E_ARGUMENT, "link %lld of a chain of %lld", static_cast<L>(first), static_cast<L>(links));
    *n = links - first;
    const int64_t count = std::min(*n, cap);
    if (count > 0) std::memcpy(digests, r->digests.data() + first, static_cast<size_t>(count) * 32);
    return KVC_OK;
}

int32_t Manager::table(int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (const auto status = check_group(group)) return status;
    if (rules(group).state())
        return fail(KVC_E_ARGUMENT, "group %d has states and no blocks: use state_plan in place of its block table",
                    group);
    if (first < 0)
        return fail(KVC_E_ARGUMENT, "group %d, block %lld: blocks count from 0", group, static_cast<L>(first));
    *n = 0;
    if (r->tables.empty()) return KVC_OK;
    const Table& table = r->tables[static_cast<size_t>(group)];
    *n = std::max<int64_t>(table.end() - first, 0);
    for (int64_t i = 0; i < std::min(*n, cap); ++i)
        pages[i] = first + i < table.first ? kNoPage : table.page(first + i);
    return KVC_OK;
}

int32_t Manager::state_plan(int64_t handle, int32_t group, int32_t* source, int64_t* positions, int32_t* pages,
                            int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (const auto status = check_group(group)) return status;
    const auto at = std::find(states_.begin(), states_.end(), group);
    if (at == states_.end()) return fail(KVC_E_ARGUMENT, "group %d has no state: use its block table", group);
    const auto s = static_cast<size_t>(at - states_.begin());
    *source = r->plan_source.empty() ? kNoPage : r->plan_source[s];
    *n = static_cast<int64_t>(r->plan.size());
    for (int64_t i = 0; i < std::min(*n, cap); ++i) {
        positions[i] = r->plan[static_cast<size_t>(i)].position;
        pages[i] = r->plan[static_cast<size_t>(i)].pages[s];
    }
    return KVC_OK;
}

int32_t Manager::holes(int64_t handle, int32_t group, int64_t* blocks, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (const auto status = check_group(group)) return status;
    *n = 0;
    if (r->state == RequestState::kWaiting || !rules(group).blocks()) return KVC_OK;
    const auto& holes = r->tables[static_cast<size_t>(group)].holes;
    *n = static_cast<int64_t>(holes.size());
    std::copy_n(holes.begin(), std::min(*n, cap), blocks);
    return KVC_OK;
}

int32_t Manager::stats(kvc_manager_stats* out) {
    *out = {};
    out->open_requests = open_requests_;
    out->open_steps = static_cast<int64_t>(steps_.size());
    out->open_loads = static_cast<int64_t>(loads_.size());
    out->pinned = pinned_;
    out->keyed_dropped = keyed_dropped_;
    out->events_dropped = events_dropped_;
    out->frozen = frozen_;
    return KVC_OK;
}

int32_t Manager::arena_stats(kvc_arena_stats* out) {
    *out = {};
    out->slabs = arena_.slabs();
    out->created = arena_.created_slabs();
    out->empty = arena_.empty_slabs();
    out->moved_pages = arena_.moved_pages();
    out->reclaimed_slabs = arena_.reclaimed_slabs();
    out->evictions = arena_.evictions();
    return KVC_OK;
}

int32_t Manager::class_stats(int32_t size_class, kvc_class_stats* out) {
    if (size_class < 0 || size_class >= static_cast<int32_t>(pages_per_slab_.size()))
        return fail(KVC_E_ARGUMENT, "there is no size class %d: the geometry has %zu, numbered from 0", size_class,
                    pages_per_slab_.size());
    *out = {};
    out->slabs = arena_.owned_slabs(size_class);
    out->free = arena_.free_pages(size_class);
    out->cached = arena_.cached_pages(size_class);
    out->held = arena_.held_pages(size_class);
    return KVC_OK;
}

int32_t Manager::group_stats(int32_t group, kvc_group_stats* out) {
    if (const auto status = check_group(group)) return status;
    *out = {};
    out->keyed = arena_.keyed(group);
    out->evictions = arena_.evictions(group);
    return KVC_OK;
}

int32_t Manager::has_key(int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page) {
    if (const auto status = check_group(group)) return status;
    Digest key;
    std::memcpy(key.bytes, digest, 32);
    *page = arena_.find(group, key, ns);
    if (*page != kNoPage && arena_.page(group, *page).key != Page::kVisible) *page = kNoPage;
    return KVC_OK;
}

// Keys, open requests, loads and unread records of a namespace: at 0 its number may be given to another one.
int32_t Manager::namespace_use(uint32_t ns, int64_t* uses) {
    *uses = arena_.keyed_in(ns) + users_.of(ns) + keyed_of_.of(ns) + runs_of_.of(ns);
    return KVC_OK;
}

// ---- clearing -------------------------------------------------------------------------------------------------------

// Requests that hold pages run on, and leave no keys until they start anew; retired ones never.
void Manager::mute(Request& r, bool retire) {
    r.muted |= r.state != RequestState::kWaiting;
    r.clear_at(tick_);
    r.retired |= retire;
    if (!retire) return;
    r.looked_up = false;  // what it found is of the old root
    r.hit = r.hit_left = 0;
    r.present.clear();
    r.losses.current = false;
}

int32_t Manager::clear(bool retire) {
    ++tick_;
    for (const Slot& slot : slots_)
        if (slot.request) mute(*slot.request, retire);
    history_.each([&](Content& content) { content.clear_at(tick_); });
    for (auto& [id, load] : loads_) load.muted = true;
    arena_.forget_all();
    keyed_.clear();
    keyed_of_.clear();
    return KVC_OK;
}

int32_t Manager::clear_namespaces(const uint32_t* ns, int64_t n, bool retire) {
    ++tick_;
    NamespaceCounts chosen;
    for (int64_t i = 0; i < n; ++i) chosen.add(ns[i]);
    for (const Slot& slot : slots_)
        if (slot.request && chosen.of(slot.request->ns)) mute(*slot.request, retire);
    history_.each([&](Content& content) {
        if (chosen.of(content.ns)) content.clear_at(tick_);
    });
    for (auto& [id, load] : loads_)
        if (chosen.of(load.ns)) load.muted = true;
    if (std::any_of(ns, ns + n, [this](uint32_t one) { return arena_.keyed_in(one) > 0; })) arena_.forget(chosen);
    if (std::any_of(ns, ns + n, [this](uint32_t one) { return keyed_of_.of(one) > 0; }))
        std::erase_if(keyed_, [&](const kvc_keyed& item) { return chosen.of(item.ns) > 0; });
    for (int64_t i = 0; i < n; ++i) keyed_of_.clear(ns[i]);
    return KVC_OK;
}

}  // namespace kvc
