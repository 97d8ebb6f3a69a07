// Loads, pins, moves and clears of the twins' requests, and their end.
#include <algorithm>

#include "lives.h"

namespace fuzz {

namespace {

constexpr int64_t kMostItems = 4;

struct Wanted {  // what kvc_pin gets and tells
    kvc_keyed items[kMostItems];
    uint8_t pinned[kMostItems];
};

}  // namespace

void Lives::end_load() {
    if (twins_.loads.empty()) return;
    const int64_t load = random_.in(twins_.loads);
    std::vector<kvc_keyed> items(256);
    int64_t n = 0;
    if (kvc_load_items(twins_.healthy(), load, items.data(), 256, &n)) broken(where_, "no load: %s", kvc_last_error());
    for (int64_t i = 0; i < std::min<int64_t>(n, 2); ++i) keyed_.push_back(items[static_cast<size_t>(i)]);
    std::vector<uint8_t> ok(static_cast<size_t>(n), 1);
    if (random_.chance(30)) ok[static_cast<size_t>(random_.below(n))] = 0;
    const auto body = [&](kvc_manager* manager) { return kvc_end_load(manager, load, ok.data(), n); };
    if (twins_.ask("kvc_end_load", body) == KVC_OK) std::erase(twins_.loads, load);
}

void Lives::abandon_load() {
    if (twins_.loads.empty()) return;
    const int64_t load = random_.in(twins_.loads);
    twins_.ask("kvc_abandon_load", [&](kvc_manager* manager) { return kvc_abandon_load(manager, load); });
}

void Lives::pin() {
    remember_keys();
    if (keyed_.empty()) return;
    Wanted wanted{};
    const int64_t n = random_.between(1, kMostItems);
    for (int64_t i = 0; i < n; ++i) wanted.items[i] = random_.in(keyed_);
    const int32_t status = twins_.ask("kvc_pin", &wanted, [&](kvc_manager* manager, Wanted* out) {
        return kvc_pin(manager, out->items, n, out->pinned);
    });
    for (int64_t i = 0; status == KVC_OK && i < n; ++i)
        if (wanted.pinned[i]) pins_.push_back({wanted.items[i].group, wanted.items[i].page});
}

void Lives::unpin() {
    if (pins_.empty()) return;
    const Pin pin = random_.in(pins_);
    const auto body = [&](kvc_manager* manager) { return kvc_unpin(manager, pin.group, &pin.page, 1); };
    if (twins_.ask("kvc_unpin", body)) broken(where_, "a pin cannot be given back: %s", kvc_last_error());
    pins_.erase(std::find_if(pins_.begin(), pins_.end(),
                             [&](const Pin& p) { return p.group == pin.group && p.page == pin.page; }));
}

// The starving twin may have lost some: what it has is taken, and forgotten, too.
void Lives::remember_keys() {
    if (!setup_.config.journal) return;
    std::vector<kvc_keyed> items(4096);
    for (kvc_manager* manager : twins_.both()) {
        int64_t n = 0;
        if (kvc_take_keyed(manager, items.data(), 4096, &n) || n > 4096) broken(where_, "no keyed pages");
        for (int64_t i = 0; i < std::min<int64_t>(n, 8); ++i) keyed_.push_back(items[static_cast<size_t>(i)]);
    }
    if (keyed_.size() > 64) keyed_.erase(keyed_.begin(), keyed_.end() - 64);
}

void Lives::take_moves() {
    struct Moves {
        int64_t n;
        kvc_move moves[512];
    } moves{};
    twins_.ask("kvc_take_moves", &moves, [](kvc_manager* manager, Moves* out) {
        return kvc_take_moves(manager, out->moves, std::size(out->moves), &out->n);
    });
}

void Lives::clear() {
    const bool retire = random_.chance(20);
    if (random_.chance(50)) {
        twins_.ask("kvc_clear", [&](kvc_manager* manager) { return kvc_clear(manager, retire); });
        return;
    }
    const uint32_t ns[2] = {static_cast<uint32_t>(random_.below(3)), static_cast<uint32_t>(random_.below(3))};
    const int64_t n = random_.between(1, 2);
    twins_.ask("kvc_clear_namespaces",
               [&](kvc_manager* manager) { return kvc_clear_namespaces(manager, ns, n, retire); });
}

void Lives::give_everything_back() {
    while (!steps_.empty()) end_step();
    while (!twins_.loads.empty()) end_load();
    while (!twins_.handles.empty()) close(kvc_finish);
    while (!pins_.empty()) unpin();
    twins_.read_events();
    for (kvc_manager* manager : twins_.both())
        for (int32_t c = 0; c < setup_.config.n_classes; ++c) {
            kvc_class_stats stats{};
            if (kvc_get_class_stats(manager, c, &stats) || stats.held) broken(where_, "pages are held by nobody");
        }
}

}  // namespace fuzz
