// Implementation of `lives.h`.
#include "lives.h"

#include <algorithm>
#include <array>

namespace fuzz {

namespace {

constexpr int64_t kTextTokens = 240;
constexpr size_t kMostOpen = 6;

Setup roomy_setup(Random& random) {
    Setup setup = make_setup(random);
    setup.config.max_open_steps = random.one_of({2, 2, 3});
    setup.config.journal = setup.config.events = random.chance(50);
    return setup;
}

}  // namespace

Lives::Lives(uint64_t seed, Counts* tally)
    : random_(seed), where_{.seed = seed, .operation = -1}, setup_(roomy_setup(random_)), tally_(tally) {
    if (where_.trace) setup_.print();
    for (int64_t i = 0; i < kTextTokens; ++i) text_.push_back(static_cast<int32_t>(random_.next()));
}

void Lives::run(int64_t operations) {
    for (where_.operation = 0; where_.operation < operations; ++where_.operation) {
        operate();
        if (random_.chance(20)) twins_.read_events();
    }
    give_everything_back();
    for (const auto& [function, counts] : twins_.tally) {
        (*tally_)[function].first += counts.first;
        (*tally_)[function].second += counts.second;
    }
}

void Lives::operate() {
    const int64_t dice = random_.below(100);
    if (dice < 43) progress();
    else if (dice < 55) progress_together();
    else if (dice < 65) open();
    else if (dice < 72) end_step();
    else if (dice < 76) retain();
    else if (dice < 80) close(random_.one_of({kvc_finish, kvc_abort}));
    else if (dice < 84) close(kvc_preempt);
    else if (dice < 88) end_load();
    else if (dice < 92) pin();
    else if (dice < 96) unpin();
    else if (dice < 98) take_moves();
    else if (dice < 99) clear();
    else abandon_load();
}

kvc_request_info Lives::info_of(int64_t handle) {
    kvc_request_info info{};
    if (kvc_info(twins_.healthy(), handle, &info)) broken(where_, "a request is gone");
    return info;
}

void Lives::open() {
    if (twins_.handles.size() >= kMostOpen) return end_step();
    std::vector<int32_t> tokens(text_.begin(), text_.begin() + random_.between(1, kTextTokens / 3));
    if (random_.chance(40)) tokens[static_cast<size_t>(random_.below(static_cast<int64_t>(tokens.size())))] = 7;
    const uint8_t root[32] = {1};
    const kvc_media image{2, 5, {3}};
    std::vector<uint8_t> digests;
    kvc_open_args args{};
    args.ns = random_.chance(80) ? 0 : 1;
    args.n_tokens = static_cast<int64_t>(tokens.size());
    args.max_tokens = args.n_tokens + random_.between(0, 60);
    if (random_.chance(90)) {
        args.root = root;
        args.tokens = tokens.data();
        if (args.n_tokens > 8 && random_.chance(20)) args.media = &image, args.n_media = 1;
    } else {
        args.ns = 2;
        args.n_digests = args.n_tokens / setup_.config.hash_unit_tokens;
        for (int64_t i = 0; i < args.n_digests * 32; ++i) digests.push_back(static_cast<uint8_t>(i / 32));
        args.digests = digests.data();
    }
    int64_t handle = 0;
    const auto body = [&](kvc_manager* manager, int64_t* out) { return kvc_open(manager, &args, out); };
    if (twins_.ask("kvc_open", &handle, body) == KVC_OK) twins_.handles.push_back(handle);
}

// What the request's state asks for next.
void Lives::progress() {
    if (twins_.handles.empty()) return open();
    const int64_t handle = random_.in(twins_.handles);
    const kvc_request_info info = info_of(handle);
    if (info.state == 2) return end_load();
    const int64_t start = info.state == 0 ? look_up(handle) : info.committed;
    const int64_t known = info.n_tokens - start;
    if (known <= 0) return extend(handle, random_.between(1, 4));
    const int64_t n = random_.chance(10) ? 0 : random_.chance(60) ? known : random_.between(1, known);
    const int64_t drafts = n == known && random_.chance(50) ? random_.between(1, 4) : 0;  // maybe too many
    if (random_.chance(10)) {
        std::array<int64_t, 4> pages{};
        twins_.ask("kvc_need", &pages,
                   [&](kvc_manager* manager, auto* out) { return kvc_need(manager, handle, n, drafts, out->data()); });
    }
    kvc_grant grant{};
    const int32_t status = twins_.ask("kvc_allocate", &grant, [&](kvc_manager* manager, kvc_grant* out) {
        return kvc_allocate(manager, handle, n, drafts, out);
    });
    if (where_.trace)
        std::fprintf(stderr, "    request %lld: %lld tokens and %lld drafts, granted (%lld, %lld], load %lld\n",
                     static_cast<long long>(handle), static_cast<long long>(n), static_cast<long long>(drafts),
                     static_cast<long long>(grant.start), static_cast<long long>(grant.end),
                     static_cast<long long>(grant.load));
    if (status == KVC_NO_SPACE) return make_space();
    if (status != KVC_OK) return;
    if (grant.load) return twins_.loads.push_back(grant.load);
    if (n && random_.chance(90)) commit(handle, grant, std::min(grant.start + n, grant.end));
}

// Some of the guesses are rejected; the others become known, and one token more.
void Lives::commit(int64_t handle, const kvc_grant& grant, int64_t sure) {
    if (steps_.empty() || random_.chance(40)) begin_step();
    int64_t upto = random_.between(sure, grant.end);
    if (random_.chance(10)) upto = random_.between(grant.start + 1, grant.end);  // refused where grants are whole
    if (where_.trace)
        std::fprintf(stderr, "    request %lld up to %lld\n", static_cast<long long>(handle),
                     static_cast<long long>(upto));
    const int64_t held = held_pages();
    const auto body = [&](kvc_manager* manager) { return kvc_commit(manager, handle, upto); };
    if (twins_.ask("kvc_commit", body) != KVC_OK) return;
    if (held_pages() < held) broken(where_, "a page has come free that an open step may still write");
    if (sure < grant.end) expect_no_blocks_beyond(handle, upto);
    if (upto > sure || random_.chance(50)) extend(handle, upto - info_of(handle).n_tokens + 1);
    if (random_.chance(30)) end_step();
}

int64_t Lives::held_pages() {
    int64_t held = 0;
    for (int32_t c = 0; c < setup_.config.n_classes; ++c) {
        kvc_class_stats stats{};
        if (kvc_get_class_stats(twins_.healthy(), c, &stats)) broken(where_, "no counts: %s", kvc_last_error());
        held += stats.held;
    }
    return held;
}

// Blocks of rejected guesses are not the request's any more.
void Lives::expect_no_blocks_beyond(int64_t handle, int64_t upto) {
    for (int32_t g = 0; g < setup_.config.n_groups; ++g) {
        const kvc_group& group = setup_.groups[static_cast<size_t>(g)];
        if (group.kind != KVC_FULL && group.kind != KVC_SPAN) continue;
        int64_t n = 0;
        if (kvc_table(twins_.healthy(), handle, g, 0, nullptr, 0, &n)) broken(where_, "no table");
        if (n != (upto + group.block_tokens - 1) / group.block_tokens)
            broken(where_, "group %d has %lld blocks for %lld tokens", g, static_cast<long long>(n),
                   static_cast<long long>(upto));
    }
}

void Lives::extend(int64_t handle, int64_t n) {
    const kvc_request_info info = info_of(handle);
    if (n <= 0 || info.n_tokens + n > kTextTokens) return close(kvc_finish);
    const int32_t* tokens = info.ns == 2 ? nullptr : text_.data() + info.n_tokens;
    twins_.ask("kvc_extend", [&](kvc_manager* manager) { return kvc_extend(manager, handle, tokens, n); });
}

int64_t Lives::look_up(int64_t handle) {
    std::vector<std::vector<uint8_t>> held;
    std::vector<const uint8_t*> present;
    std::vector<int64_t> counts;
    for (int32_t g = 0; g < setup_.config.n_groups; ++g) {
        std::vector<uint8_t> bytes(static_cast<size_t>(random_.below(60)));
        for (uint8_t& byte : bytes) byte = random_.chance(90);
        held.push_back(std::move(bytes));
        present.push_back(held.back().data());
        counts.push_back(static_cast<int64_t>(held.back().size()));
    }
    const bool tier = random_.chance(30);
    kvc_hit hit{};
    twins_.ask("kvc_lookup", &hit, [&](kvc_manager* manager, kvc_hit* out) {
        return kvc_lookup(manager, handle, tier ? present.data() : nullptr, tier ? counts.data() : nullptr, out);
    });
    return hit.hit_tokens;
}

void Lives::retain() {
    if (twins_.handles.empty()) return;
    const int64_t handle = random_.in(twins_.handles), grid = setup_.config.grid_tokens;
    int64_t intervals[4], positions[3];
    uint8_t declared[3];
    for (int64_t& interval : intervals) interval = random_.below(4) * grid;
    for (int64_t i = 0, at = 0; i < 3; ++i) {
        positions[i] = at += random_.between(1, 4) * grid;
        declared[i] = random_.chance(50);
    }
    const int64_t n = random_.below(4);
    twins_.ask("kvc_retain",
               [&](kvc_manager* manager) { return kvc_retain(manager, handle, intervals, positions, declared, n); });
}

void Lives::begin_step() {
    if (static_cast<int32_t>(steps_.size()) == setup_.config.max_open_steps) end_step();
    int64_t step = 0;
    const auto body = [](kvc_manager* manager, int64_t* out) { return kvc_begin_step(manager, out); };
    if (twins_.ask("kvc_begin_step", &step, body)) broken(where_, "no step: %s", kvc_last_error());
    steps_.push_back(step);
    twins_.open_steps = static_cast<int64_t>(steps_.size());
}

void Lives::end_step() {
    if (steps_.empty()) return;
    const int64_t step = steps_.front();
    if (twins_.ask("kvc_end_step", [&](kvc_manager* manager) { return kvc_end_step(manager, step); }))
        broken(where_, "the step does not end: %s", kvc_last_error());
    steps_.erase(steps_.begin());
    twins_.open_steps = static_cast<int64_t>(steps_.size());
}

void Lives::close(int32_t (*how)(kvc_manager*, int64_t)) {
    if (twins_.handles.empty()) return;
    const int64_t handle = random_.in(twins_.handles);
    const char* name = how == kvc_preempt ? "kvc_preempt" : how == kvc_finish ? "kvc_finish" : "kvc_abort";
    const int32_t status = twins_.ask(name, [&](kvc_manager* manager) { return how(manager, handle); });
    if (status == KVC_OK && how != kvc_preempt) std::erase(twins_.handles, handle);
}

void Lives::make_space() {
    if (!steps_.empty()) end_step();
    else if (random_.chance(70)) close(kvc_preempt);
    else close(kvc_abort);
}

}  // namespace fuzz
