// Implementation of `journal_reader.h`.
#include "journal_reader.h"

#include <algorithm>
#include <cstring>

namespace fuzz {

kvc_pool_event JournalReader::marked() {
    kvc_pool_event event;
    std::memset(&event, 0xee, sizeof event);
    return event;
}

std::vector<bool> JournalReader::present(const Where& where) const {
    std::vector<uint8_t> now(static_cast<size_t>(2 * n_keys_));
    for (uint32_t ns = 0; ns < 2; ++ns)
        if (kvc_pool_present(pool_, ns, digests_, 32, n_keys_, now.data() + ns * static_cast<size_t>(n_keys_)))
            broken(where, "the keys cannot be read: %s", kvc_last_error());
    return {now.begin(), now.end()};
}

size_t JournalReader::index_of(const Where& where, const kvc_pool_event& event) const {
    for (int64_t i = 0; event.ns < 2 && i < n_keys_; ++i)
        if (!std::memcmp(event.digest, digests_ + i * 32, 32)) return static_cast<size_t>(event.ns * n_keys_ + i);
    broken(where, "an event of a key that nobody has published");
}

void JournalReader::took(const Where& where, const std::vector<kvc_pool_event>& events, int64_t cap, int64_t n) {
    const int64_t written = n <= cap ? n : 0;
    const kvc_pool_event untouched = marked();
    for (size_t i = static_cast<size_t>(written); i < events.size(); ++i)
        if (std::memcmp(&events[i], &untouched, sizeof untouched))
            broken(where, "%lld events announced, and more were written", static_cast<long long>(n));
    if (most_ < INT64_MAX && n > most_ + (most_ > 0))
        broken(where, "%lld events wait, of %lld at most", static_cast<long long>(n), static_cast<long long>(most_));
    if (n > cap) return;
    const std::vector<bool> now = present(where);
    const bool lost = n && events[0].kind == KVC_EVENT_LOST;
    std::vector<bool> told(believed_.size());
    for (size_t i = lost; i < static_cast<size_t>(n); ++i) {
        const size_t key = index_of(where, events[i]);
        const bool stored = events[i].kind == KVC_EVENT_STORED;
        if (!stored && events[i].kind != KVC_EVENT_REMOVED) broken(where, "an event of kind %d", events[i].kind);
        if ((!lost || told[key]) && believed_[key] == stored)
            broken(where, stored ? "a key was stored twice" : "a key has gone twice");
        believed_[key] = stored;
        told[key] = true;
    }
    for (size_t key = 0; most_ && key < now.size(); ++key)
        if ((!lost || told[key]) && believed_[key] != now[key])
            broken(where, "the events say that a key is %s, and it is not", believed_[key] ? "there" : "gone");
    believed_ = now;
}

}  // namespace fuzz
