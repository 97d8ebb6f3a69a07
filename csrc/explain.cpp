// Why a lookup lost tokens: the regions that it told, split further, each with its evidence.
//
// What was evicted, pending or without a state is known from the lookup. The rest was never stored under these keys: it is
// compared with the request that has most in common with this one, open or closed, and if more can be said so, with one
// that had the same tokens under another root.
#include <algorithm>
#include <iterator>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

namespace {

constexpr int64_t kShownTokens = std::ssize(decltype(kvc_loss::own){});

kvc_loss make_loss(int64_t begin, int64_t end, int32_t cause, int32_t told) {
    kvc_loss loss{};
    loss.begin = begin;
    loss.end = end;
    loss.cause = cause;
    loss.told = told;
    loss.group = -1;
    loss.position = loss.evicted_ns = -1;
    loss.other_tokens = loss.other_computed = loss.other_closed_ns = -1;
    return loss;
}

int32_t copy_tokens(const std::vector<int32_t>& tokens, int64_t begin, int64_t end, int32_t* out) {
    const int64_t n = std::clamp<int64_t>(end - begin, 0, kShownTokens);
    std::copy_n(tokens.begin() + begin, n, out);
    return static_cast<int32_t>(n);
}

}  // namespace

// ---- evidence -------------------------------------------------------------------------------------------------------

void Manager::name_other(const Sibling& other, kvc_loss* loss) const {
    const Content& content = *other.content;
    loss->other = content.handle;
    loss->other_session = content.session;
    loss->other_tokens = content.n_tokens;
    loss->other_computed = std::max(content.reached, other.open ? other.open->settled() : 0);
    loss->other_closed_ns = content.closed ? now_ns() - content.closed_ns : -1;
    std::copy_n(content.root.bytes, 32, loss->other_root);
}

void Manager::show_difference(const Request& r, const Sibling& other, kvc_loss* loss) const {
    const int64_t at = loss->position = other.difference.position;
    if (r.foreign) return;
    const int64_t before = std::max<int64_t>(at - kShownTokens, 0);
    loss->n_before = copy_tokens(r.tokens, before, at, loss->before);
    loss->n_own = copy_tokens(r.tokens, at, r.losses.tokens(), loss->own);
    loss->n_others = copy_tokens(other.content->tokens, at, other.content->n_tokens, loss->others);
}

// The first page of the region that went, and what went from then on until the lookup.
void Manager::explain_evicted(const Request& r, kvc_loss* loss) const {
    uint64_t first = 0;
    int64_t at = INT64_MAX;
    const auto look = [&](int32_t g, const Digest& key, int64_t position) {
        const uint64_t episode = arena_.evicted_in(g, key, r.ns, r.since);
        if (!episode) return false;
        if (position >= at) return true;
        first = episode;
        at = position;
        loss->group = g;
        return true;
    };
    Digest key;
    for (const int32_t g : full_) {
        const int64_t block = rules(g).block_tokens;
        for (int64_t b = loss->begin / block; (b + 1) * block <= std::min(loss->end, at); ++b)
            if (block_key(r, g, b, &key) && look(g, key, b * block)) break;
    }
    for (const int32_t g : states_)
        if (const Digest* link = digest_at(r, loss->end)) look(g, *link, loss->end);
    for (const int32_t g : spans_) {
        const int64_t block = rules(g).block_tokens;
        if (rules(g).draft()) continue;
        for (int64_t b = rules(g).need_begin(loss->end) / block; (b + 1) * block <= loss->end; ++b)
            if (block_key(r, g, b, &key) && look(g, key, b * block)) break;
    }
    if (!first) return;
    loss->position = at;
    const EvictedKeys::Episode* episode = arena_.episode(first);
    if (!episode || episode->evictions >= r.losses.evictions) return;  // forgotten, or it came back and went once more
    loss->evicted_ns = now_ns() - episode->ns;
    loss->evicted_pages = r.losses.evictions - episode->evictions;
    loss->evicted_slabs = r.losses.evicted_slabs - episode->slabs;
    loss->other = episode->handle;
    loss->other_session = episode->session;
}

void Manager::explain_pending(const Request& r, kvc_loss* loss) const {
    Digest key;
    for (const auto& [id, load] : loads_)
        for (const kvc_keyed& item : load.items) {
            if (item.ns != r.ns || item.end <= loss->begin || item.end > loss->end) continue;
            if (!key_at(r, item.group, item.end, &key) || std::memcmp(key.bytes, item.digest, 32) != 0) continue;
            loss->load = id;
            loss->other = item.handle;
            if (const Request* other = peek(item.handle)) name_other({other, other, 0, {}}, loss);
            return;
        }
    const Sibling writer = longest_common(r, true);
    if (!writer.content || writer.difference.position <= loss->begin) return;
    name_other(writer, loss);
    if (writer.open && open_step(writer.open->last_step)) loss->step = writer.open->last_step;
}

// ---- what was never stored under these keys ---------------------------------------------------------------------------

void Manager::explain_new(const Request& r, const Request::Lost& lost, std::vector<kvc_loss>* out) const {
    int64_t at = lost.begin;
    const auto add = [&](int64_t upto, int32_t cause, int32_t why, const Sibling* other) -> kvc_loss* {
        upto = std::min(upto, lost.end);
        if (upto <= at) return nullptr;
        out->push_back(make_loss(at, upto, cause, lost.cause));
        at = upto;
        out->back().why = why;
        if (other) name_other(*other, &out->back());
        return &out->back();
    };
    if (r.losses.retired) {
        add(lost.end, KVC_LOST_NEW, KVC_WHY_RETIRED, nullptr);
        return;
    }
    const uint64_t tick = r.losses.tick;
    const auto stored = [&](int64_t upto, const Sibling* by) {  // computed, and not there
        if (full_.empty()) add(upto, KVC_LOST_STATE, KVC_WHY_UNKEPT, by);
        else if (r.losses.evictions) add(upto, KVC_LOST_EVICTED, KVC_WHY_FORGOTTEN, by);
        else add(upto, KVC_LOST_NEW, KVC_WHY_UNKEPT, by);
    };
    const Sibling self{&r, nullptr, 0, {}};
    const int64_t own = r.losses.reached / grid_ * grid_;
    if (r.losses.cleared) add(own, KVC_LOST_NEW, KVC_WHY_CLEARED, &self);
    else stored(own, &self);
    Sibling differing;
    const Sibling same = longest_common(r, false, &differing);
    // With less in common than what was stored, it is not the one that this request goes on from.
    const bool related = same.content && same.difference.position > 0 && same.difference.position >= at;
    const int64_t common = related ? same.difference.position : at;
    if (related) {
        const Content& other = *same.content;
        const int64_t upto = common / grid_ * grid_;
        if (other.cleared && other.cleared < tick)
            add(std::min(upto, std::max(other.reached, same.open ? same.open->settled() : 0) / grid_ * grid_),
                KVC_LOST_NEW, KVC_WHY_CLEARED, &same);
        else stored(std::min(upto, computed_before(same, tick) / grid_ * grid_), &same);
        const bool open = !other.closed || other.closed > tick;
        add(upto, KVC_LOST_NEW, open ? KVC_WHY_UNCOMPUTED : other.aborted ? KVC_WHY_ABORTED : KVC_WHY_ENDED, &same);
    }
    const Sibling apart = longest_under_another_root(r, std::max(common, at));
    if (apart.content) add(apart.difference.position / grid_ * grid_, KVC_LOST_KEY, KVC_WHY_NEW, &apart);
    else if (related && differing.content) {
        if (differing.difference.kind == Difference::kExtra) {
            const int64_t equal = equal_tokens(r, *differing.content, differing.difference.position);
            kvc_loss* loss = add((equal + grid_ - 1) / grid_ * grid_, KVC_LOST_KEY, KVC_WHY_NEW, &differing);
            if (loss) show_difference(r, differing, loss);
            differing.difference = {Difference::kTokens, equal};
        }
        if (differing.difference.position < std::min(r.losses.tokens(), differing.content->n_tokens)) {
            kvc_loss* loss = add(differing.content->n_tokens / grid_ * grid_, KVC_LOST_TOKENS, KVC_WHY_NEW, &differing);
            if (loss) show_difference(r, differing, loss);
        }
    }
    add(lost.end, KVC_LOST_NEW, KVC_WHY_NEW, nullptr);
}

// ---- the call -----------------------------------------------------------------------------------------------------

// How far the lookup would have got with these maps: of what it did not find on the device itself, only they count for a
// request that holds pages, as what it computed since was not there.
int64_t Manager::hit_elsewhere(const Request& r, const Maps& maps) const {
    const auto held = [&](int32_t g, int64_t index) {
        const auto& map = maps[static_cast<size_t>(g)];
        return index < std::ssize(map) && map[static_cast<size_t>(index)];
    };
    const bool waits = r.state == RequestState::kWaiting;
    int64_t hit = r.losses.retired ? 0 : std::max<int64_t>(r.losses.tokens() - 1, 0) / grid_ * grid_;
    hit = std::min(hit, known_tokens(r) / grid_ * grid_);
    for (const int32_t g : full_) {
        const int64_t block = rules(g).block_tokens;
        int64_t b = r.losses.full() / block;
        while ((b + 1) * block <= hit && held(g, b)) ++b;
        hit = std::min(hit, b * block / grid_ * grid_);
    }
    const auto serves = [&](int64_t position) {
        for (const int32_t g : states_)
            if (!held(g, position / grid_ - 1) && !(waits && state_at(r, g, position, kDevice))) return false;
        for (const int32_t g : spans_) {
            if (rules(g).draft()) continue;
            const int64_t block = rules(g).block_tokens;
            for (int64_t b = position / block - 1; b >= 0 && (b + 1) * block > rules(g).need_begin(position); --b)
                if (!held(g, b) && !(waits && block_at(r, g, b, kDevice))) return false;
        }
        return true;
    };
    while (hit > r.losses.hit() && !serves(hit)) hit -= grid_;
    return hit;
}

void Manager::explain_region(const Request& r, const Request::Lost& lost, std::vector<kvc_loss>* out) const {
    if (lost.begin >= lost.end) return;
    if (lost.cause == KVC_LOST_NEW) return explain_new(r, lost, out);
    kvc_loss& loss = out->emplace_back(make_loss(lost.begin, lost.end, lost.cause, lost.cause));
    if (lost.cause == KVC_LOST_EVICTED) explain_evicted(r, &loss);
    if (lost.cause == KVC_LOST_PENDING) explain_pending(r, &loss);
    if (lost.cause == KVC_LOST_STATE) {
        loss.group = r.losses.lacking;
        loss.position = r.losses.hit();
    }
}

int32_t Manager::explain(int64_t handle, const uint8_t* const* elsewhere, const int64_t* n_elsewhere,
                         kvc_explained* out, kvc_loss* losses, int64_t cap, int64_t* n) {
    const Request* r = find(handle);
    if (!r) return unknown(handle);
    if (!r->losses.n)
        return fail(KVC_E_STATE, "request %lld was not looked up yet: there is nothing to explain before lookup()",
                    static_cast<L>(handle));
    if (elsewhere && !n_elsewhere) return fail(KVC_E_ARGUMENT, "elsewhere has no lengths");
    Maps maps(groups_.size());
    for (size_t g = 0; elsewhere && g < maps.size(); ++g) {
        if (n_elsewhere[g] < 0) return fail(KVC_E_ARGUMENT, "elsewhere[%zu] has a negative length", g);
        if (n_elsewhere[g] && !elsewhere[g]) return fail(KVC_E_ARGUMENT, "elsewhere[%zu] is NULL", g);
        maps[g] = {elsewhere[g], static_cast<size_t>(n_elsewhere[g])};
    }
    const int64_t there = elsewhere ? hit_elsewhere(*r, maps) : 0;
    std::vector<kvc_loss> all;
    for (size_t i = 0; i < r->losses.n; ++i) {
        Request::Lost lost = r->losses.regions[i];
        if (const int64_t upto = std::min(lost.end, there); upto > lost.begin) {
            all.push_back(make_loss(lost.begin, upto, KVC_LOST_ELSEWHERE, lost.cause));
            lost.begin = upto;
        }
        explain_region(*r, lost, &all);
    }
    *out = {r->losses.tokens(), r->losses.hit(), r->losses.full()};
    *n = std::ssize(all);
    std::copy_n(all.begin(), std::min(*n, cap), losses);
    return KVC_OK;
}

}  // namespace kvc
