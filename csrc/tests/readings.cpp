// Implementation of `readings.h`.
#include "readings.h"

#include <cstring>

namespace fuzz {

namespace {

constexpr int64_t kMostRead = 1024;  // entries of one answer

struct Reader {
    kvc_manager* manager;
    const Setup& setup;
    Readings all;

    // The struct's 64-bit fields; where it ends in two of 32 bits they count as one.
    template <typename T>
    void add(const char* what, int64_t which, const T& values) {
        int64_t fields[sizeof values / sizeof(int64_t)];
        static_assert(sizeof fields == sizeof values);
        std::memcpy(fields, &values, sizeof values);
        for (size_t i = 0; i < std::size(fields); ++i) all.push_back({what, which, static_cast<int>(i), fields[i]});
    }

    // Status, length and content (FNV-1a).
    template <typename T>
    void add(const char* what, int64_t which, int field, int32_t status, const T* entries, int64_t n) {
        uint64_t hash = 0xcbf29ce484222325;
        const auto* bytes = reinterpret_cast<const uint8_t*>(entries);
        for (size_t i = 0; status == KVC_OK && i < static_cast<size_t>(n) * sizeof(T); ++i)
            hash = (hash ^ bytes[i]) * 0x100000001b3;
        hash = (hash ^ static_cast<uint64_t>(status)) * 0x100000001b3;
        all.push_back({what, which, field, static_cast<int64_t>(hash ^ static_cast<uint64_t>(n))});
    }

    void counts(bool journals) {
        kvc_manager_stats stats{};
        kvc_manager_get_stats(manager, &stats);
        stats.frozen = 0;  // that the oldest request waits may come with "no space"
        if (!journals) stats.keyed_dropped = stats.events_dropped = 0;
        add("stats", 0, stats);
        kvc_arena_stats arena{};
        kvc_get_arena_stats(manager, &arena);
        add("arena", 0, arena);
        for (int32_t c = 0; c < setup.config.n_classes; ++c) {
            kvc_class_stats of_class{};
            kvc_get_class_stats(manager, c, &of_class);
            add("class", c, of_class);
        }
        for (int32_t g = 0; g < setup.config.n_groups; ++g) {
            kvc_group_stats of_group{};
            kvc_get_group_stats(manager, g, &of_group);
            add("group", g, of_group);
        }
        int64_t waiting[5] = {};
        kvc_take_moves(manager, nullptr, 0, &waiting[0]);
        if (journals) {
            kvc_take_keyed(manager, nullptr, 0, &waiting[1]);  // no room: nothing is taken
            const kvc_event_counts none{};
            kvc_event_counts events{};
            kvc_take_events(manager, &none, nullptr, nullptr, nullptr, &events);  // neither here
            waiting[2] = events.runs, waiting[3] = events.keys, waiting[4] = events.tokens;
            for (uint32_t ns = 0; ns < 4; ++ns) {
                int64_t uses = 0;
                kvc_namespace_use(manager, ns, &uses);
                add("namespace", ns, uses);
            }
        }
        add("waiting", 0, waiting);
    }

    void request(int64_t handle) {
        kvc_request_info info{};
        kvc_info(manager, handle, &info);
        add("request", handle, info);
        int64_t n = 0;
        kvc_digests(manager, handle, 0, nullptr, 0, &n);
        std::vector<uint8_t> digests(static_cast<size_t>(n) * 32);
        int32_t status = kvc_digests(manager, handle, 0, digests.data(), n, &n);
        add("digests", handle, 0, status, digests.data(), n * 32);
        int32_t pages[kMostRead];
        int64_t numbers[kMostRead];
        for (int32_t g = 0; g < setup.config.n_groups; ++g) {
            n = 0;
            status = kvc_table(manager, handle, g, 0, pages, kMostRead, &n);
            add("table", handle, g, status, pages, std::min(n, kMostRead));
            n = 0;
            status = kvc_holes(manager, handle, g, numbers, kMostRead, &n);
            add("holes", handle, g, status, numbers, std::min(n, kMostRead));
            n = 0;
            int32_t source = 0;
            status = kvc_state_plan(manager, handle, g, &source, numbers, pages, kMostRead, &n);
            add("plan's source", handle, g, status, &source, 1);
            add("plan's positions", handle, g, status, numbers, std::min(n, kMostRead));
            add("plan's pages", handle, g, status, pages, std::min(n, kMostRead));
        }
    }

    void load(int64_t id) {
        kvc_keyed items[64] = {};
        int64_t n = 0;
        const int32_t status = kvc_load_items(manager, id, items, std::size(items), &n);
        add("load", id, 0, status, items, std::min<int64_t>(n, std::size(items)));
    }
};

}  // namespace

Readings read_all(kvc_manager* manager, const Setup& setup, const std::vector<int64_t>& handles,
                  const std::vector<int64_t>& loads, bool journals) {
    Reader reader{manager, setup, {}};
    reader.counts(journals);
    for (const int64_t handle : handles) reader.request(handle);
    for (const int64_t load : loads) reader.load(load);
    return std::move(reader.all);
}

void expect_equal(const Where& where, const Readings& wanted, const Readings& seen, const std::string& why) {
    if (wanted.size() != seen.size()) broken(where, "%s, but there are more or fewer answers", why.c_str());
    for (size_t i = 0; i < seen.size(); ++i) {
        const Reading &old = wanted[i], &now = seen[i];
        if (old.value == now.value) continue;
        broken(where, "%s, but field %d of %s %lld is %lld, not %lld", why.c_str(), now.field, now.what,
               static_cast<long long>(now.which), static_cast<long long>(now.value), static_cast<long long>(old.value));
    }
}

}  // namespace fuzz
