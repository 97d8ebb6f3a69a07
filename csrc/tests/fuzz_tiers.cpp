// Loads, pins and the journal, and everything that reads, as a hostile caller uses them.
#include <algorithm>
#include <cstring>

#include "fuzz_manager.h"

namespace fuzz {

namespace {

constexpr int64_t kMostItems = 4096;

}  // namespace

int64_t ManagerFuzz::a_load() { return loads_.empty() || spite() ? random_.hostile() : random_.in(loads_); }

void ManagerFuzz::read() {
    const int64_t handle = a_handle(), first = a_count(20);
    const int32_t group = a_group();
    int32_t pages[16], source = 0;
    int64_t positions[16], n = 0, units = 0;
    const int64_t cap = random_.below(17);
    std::vector<uint8_t> digests(static_cast<size_t>(cap) * 32 + 1, 0xee);
    kvc_request_info info{};
    ask(handle, &info);
    call("kvc_table", [&] { return kvc_table(manager_, handle, group, first, pages, cap, &n); });
    call("kvc_state_plan", [&] { return kvc_state_plan(manager_, handle, group, &source, positions, pages, cap, &n); });
    call("kvc_digests", [&] { return kvc_digests(manager_, handle, first, digests.data(), cap, &units); });
    if (digests.back() != 0xee) broken(where_, "more digests were written than there was room for");
    int64_t blocks[16];
    call("kvc_holes", [&] { return kvc_holes(manager_, handle, group, blocks, cap, &n); });
    int32_t reason = 0;
    call("kvc_blockage", [&] { return kvc_blockage(manager_, handle, &reason); });
}

void ManagerFuzz::read_counts() {
    const int32_t group = a_group();
    kvc_manager_stats stats{};
    call("kvc_manager_get_stats", [&] { return kvc_manager_get_stats(manager_, &stats); });
    kvc_arena_stats arena{};
    call("kvc_get_arena_stats", [&] { return kvc_get_arena_stats(manager_, &arena); });
    kvc_class_stats of_class{};
    call("kvc_get_class_stats", [&] { return kvc_get_class_stats(manager_, group, &of_class); });
    kvc_group_stats of_group{};
    call("kvc_get_group_stats", [&] { return kvc_get_group_stats(manager_, group, &of_group); });
    int64_t uses = 0;
    const auto ns = static_cast<uint32_t>(spite() ? random_.next() : random_.below(4));
    call("kvc_namespace_use", [&] { return kvc_namespace_use(manager_, ns, &uses); });
}

void ManagerFuzz::take_moves() {
    std::vector<kvc_move> moves(static_cast<size_t>(kMostItems));
    const int64_t cap = random_.chance(20) ? random_.between(-1, 1) : kMostItems;
    int64_t n = 0, again = 0;
    const int32_t status = call("kvc_take_moves", [&] { return kvc_take_moves(manager_, moves.data(), cap, &n); });
    if (status != KVC_OK ||
        call("kvc_take_moves", [&] { return kvc_take_moves(manager_, moves.data(), kMostItems, &again); }) != KVC_OK)
        return;
    if (again != (n > cap ? n : 0))
        broken(where_, "%lld moves, then %lld", static_cast<long long>(n), static_cast<long long>(again));
}

// Room for exactly what was announced, or too little of something: then all is still there.
void ManagerFuzz::take_events() {
    kvc_event_counts cap{}, n{};
    auto take = [&](kvc_event_run* runs, uint8_t* keys, int32_t* tokens) {
        return call("kvc_take_events", [&] { return kvc_take_events(manager_, &cap, runs, keys, tokens, &n); });
    };
    if (take(nullptr, nullptr, nullptr) != KVC_OK || !n.runs) return;
    cap = n;
    if (random_.chance(20)) cap.runs = random_.between(-1, n.runs - 1);
    else if (random_.chance(20) && n.keys) cap.keys = random_.between(0, n.keys - 1);
    else if (random_.chance(20) && n.tokens) cap.tokens = random_.between(0, n.tokens - 1);
    const kvc_event_counts waiting = n;
    const bool room = !std::memcmp(&cap, &n, sizeof n);
    std::vector<kvc_event_run> runs(static_cast<size_t>(std::max<int64_t>(cap.runs, 0)) + 1);
    std::vector<uint8_t> keys(static_cast<size_t>(cap.keys) * 32 + 1, 0xee);
    std::vector<int32_t> tokens(static_cast<size_t>(cap.tokens) + 1, -77);
    const int32_t status = take(runs.data(), keys.data(), tokens.data());
    if (keys.back() != 0xee || tokens.back() != -77) broken(where_, "more was written than there was room for");
    int64_t keys_of_runs = 0, tokens_of_runs = 0;
    for (const kvc_event_run& run : runs) keys_of_runs += run.n_keys, tokens_of_runs += run.n_tokens;
    if (status == KVC_OK && room && (keys_of_runs != n.keys || tokens_of_runs != n.tokens))
        broken(where_, "the runs do not add up to what was announced");
    if (status == KVC_OK && !room && (keys_of_runs || tokens_of_runs || keys[0] != 0xee))
        broken(where_, "events were written without room for all");
    cap = {};
    if (status != KVC_OK || take(nullptr, nullptr, nullptr) != KVC_OK) return;
    const kvc_event_counts left = room ? kvc_event_counts{} : waiting;
    if (std::memcmp(&left, &n, sizeof n)) broken(where_, "other events wait than before, less those that were taken");
}

void ManagerFuzz::take_keyed() {
    std::vector<kvc_keyed> items(static_cast<size_t>(kMostItems));
    int64_t cap = random_.chance(20) ? random_.between(-1, 8) : kMostItems;
    int64_t n = 0;
    int32_t status = call("kvc_take_keyed", [&] { return kvc_take_keyed(manager_, items.data(), cap, &n); });
    if (status == KVC_OK && n > cap) {  // nothing was forgotten
        const int64_t announced = n;
        cap = kMostItems;
        status = call("kvc_take_keyed", [&] { return kvc_take_keyed(manager_, items.data(), cap, &n); });
        if (status == KVC_OK && n != announced)
            broken(where_, "%lld pages, then %lld", static_cast<long long>(announced), static_cast<long long>(n));
    }
    if (status != KVC_OK || n > cap) return;
    for (int64_t i = 0; i < std::min<int64_t>(n, 8); ++i) keyed_.push_back(random_.in(items));
    if (keyed_.size() > 64) keyed_.erase(keyed_.begin(), keyed_.begin() + 32);
}

void ManagerFuzz::end_load() {
    const int64_t load = a_load();
    std::vector<kvc_keyed> items(static_cast<size_t>(kMostItems));
    int64_t n = 0;
    if (call("kvc_load_items", [&] { return kvc_load_items(manager_, load, items.data(), kMostItems, &n); }) == KVC_OK)
        for (int64_t i = 0; i < std::min<int64_t>(n, 2); ++i) keyed_.push_back(items[static_cast<size_t>(i)]);
    std::vector<uint8_t> ok(static_cast<size_t>(std::max<int64_t>(n, 1)), 1);
    if (random_.chance(30)) ok[static_cast<size_t>(random_.below(n))] = 0;
    if (spite()) n = random_.hostile();
    if (call("kvc_end_load", [&] { return kvc_end_load(manager_, load, ok.data(), n); }) == KVC_OK)
        std::erase(loads_, load);
}

void ManagerFuzz::abandon_load() {
    const int64_t load = a_load();
    if (random_.chance(70)) return;
    call("kvc_abandon_load", [&] { return kvc_abandon_load(manager_, load); });
}

void ManagerFuzz::pin() {
    if (keyed_.empty()) return take_keyed();
    std::vector<kvc_keyed> items;
    for (int64_t i = random_.below(5); i-- > 0;) {
        items.push_back(random_.in(keyed_));
        if (!spite()) continue;
        switch (random_.below(4)) {
            case 0:
                items.back().group = random_.hostile32();
                break;
            case 1:
                items.back().page = random_.hostile32();
                break;
            case 2:
                items.back().ns = static_cast<uint32_t>(random_.next());
                break;
            default:
                items.back().digest[0] ^= 1;
                break;
        }
    }
    std::vector<uint8_t> pinned(items.size());
    const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(items.size());
    int64_t next = 0;
    std::vector<kvc_keyed> evicted(8);
    const int64_t slabs = spite() ? random_.hostile() : random_.below(20), cap = random_.below(9);
    call("kvc_next_evicted", [&] { return kvc_next_evicted(manager_, slabs, evicted.data(), cap, &next); });
    const int32_t status = call("kvc_pin", [&] { return kvc_pin(manager_, items.data(), n, pinned.data()); });
    if (status != KVC_OK) return;
    for (size_t i = 0; i < items.size(); ++i)
        if (pinned[i]) pins_.push_back({items[i].group, items[i].page});
}

void ManagerFuzz::unpin() {
    if (pins_.empty() || spite()) {
        int32_t pages[2] = {random_.hostile32(), static_cast<int32_t>(random_.below(16))};
        const int32_t group = a_group();
        const int64_t n = random_.chance(50) ? 2 : -1 - random_.below(INT64_MAX);
        // A pin that happens to be there goes from the books too.
        if (n < 0) call("kvc_unpin", [&] { return kvc_unpin(manager_, group, pages, n); });
        else if (pins_.empty() && call("kvc_unpin", [&] { return kvc_unpin(manager_, group, pages, n); }) == KVC_OK)
            broken(where_, "pages were unpinned that nobody had pinned");
        return;
    }
    const auto at = static_cast<size_t>(random_.below(static_cast<int64_t>(pins_.size())));
    const Pin pin = pins_[at];
    // Groups of one class share their page numbers, but a page is one group's.
    const int32_t other = static_cast<int32_t>(random_.below(setup_.config.n_groups));
    const auto theirs = [&](const Pin& p) { return p.group == other && p.page == pin.page; };
    if (std::none_of(pins_.begin(), pins_.end(), theirs) &&
        call("kvc_unpin", [&] { return kvc_unpin(manager_, other, &pin.page, 1); }) == KVC_OK)
        broken(where_, "page %d of group %d was unpinned through group %d", pin.page, pin.group, other);
    const int32_t status = call("kvc_unpin", [&] { return kvc_unpin(manager_, pin.group, &pin.page, 1); });
    if (status == KVC_OK) pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(at));
    else if (status != KVC_E_MEMORY) broken(where_, "a pin cannot be given back: %s", kvc_last_error());
}

void ManagerFuzz::has_key() {
    kvc_keyed item{};
    if (!keyed_.empty()) item = random_.in(keyed_);
    const int32_t group = spite() ? random_.hostile32() : item.group;
    int32_t page = 0;
    call("kvc_has_key", [&] { return kvc_has_key(manager_, group, item.ns, item.digest, &page); });
}

void ManagerFuzz::clear() {
    if (!handles_.empty() && !random_.chance(20)) return;
    const int32_t retire = spite() ? random_.hostile32() : random_.chance(20);
    if (call("kvc_clear", [&] { return kvc_clear(manager_, retire); }) == KVC_OK && random_.chance(50)) keyed_.clear();
}

void ManagerFuzz::clear_namespaces() {
    uint32_t ns[4];
    for (uint32_t& one : ns) one = static_cast<uint32_t>(spite() ? random_.next() : random_.below(4));
    const int64_t n = spite() ? random_.between(-2, 0) : random_.between(1, 4);
    if (!random_.chance(10)) return;
    const int32_t retire = random_.chance(20);
    if (call("kvc_clear_namespaces", [&] { return kvc_clear_namespaces(manager_, ns, n, retire); }) != KVC_OK) return;
    for (const kvc_keyed& item : keyed_) {
        if (std::find(ns, ns + n, item.ns) == ns + n) continue;
        int32_t page = 0;
        if (kvc_has_key(manager_, item.group, item.ns, item.digest, &page) != KVC_OK || page >= 0)
            broken(where_, "a key of namespace %u is found after it was cleared", item.ns);
    }
}

}  // namespace fuzz
