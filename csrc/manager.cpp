// Opening and reading requests; check().
#include "manager.h"

#include <algorithm>

#include "error.h"
#include "exclusive.h"

namespace kvc {

using L = long long;

Manager::Manager(const kvc_config& config, const kvc_group* groups)
    : groups_(groups, groups + config.n_groups),
      unit_(config.hash_unit_tokens),
      grid_(config.grid_tokens),
      max_open_steps_(config.max_open_steps),
      chain_(compress_function(ShaPath::kBest)),
      journal_(config.journal != 0) {
    for (int32_t g = 0; g < config.n_groups; ++g) {
        (groups_[static_cast<size_t>(g)].kind == KVC_FULL ? attention_ : states_).push_back(g);
        pools_.emplace_back(groups_[static_cast<size_t>(g)].pages, config.seed + static_cast<uint64_t>(g));
    }
}

// ---- handles: generation in the upper, slot in the lower 32 bits -----------------------------------------------------

const Request* Manager::peek(int64_t handle) const {
    const auto index = static_cast<size_t>(handle & 0xffffffff);
    if (handle <= 0 || index >= slots_.size() || slots_[index].generation != handle >> 32) return nullptr;
    return slots_[index].request.get();
}

Request* Manager::find(int64_t handle) { return const_cast<Request*>(peek(handle)); }

int32_t Manager::unknown(int64_t handle) const {
    return fail(KVC_E_HANDLE, "request %lld is unknown or closed", static_cast<L>(handle));
}

int32_t Manager::check_group(int32_t group) const {
    if (group >= 0 && group < static_cast<int32_t>(groups_.size())) return KVC_OK;
    return fail(KVC_E_ARGUMENT, "group %d: there are %zu", group, groups_.size());
}

// ---- opening --------------------------------------------------------------------------------------------------------

int32_t Manager::open(const kvc_open_args& args, int64_t* handle) {
    if (args.n_tokens < 1)
        return fail(KVC_E_ARGUMENT, "the prompt has %lld tokens: it needs at least one", static_cast<L>(args.n_tokens));
    if (args.max_tokens > kMostTokens)
        return fail(KVC_E_ARGUMENT, "max_tokens is %lld: at most %lld are possible", static_cast<L>(args.max_tokens),
                    static_cast<L>(kMostTokens));
    if (args.max_tokens < args.n_tokens)
        return fail(KVC_E_ARGUMENT, "max_tokens is %lld, less than the prompt of %lld tokens",
                    static_cast<L>(args.max_tokens), static_cast<L>(args.n_tokens));
    if ((args.ns == 0) != (args.tokens != nullptr) || (args.ns == 0 && !args.root))
        return fail(KVC_E_ARGUMENT,
                    "native requests have tokens, a root and namespace 0; foreign ones digests and a"
                    " namespace above 0");
    if (args.ns && args.n_digests != args.n_tokens / unit_)
        return fail(KVC_E_ARGUMENT, "%lld keys for a prompt of %lld tokens: one for each full block of %lld are %lld",
                    static_cast<L>(args.n_digests), static_cast<L>(args.n_tokens), static_cast<L>(unit_),
                    static_cast<L>(args.n_tokens / unit_));
    for (size_t g = 0; g < groups_.size(); ++g) {
        const int64_t block = groups_[g].block_tokens;
        const int64_t pages = groups_[g].kind == KVC_FULL ? (args.max_tokens - 1) / block + 1 : 2;
        if (pages > groups_[g].pages)
            return fail(KVC_E_CAPACITY,
                        "a request of up to %lld tokens needs %lld pages of group %zu, whose pool has %lld: raise its"
                        " pages, or lower max_tokens",
                        static_cast<L>(args.max_tokens), static_cast<L>(pages), g, static_cast<L>(groups_[g].pages));
    }
    auto request = std::make_unique<Request>();
    Request& r = *request;
    r.ns = args.ns;
    r.max_tokens = args.max_tokens;
    if (args.ns) {
        r.n_tokens = args.n_tokens;
        r.digests.resize(static_cast<size_t>(args.n_digests));
        if (args.n_digests) std::memcpy(r.digests.data(), args.digests, r.digests.size() * 32);
    } else {
        std::memcpy(r.root.bytes, args.root, 32);
    }
    r.n_prompt = args.n_tokens;
    if (!args.ns) append_tokens(r, args.tokens, args.n_tokens);
    if (free_slots_.empty()) {
        free_slots_.reserve(slots_.size() + 1);
        slots_.emplace_back();
        free_slots_.push_back(slots_.size() - 1);
    }
    const size_t index = free_slots_.back();
    free_slots_.pop_back();
    r.handle = slots_[index].generation << 32 | static_cast<int64_t>(index);
    slots_[index].request = std::move(request);
    *handle = r.handle;
    ++open_requests_;
    return KVC_OK;
}

// Hashes what became full. Changes nothing if memory runs out.
void Manager::append_tokens(Request& r, const int32_t* tokens, int64_t n) const {
    const auto known = static_cast<int64_t>(r.digests.size());
    const int64_t units = (r.n_tokens + n) / unit_;
    if (r.tokens.size() + static_cast<size_t>(n) > r.tokens.capacity())
        r.tokens.reserve(std::max(r.tokens.size() + static_cast<size_t>(n), 2 * r.tokens.size()));
    if (static_cast<size_t>(units) > r.digests.capacity())
        r.digests.reserve(std::max(static_cast<size_t>(units), 2 * r.digests.size()));
    std::vector<Digest> links(static_cast<size_t>(units - known));
    r.tokens.insert(r.tokens.end(), tokens, tokens + n);
    if (units > known) {
        try {
            chain_.extend(known ? r.digests.back() : r.root, r.tokens.data() + known * unit_, units - known, unit_,
                          links.data());
        } catch (...) {
            r.tokens.resize(static_cast<size_t>(r.n_tokens));
            throw;
        }
    }
    r.digests.insert(r.digests.end(), links.begin(), links.end());
    r.n_tokens += n;
}

int32_t Manager::extend(int64_t handle, const int32_t* tokens, int64_t n) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld tokens to append", static_cast<L>(n));
    if (n > r->max_tokens - r->n_tokens)
        return fail(KVC_E_CAPACITY,
                    "request %lld would grow to %lld tokens, but max_tokens is %lld: raise it in open()",
                    static_cast<L>(handle), static_cast<L>(r->n_tokens + n), static_cast<L>(r->max_tokens));
    if (r->ns) {
        if (tokens)
            return fail(KVC_E_ARGUMENT, "request %lld has foreign keys: extend it by a count", static_cast<L>(handle));
        r->n_tokens += n;
        return KVC_OK;
    }
    if (!tokens && n)
        return fail(KVC_E_ARGUMENT, "request %lld has native keys: extend it by tokens", static_cast<L>(handle));
    append_tokens(*r, tokens, n);
    if (r->state == RequestState::kRunning) key_blocks(*r);
    return KVC_OK;
}

int32_t Manager::retain(int64_t handle, int64_t interval, const int64_t* positions, const uint8_t* kept, int64_t n) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (interval < 0 || interval > kMostTokens || interval % grid_)
        return fail(KVC_E_ARGUMENT,
                    "a retention interval of %lld tokens: it must be 0 or a multiple of the grid of %lld, up to %lld",
                    static_cast<L>(interval), static_cast<L>(grid_), static_cast<L>(kMostTokens));
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld retained positions", static_cast<L>(n));
    std::vector<Retained> retained;
    for (int64_t i = 0; i < n; ++i) {
        if (positions[i] <= 0 || positions[i] % grid_ || (i && positions[i] <= positions[i - 1]))
            return fail(KVC_E_ARGUMENT, "retained position %lld: positions must ascend, above 0, on the grid of %lld",
                        static_cast<L>(positions[i]), static_cast<L>(grid_));
        retained.push_back({positions[i], kept[i] != 0});
    }
    r->interval = interval;
    r->retained = std::move(retained);
    return KVC_OK;
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
    out->state = static_cast<int32_t>(r->state);
    out->ns = r->ns;
    return KVC_OK;
}

int32_t Manager::digests(int64_t handle, const uint8_t** digests, int64_t* n_units) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    *digests = reinterpret_cast<const uint8_t*>(r->digests.data());
    *n_units = static_cast<int64_t>(r->digests.size());
    return KVC_OK;
}

int32_t Manager::table(int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (const auto status = check_group(group)) return status;
    if (groups_[static_cast<size_t>(group)].kind != KVC_FULL || first < 0)
        return fail(KVC_E_ARGUMENT, "group %d, block %lld: only attention groups have a block table, from block 0 on",
                    group, static_cast<L>(first));
    *n = 0;
    if (r->tables.empty()) return KVC_OK;
    const auto& table = r->tables[static_cast<size_t>(group)];
    *n = std::max<int64_t>(static_cast<int64_t>(table.size()) - first, 0);
    if (*n) std::copy_n(table.begin() + first, std::min(*n, cap), pages);
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

int32_t Manager::stats(kvc_manager_stats* out) {
    *out = {};
    out->open_requests = open_requests_;
    out->open_steps = static_cast<int64_t>(steps_.size());
    out->open_loads = static_cast<int64_t>(loads_.size());
    out->pinned = pinned_;
    out->keyed_dropped = keyed_dropped_;
    return KVC_OK;
}

int32_t Manager::group_stats(int32_t group, kvc_pool_stats* out) {
    if (const auto status = check_group(group)) return status;
    fill_stats(pools_[static_cast<size_t>(group)], out);
    return KVC_OK;
}

int32_t Manager::has_key(int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page) {
    if (const auto status = check_group(group)) return status;
    Digest key;
    std::memcpy(key.bytes, digest, 32);
    const Pool& pool = pools_[static_cast<size_t>(group)];
    *page = pool.find(key, ns);
    if (*page != kNoPage && pool.page(*page).key != Page::kVisible) *page = kNoPage;
    return KVC_OK;
}

int32_t Manager::clear() {
    if (!steps_.empty() || !loads_.empty())
        return fail(KVC_E_STATE, "%zu steps and %zu loads are open: end them before clear()", steps_.size(),
                    loads_.size());
    for (const Slot& slot : slots_)
        if (slot.request && slot.request->state != RequestState::kWaiting)
            return fail(KVC_E_STATE, "request %lld holds pages: finish, abort or preempt it before clear()",
                        static_cast<L>(slot.request->handle));
    for (Pool& pool : pools_) pool.forget_all();
    keyed_.clear();
    return KVC_OK;
}

// ---- check ----------------------------------------------------------------------------------------------------------

// Adds each request's references to refs[group][page]; returns what is broken, or nullptr.
const char* Manager::check_requests(std::vector<std::vector<int32_t>>* refs) const {
    for (const Slot& slot : slots_) {
        if (!slot.request) continue;
        const Request& r = *slot.request;
        const bool waiting = r.state == RequestState::kWaiting;
        if (waiting && !(r.tables.empty() && r.points.empty() && r.plan.empty() && r.working.pages.empty()))
            return "a waiting request holds pages";
        if ((r.load != 0) != (r.state == RequestState::kLoading)) return "a load and its request disagree";
        if (r.load && !loads_.contains(r.load)) return "a request waits for a load that is not open";
        if (r.computed > r.committed || r.committed > r.granted) return "computed, committed, granted do not ascend";
        for (size_t g = 0; g < r.tables.size(); ++g)
            if (r.keyed_blocks[g] > static_cast<int64_t>(r.tables[g].size()))
                return "more keys are settled than blocks";
        for (size_t g = 0; g < r.tables.size(); ++g)
            for (const int32_t page : r.tables[g]) ++(*refs)[g][static_cast<size_t>(page)];
        auto count = [&](const Point& point) {
            for (size_t s = 0; s < point.pages.size(); ++s)
                ++(*refs)[static_cast<size_t>(states_[s])][static_cast<size_t>(point.pages[s])];
        };
        for (size_t i = 0; i < r.points.size(); ++i) {
            if (!r.points[i].frozen || (i && r.points[i].position <= r.points[i - 1].position))
                return "snapshots are not frozen in ascending order";
            count(r.points[i]);
        }
        count(r.working);
        if (r.plan_open)
            for (const Point& point : r.plan)
                if (r.working.pages.empty() || point.pages != r.working.pages) count(point);
    }
    return nullptr;
}

// A pending key is some load's, or being written by an open step for a request that takes part in it.
const char* Manager::check_pending() const {
    std::vector<std::vector<bool>> owned;
    for (const Pool& pool : pools_) owned.emplace_back(static_cast<size_t>(pool.created()), false);
    for (const auto& [id, load] : loads_)
        for (const kvc_keyed& item : load.items)
            owned[static_cast<size_t>(item.group)][static_cast<size_t>(item.page)] = true;
    for (const Slot& slot : slots_) {
        if (!slot.request || !open_step(slot.request->last_step)) continue;
        const Request& r = *slot.request;
        for (size_t g = 0; g < r.tables.size(); ++g)
            for (const int32_t page : r.tables[g]) owned[g][static_cast<size_t>(page)] = true;
        for (const Point& point : r.points)
            for (size_t s = 0; s < point.pages.size(); ++s)
                owned[static_cast<size_t>(states_[s])][static_cast<size_t>(point.pages[s])] = true;
    }
    for (size_t g = 0; g < pools_.size(); ++g)
        for (size_t page = 0; page < owned[g].size(); ++page)
            if (pools_[g].page(static_cast<int32_t>(page)).key == Page::kPending && !owned[g][page])
                return "a key is pending that nobody writes";
    return nullptr;
}

int32_t Manager::check() {
    std::vector<std::vector<int32_t>> refs;
    for (const Pool& pool : pools_) {
        if (const char* broken = pool.check()) return fail(KVC_E_INVARIANT, "page pool: %s", broken);
        refs.emplace_back(static_cast<size_t>(pool.created()), 0);
    }
    if (const char* broken = check_requests(&refs)) return fail(KVC_E_INVARIANT, "%s", broken);
    if (const char* broken = check_pending()) return fail(KVC_E_INVARIANT, "%s", broken);
    for (const auto& [id, load] : loads_) {
        if (load.handle && (!find(load.handle) || find(load.handle)->load != id))
            return fail(KVC_E_INVARIANT, "load %lld has no request", static_cast<L>(id));
        for (const kvc_keyed& item : load.items)
            ++refs[static_cast<size_t>(item.group)][static_cast<size_t>(item.page)];
    }
    for (const Step& step : steps_)
        for (const Release& freed : step.releases)
            ++refs[static_cast<size_t>(freed.group)][static_cast<size_t>(freed.page)];
    int64_t pinned = 0;
    for (size_t g = 0; g < pools_.size(); ++g)
        for (size_t page = 0; page < refs[g].size(); ++page) {
            const Page& held = pools_[g].page(static_cast<int32_t>(page));
            pinned += held.pins;
            if (held.refs != refs[g][page] + held.pins)
                return fail(KVC_E_INVARIANT, "page %zu of group %zu has %d references, %d are accounted for", page, g,
                            held.refs, refs[g][page] + held.pins);
        }
    if (pinned != pinned_) return fail(KVC_E_INVARIANT, "the count of pins is wrong");
    return KVC_OK;
}

}  // namespace kvc
