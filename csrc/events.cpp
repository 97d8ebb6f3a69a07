// What became findable, and what went: the material of KV events, in order, as runs of neighbouring blocks.
#include <algorithm>
#include <new>

#include "manager.h"

namespace kvc {

namespace {
// Waiting to be taken; of keys at least so many, and more where there are more pages: a clear tells of all of them.
constexpr int64_t kMostEventKeys = int64_t{1} << 20;
constexpr size_t kMostEventTokens = size_t{1} << 25;
}  // namespace

bool Manager::continues(const kvc_event_run& last, const kvc_event_run& head) const {
    if (last.kind != head.kind || last.group != head.group || last.ns != head.ns) return false;
    if (head.kind == KVC_EVENT_REMOVED) return true;
    return head.kind == KVC_EVENT_STORED && last.handle == head.handle && (last.n_tokens > 0) == (head.n_tokens > 0) &&
           last.first_end + last.n_keys * rules(last.group).block_tokens == head.first_end && head.has_parent &&
           std::equal(head.parent, head.parent + 32, run_keys_.end() - 32);
}

// What does not fit any more is lost, and said to be: everything that waits goes, one KVC_EVENT_LOST takes its place.
void Manager::push_event(const kvc_event_run& head, const uint8_t* key, const int32_t* tokens) {
    if (!events_) return;
    try {
        const auto n_tokens = static_cast<size_t>(head.n_tokens);
        const auto most = static_cast<size_t>(std::max(kMostEventKeys, most_untaken()));
        if (run_keys_.size() / 32 >= most || runs_.size() >= most || run_tokens_.size() + n_tokens > kMostEventTokens)
            throw std::bad_alloc();
        make_room(run_keys_, 32);
        make_room(run_tokens_, n_tokens);
        if (!runs_.empty() && continues(runs_.back(), head)) {
            runs_.back().n_keys += head.n_keys;
            runs_.back().n_tokens += head.n_tokens;
        } else {
            runs_of_.add(head.ns);
            runs_.push_back(head);
        }
        if (key) run_keys_.insert(run_keys_.end(), key, key + 32);
        if (n_tokens) run_tokens_.insert(run_tokens_.end(), tokens, tokens + n_tokens);
    } catch (const std::bad_alloc&) {
        events_dropped_ += static_cast<int64_t>(run_keys_.size() / 32) + 1;
        runs_.clear();
        runs_of_.clear();
        run_keys_.clear();
        run_tokens_.clear();
        kvc_event_run lost{};
        lost.kind = KVC_EVENT_LOST;
        runs_.push_back(lost);  // the vector keeps its memory
    }
}

// Key of the block before the one that ends at `end`; of a state, one grid unit before. All zero for the first.
Digest Manager::parent_key(const Request& r, int32_t group, int64_t end) const {
    const int64_t begin = end - rules(group).block_tokens;
    Digest parent{};
    if (begin <= 0) return parent;
    if (rules(group).state()) return *digest_at(r, begin);
    block_key(r, group, begin / rules(group).block_tokens - 1, &parent);
    return parent;
}

void Manager::stored(int32_t group, int32_t page) {
    if (writer_ && !parent_) push_keyed(writer_->handle, group, page);  // what a load filled is in a tier already
    if (!events_) return;
    const Page& target = arena_.page(group, page);
    const auto end = static_cast<int64_t>(target.end);
    const int64_t begin = end - rules(group).block_tokens;
    kvc_event_run head{};
    head.kind = KVC_EVENT_STORED;
    head.group = group;
    head.ns = target.ns;
    head.first_end = end;
    head.n_keys = 1;
    const int32_t* tokens = nullptr;
    head.has_parent = begin > 0;
    if (begin > 0) {
        const Digest parent = parent_ ? *parent_ : parent_key(*writer_, group, end);
        std::memcpy(head.parent, parent.bytes, 32);
    }
    if (writer_) {
        const Request& r = *writer_;
        head.handle = r.handle;
        if (!r.foreign && end <= r.n_tokens) {
            head.n_tokens = rules(group).block_tokens;
            tokens = r.tokens.data() + begin;
        }
    }
    push_event(head, target.digest.bytes, tokens);
}

void Manager::removed(int32_t group, const Digest& digest, uint32_t ns) {
    if (!events_) return;
    kvc_event_run head{};
    head.kind = KVC_EVENT_REMOVED;
    head.group = group;
    head.ns = ns;
    head.n_keys = 1;
    push_event(head, digest.bytes, nullptr);
}

int32_t Manager::take_events(const kvc_event_counts& cap, kvc_event_run* runs, uint8_t* keys, int32_t* tokens,
                             kvc_event_counts* n) {
    *n = {static_cast<int64_t>(runs_.size()), static_cast<int64_t>(run_keys_.size() / 32),
          static_cast<int64_t>(run_tokens_.size())};
    if (n->runs > cap.runs || n->keys > cap.keys || n->tokens > cap.tokens) return KVC_OK;
    std::copy(runs_.begin(), runs_.end(), runs);
    std::copy(run_keys_.begin(), run_keys_.end(), keys);
    std::copy(run_tokens_.begin(), run_tokens_.end(), tokens);
    runs_.clear();
    run_keys_.clear();
    run_tokens_.clear();
    runs_of_.clear();
    return KVC_OK;
}

}  // namespace kvc
