// Opening and growing requests: admission, the hash chain, block keys, what the policy keeps.
#include <algorithm>

#include "error.h"
#include "manager.h"

namespace kvc {

using L = long long;

namespace {
constexpr int64_t kFirstOutput = 1024;  // tokens that a request can be given before its memory grows
}

// ---- admission ------------------------------------------------------------------------------------------------------

// Slabs of each class that a request of so many tokens has to be able to hold at one time.
std::vector<int64_t> Manager::class_needs(int64_t most_tokens) const {
    std::vector<int64_t> slabs(pages_per_slab_.size(), 0);
    for (const GroupRules& group : groups_)
        slabs[static_cast<size_t>(group.size_class)] += group.need(most_tokens, grid_);
    for (size_t c = 0; c < slabs.size(); ++c) slabs[c] = (slabs[c] + pages_per_slab_[c] - 1) / pages_per_slab_[c];
    return slabs;
}

int32_t Manager::check_open(const kvc_open_args& args) const {
    if (args.n_tokens < 1)
        return fail(KVC_E_ARGUMENT, "the prompt has %lld tokens: it needs at least one", static_cast<L>(args.n_tokens));
    if (args.max_tokens > kMostTokens)
        return fail(KVC_E_ARGUMENT, "max_tokens is %lld: at most %lld are possible", static_cast<L>(args.max_tokens),
                    static_cast<L>(kMostTokens));
    if (args.max_tokens < args.n_tokens)
        return fail(KVC_E_ARGUMENT, "max_tokens is %lld, less than the prompt of %lld tokens",
                    static_cast<L>(args.max_tokens), static_cast<L>(args.n_tokens));
    if (args.n_digests < 0 || (args.tokens && (args.n_digests || args.digests)))
        return fail(KVC_E_ARGUMENT, "a request has tokens or foreign keys, not both");
    if (args.tokens && !args.root) return fail(KVC_E_ARGUMENT, "native requests need a root");
    if (!args.tokens && args.n_digests != args.n_tokens / unit_)
        return fail(KVC_E_ARGUMENT, "%lld keys for a prompt of %lld tokens: one for each full block of %lld are %lld",
                    static_cast<L>(args.n_digests), static_cast<L>(args.n_tokens), static_cast<L>(unit_),
                    static_cast<L>(args.n_tokens / unit_));
    if (!args.tokens && args.n_digests && !args.digests) return fail(KVC_E_ARGUMENT, "digests is NULL");
    if (args.n_media < 0 || (args.n_media && (!args.media || !args.tokens)))
        return fail(KVC_E_ARGUMENT, "%lld media items: native requests only, none where media is NULL",
                    static_cast<L>(args.n_media));
    for (int64_t i = 0; i < args.n_media; ++i) {
        const kvc_media& item = args.media[i];
        if (item.offset < 0 || item.length < 1 || item.offset > args.n_tokens - item.length ||
            (i && item.offset - args.media[i - 1].offset < args.media[i - 1].length))
            return fail(KVC_E_ARGUMENT,
                        "media item %lld covers %lld tokens from token %lld on: items must ascend, not overlap and lie"
                        " inside the prompt",
                        static_cast<L>(i), static_cast<L>(item.length), static_cast<L>(item.offset));
    }
    int64_t slabs = 0;
    for (const int64_t count : class_needs(args.max_tokens)) slabs += count;
    if (slabs > arena_.slabs())
        return fail(KVC_E_CAPACITY,
                    "a request of up to %lld tokens needs %lld slabs, the arena has %lld: raise `slabs` of the manager,"
                    " or lower max_tokens",
                    static_cast<L>(args.max_tokens), static_cast<L>(slabs), static_cast<L>(arena_.slabs()));
    return KVC_OK;
}

int32_t Manager::open(const kvc_open_args& args, int64_t* handle) {
    if (const auto status = check_open(args)) return status;
    auto request = std::make_unique<Request>();
    Request& r = *request;
    r.ns = args.ns;
    r.session = args.session;
    if (args.root) std::memcpy(r.root.bytes, args.root, 32);
    r.foreign = args.tokens == nullptr;
    r.max_tokens = args.max_tokens;
    r.needs = class_needs(args.max_tokens);
    r.intervals.assign(groups_.size(), 0);
    r.resident.resize(groups_.size());
    if (args.intervals)
        if (const auto status = retain_in(r, args.intervals, args.positions, args.declared, args.n_positions))
            return status;
    for (int64_t i = 0; i < args.n_media; ++i) {
        Media item{args.media[i].offset, args.media[i].length, {}};
        std::memcpy(item.digest.bytes, args.media[i].digest, 32);
        r.media.push_back(item);
    }
    if (r.foreign) {
        r.n_tokens = args.n_tokens;
        r.key_limit = args.n_digests * unit_;
        r.digests.resize(static_cast<size_t>(args.n_digests));
        if (args.n_digests) std::memcpy(r.digests.data(), args.digests, r.digests.size() * 32);
    } else {
        const int64_t soon = std::min(args.max_tokens, args.n_tokens + args.n_tokens / 32 + kFirstOutput);
        r.tokens.reserve(static_cast<size_t>(soon));
        r.digests.reserve(static_cast<size_t>(soon / unit_));
        append_tokens(r, args.tokens, args.n_tokens);
    }
    r.n_prompt = args.n_tokens;
    if (free_slots_.empty()) {
        free_slots_.reserve(slots_.size() + 1);  // so that closing never has to allocate
        slots_.emplace_back();
        free_slots_.push_back(slots_.size() - 1);
    }
    if (static_cast<int64_t>(by_age_.size()) > 2 * open_requests_ + 64)
        std::erase_if(by_age_, [&](int64_t old) { return !find(old); });
    users_.reserve(1);
    r.since = first_episode(r.ns, r.root);
    by_age_.push_back(0);
    const size_t index = free_slots_.back();
    free_slots_.pop_back();
    r.handle = slots_[index].generation << 32 | static_cast<int64_t>(index);
    r.order = ++last_order_;
    by_age_.back() = r.handle;
    slots_[index].request = std::move(request);
    *handle = r.handle;
    ++open_requests_;
    users_.add(args.ns);
    return KVC_OK;
}

// Evictions before this episode say nothing of the root: its number was another one's then.
uint64_t Manager::first_episode(uint32_t ns, const Digest& root) {
    const auto [at, added] = roots_.try_emplace(ns, Root{root, 0});
    if (!added && at->second.root != root) {
        at->second = {root, arena_.next_episode()};
        history_.forget(ns);
    }
    return at->second.since;
}

// ---- tokens and keys ------------------------------------------------------------------------------------------------

// Changes nothing if memory runs out.
void Manager::append_tokens(Request& r, const int32_t* tokens, int64_t n) const {
    const int64_t units = (r.n_tokens + n) / unit_;
    make_room(r.tokens, static_cast<size_t>(n));
    if (units > static_cast<int64_t>(r.digests.size())) return append_units(r, tokens, n, units);
    for (int64_t i = 0; i < n; ++i) r.tokens.push_back(tokens[i]);
    r.n_tokens += n;
}

// The same where hash units become full: so many there are then.
void Manager::append_units(Request& r, const int32_t* tokens, int64_t n, int64_t units) const {
    const auto known = static_cast<int64_t>(r.digests.size());
    make_room(r.digests, static_cast<size_t>(units - known));
    r.tokens.insert(r.tokens.end(), tokens, tokens + n);
    r.digests.resize(static_cast<size_t>(units));
    try {
        Digest parent = known ? r.digests[static_cast<size_t>(known) - 1] : r.root;
        std::vector<uint8_t> extra;
        for (int64_t unit = known; unit < units;) {
            const int64_t begin = unit * unit_;
            auto item =
                std::ranges::upper_bound(r.media, begin, {}, [](const Media& m) { return m.offset + m.length; });
            const int64_t plain = item == r.media.end() ? units : std::clamp(item->offset / unit_, unit, units);
            Digest* out = r.digests.data() + unit;
            if (plain > unit) {
                chain_.extend(parent, r.tokens.data() + begin, plain - unit, unit_, out);
                parent = out[plain - unit - 1];
                unit = plain;
                continue;
            }
            extra.clear();
            for (; item != r.media.end() && item->offset < begin + unit_; ++item) {
                const int64_t offset = item->offset - begin;
                const auto* bytes = reinterpret_cast<const uint8_t*>(&offset);
                extra.insert(extra.end(), item->digest.bytes, item->digest.bytes + 32);
                extra.insert(extra.end(), bytes, bytes + 8);
            }
            parent = *out = chain_.mixed(parent, r.tokens.data() + begin, unit_, extra.data(), extra.size());
            ++unit;
        }
    } catch (...) {
        r.tokens.resize(static_cast<size_t>(r.n_tokens));
        r.digests.resize(static_cast<size_t>(known));
        throw;
    }
    r.n_tokens += n;
}

int32_t Manager::extend(int64_t handle, const int32_t* tokens, int64_t n) {
    Request* r = find(handle);
    if (!r) return unknown(handle);
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld tokens to append", static_cast<L>(n));
    if (n > r->max_tokens - r->n_tokens)
        return fail(KVC_E_CAPACITY,
                    "request %lld has %lld tokens and cannot take %lld more, max_tokens is %lld: raise it in open()",
                    static_cast<L>(handle), static_cast<L>(r->n_tokens), static_cast<L>(n),
                    static_cast<L>(r->max_tokens));
    if (r->foreign && tokens)
        return fail(KVC_E_ARGUMENT, "request %lld has foreign keys: extend it by a count", static_cast<L>(handle));
    if (!r->foreign && !tokens && n)
        return fail(KVC_E_ARGUMENT, "request %lld has native keys: extend it by tokens", static_cast<L>(handle));
    const bool settles = r->state == RequestState::kRunning && r->unsettled(r->computed, r->n_tokens + n);
    if (settles) {
        Room room;
        reserve_settle(*r, r->computed, r->n_tokens + n, &room);
    }
    if (r->foreign) r->n_tokens += n;
    else append_tokens(*r, tokens, n);
    if (settles) settle(*r);
    return KVC_OK;
}

// The link that ends at `position`, a multiple of the hash unit; nullptr: unknown (yet).
const Digest* Manager::digest_at(const Request& r, int64_t position) const {
    const auto link = static_cast<size_t>(position / unit_);
    return link >= 1 && link <= r.digests.size() ? &r.digests[link - 1] : nullptr;
}

// Key of a block: the link of the hash unit that holds its last token (of a draft group: the last token that its content
// depends on). Blocks smaller than a unit are told apart by the number of blocks that follow them in it.
bool Manager::block_key(const Request& r, int32_t group, int64_t block, Digest* key) const {
    const GroupRules& g = rules(group);
    if (g.links_per_block) {
        const auto link = static_cast<size_t>((block + 1) * g.links_per_block + g.ahead_links);
        if (link > r.digests.size()) return false;
        *key = r.digests[link - 1];
        return true;
    }
    const int64_t end = (block + 1) * g.block_tokens;
    const Digest* link = digest_at(r, (end + g.lookahead_tokens + unit_ - 1) / unit_ * unit_);
    if (!link) return false;
    *key = *link;
    const auto follow = static_cast<uint32_t>((unit_ - end % unit_) % unit_ / g.block_tokens);
    if (!follow) return true;
    uint32_t last;
    std::memcpy(&last, key->bytes + 28, 4);
    last ^= follow;
    std::memcpy(key->bytes + 28, &last, 4);
    return true;
}

// Key of the block that ends at `end`, or of the state there.
bool Manager::key_at(const Request& r, int32_t group, int64_t end, Digest* key) const {
    if (!rules(group).state()) return block_key(r, group, end / rules(group).block_tokens - 1, key);
    const Digest* link = digest_at(r, end);
    if (link) *key = *link;
    return link;
}

// ---- retention ------------------------------------------------------------------------------------------------------

int32_t Manager::retain(int64_t handle, const int64_t* intervals, const int64_t* positions, const uint8_t* declared,
                        int64_t n) {
    Request* r = find(handle);
    return r ? retain_in(*r, intervals, positions, declared, n) : unknown(handle);
}

int32_t Manager::retain_in(Request& r, const int64_t* intervals, const int64_t* positions, const uint8_t* declared,
                           int64_t n) const {
    for (int32_t g = 0; g < n_groups_; ++g) {
        const int64_t interval = intervals[g];
        if (interval < 0 || interval > kMostTokens || interval % grid_)
            return fail(KVC_E_ARGUMENT,
                        "a retention interval of %lld tokens: it must be 0 or a multiple of the grid of %lld, up to"
                        " %lld",
                        static_cast<L>(interval), static_cast<L>(grid_), static_cast<L>(kMostTokens));
    }
    if (n < 0) return fail(KVC_E_ARGUMENT, "%lld retained positions", static_cast<L>(n));
    GroupSet sparse = state_set_;
    for (const int32_t g : spans_) sparse |= GroupSet{1} << g;
    std::vector<Kept> kept;
    for (int64_t i = 0; i < n; ++i) {
        if (positions[i] <= 0 || positions[i] % grid_ || (i && positions[i] <= positions[i - 1]))
            return fail(KVC_E_ARGUMENT, "retained position %lld: positions must ascend, above 0, on the grid of %lld",
                        static_cast<L>(positions[i]), static_cast<L>(grid_));
        kept.push_back({positions[i], sparse, declared[i] != 0});
    }
    std::vector<int64_t> copy(intervals, intervals + n_groups_);
    for (int32_t g = 0; g < n_groups_; ++g)
        if (!has(sparse, g)) copy[static_cast<size_t>(g)] = 0;
    r.intervals = std::move(copy);
    r.kept = std::move(kept);
    r.settle_at = {};
    return KVC_OK;
}

}  // namespace kvc
