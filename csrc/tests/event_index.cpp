// Implementation of `event_index.h`.
#include "event_index.h"

#include <cstring>

namespace fuzz {

bool Events::operator==(const Events& other) const {
    return runs.size() == other.runs.size() && keys == other.keys && tokens == other.tokens &&
           (runs.empty() || !std::memcmp(runs.data(), other.runs.data(), runs.size() * sizeof(kvc_event_run)));
}

Events take_events(const Where& where, kvc_manager* manager) {
    const kvc_event_counts none{};
    kvc_event_counts n{}, left{};
    if (kvc_take_events(manager, &none, nullptr, nullptr, nullptr, &n))
        broken(where, "no counts: %s", kvc_last_error());
    Events events;
    events.runs.resize(static_cast<size_t>(n.runs));
    events.keys.resize(static_cast<size_t>(n.keys) * 32);
    events.tokens.resize(static_cast<size_t>(n.tokens));
    const kvc_event_counts cap = n;
    if (kvc_take_events(manager, &cap, events.runs.data(), events.keys.data(), events.tokens.data(), &n) ||
        std::memcmp(&cap, &n, sizeof n))
        broken(where, "no events: %s", kvc_last_error());
    if (kvc_take_events(manager, &none, nullptr, nullptr, nullptr, &left) || left.runs || left.keys || left.tokens)
        broken(where, "events were taken, and are still there");
    return events;
}

void EventIndex::apply(const Where& where, const Setup& setup, const Events& events) {
    const uint8_t* digest = events.keys.data();
    size_t tokens = 0;
    for (const kvc_event_run& run : events.runs) {
        const bool stored = run.kind == KVC_EVENT_STORED;
        if (!stored && run.kind != KVC_EVENT_REMOVED) broken(where, "an event of kind %d", run.kind);
        const int64_t block = setup.groups[static_cast<size_t>(run.group)].block_tokens;
        if (run.n_tokens && run.n_tokens != run.n_keys * block) broken(where, "a run with tokens of another length");
        tokens += static_cast<size_t>(run.n_tokens);
        for (int64_t i = 0; i < run.n_keys; ++i, digest += 32) {
            Key key{run.group, run.ns, {}};
            std::memcpy(std::get<2>(key).data(), digest, 32);
            if (stored ? !keys_.insert(key).second : !keys_.erase(key))
                broken(where, stored ? "a key was stored twice" : "a key has gone twice");
        }
    }
    if (digest != events.keys.data() + events.keys.size() || tokens != events.tokens.size())
        broken(where, "the runs do not add up to what was announced");
}

void EventIndex::check(const Where& where, const Setup& setup, kvc_manager* manager, bool settled) const {
    std::vector<int64_t> counts(setup.groups.size());
    for (const auto& [group, ns, digest] : keys_) {
        int32_t page = -1;
        if (kvc_has_key(manager, group, ns, digest.data(), &page) || page < 0)
            broken(where, "the events say that a key of group %d is there, and it is not", group);
        ++counts[static_cast<size_t>(group)];
    }
    for (int32_t g = 0; settled && g < setup.config.n_groups; ++g) {
        kvc_group_stats stats{};
        if (kvc_get_group_stats(manager, g, &stats) || stats.keyed != counts[static_cast<size_t>(g)])
            broken(where, "group %d has %lld keys, the events tell of %lld", g, static_cast<long long>(stats.keyed),
                   static_cast<long long>(counts[static_cast<size_t>(g)]));
    }
}

}  // namespace fuzz
