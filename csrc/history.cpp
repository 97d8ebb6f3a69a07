// The closed requests of `history.h`: a list from the newest to the oldest, in places that are used again.
#include "history.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace kvc {

// The newest entry of a session, which the same session has gone on with.
bool History::continues(const Entry& entry, const Content& content) const {
    const Content& before = entry.content;
    if (before.session != content.session || !before.shares_root(content)) return false;
    const size_t links = before.digests.size();
    return links > 0 && links <= content.digests.size() && before.digests[links - 1] == content.digests[links - 1];
}

void History::add(Content&& content) noexcept {
    if (content.n_tokens > most_tokens_) return;
    try {
        // A short prompt has more room than content: open() leaves some for its output.
        if (content.tokens.capacity() > 2 * content.tokens.size()) content.tokens.shrink_to_fit();
        if (content.digests.capacity() > 2 * content.digests.size()) content.digests.shrink_to_fit();
        if (newest_of_.empty()) newest_of_.assign(kSessions, -1);
        if (unused_.empty()) {
            if (entries_.size() == entries_.capacity()) entries_.reserve(2 * entries_.size() + 16);
            unused_.reserve(entries_.capacity());
            entries_.emplace_back();
            unused_.push_back(static_cast<int32_t>(entries_.size() - 1));
        }
    } catch (const std::bad_alloc&) {
        return;
    }
    int32_t& known = newest_of_[content.session % kSessions];
    if (content.session && known >= 0 && at(known).content.closed && continues(at(known), content)) {
        const Content& before = at(known).content;  // the same content, computed before
        content.reached = std::max(content.reached, before.reached);
        if (!content.started) {
            content.started = before.started;
            content.ended = before.ended;
            content.cleared = before.cleared;
        }
        drop(known);
    }
    const int32_t place = unused_.back();
    unused_.pop_back();
    if (content.session) known = place;
    Entry& entry = entries_[static_cast<size_t>(place)];
    tokens_ += content.n_tokens;
    ++entries_kept_;
    entry.content = std::move(content);
    entry.older = newest_;
    entry.newer = -1;
    (newest_ >= 0 ? entries_[static_cast<size_t>(newest_)].newer : oldest_) = place;
    newest_ = place;
    while (tokens_ > most_tokens_ || entries_kept_ > kMostEntries) drop(oldest_);
}

void History::drop(int32_t i) {
    Entry& entry = entries_[static_cast<size_t>(i)];
    (entry.older >= 0 ? entries_[static_cast<size_t>(entry.older)].newer : oldest_) = entry.newer;
    (entry.newer >= 0 ? entries_[static_cast<size_t>(entry.newer)].older : newest_) = entry.older;
    tokens_ -= entry.content.n_tokens;
    --entries_kept_;
    entry.content = {};
    unused_.push_back(i);  // add() has made room
}

void History::forget(uint32_t ns) {
    for (int32_t i = newest_; i >= 0;) {
        const int32_t older = at(i).older;
        if (at(i).content.ns == ns) drop(i);
        i = older;
    }
}

const char* History::check() const {
    int64_t tokens = 0, entries = 0;
    int32_t newer = -1;
    for (int32_t i = newest_; i >= 0; newer = i, i = at(i).older) {
        if (at(i).newer != newer || ++entries > std::ssize(entries_)) return "the list of closed requests is broken";
        if (!at(i).content.closed) return "a request is remembered that was not closed";
        tokens += at(i).content.n_tokens;
    }
    if (oldest_ != newer) return "the list of closed requests does not end with the oldest";
    if (tokens != tokens_ || entries != entries_kept_) return "closed requests are miscounted";
    if (entries + std::ssize(unused_) != std::ssize(entries_)) return "places for closed requests are lost";
    if (tokens > most_tokens_ || entries > kMostEntries) return "more closed requests are remembered than allowed";
    return nullptr;
}

}  // namespace kvc
