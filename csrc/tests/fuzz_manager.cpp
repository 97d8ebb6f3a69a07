// The life of requests, as a hostile caller sees it.
#include "fuzz_manager.h"

#include <algorithm>

namespace fuzz {

namespace {

constexpr int64_t kTextTokens = 200;
constexpr size_t kMostOpen = 12;

}  // namespace

ManagerFuzz::ManagerFuzz(uint64_t seed, Tally* tally)
    : random_(seed),
      where_{.seed = seed, .operation = -1, .function = "kvc_manager_new"},
      tally_(tally),
      setup_(random_.chance(30) ? make_hostile_setup(random_) : make_setup(random_)),
      spite_percent_(random_.one_of<int64_t>({0, 4, 15, 40})),
      starve_percent_(random_.one_of<int64_t>({0, 0, 3, 20})) {
    bool starved = false;
    const int32_t status = starving(random_, starve_percent_, &starved, [&] { return setup_.make(&manager_); });
    check_status(where_, status, starved);
    ++(*tally_)["kvc_manager_new"][status];
    if (status != KVC_OK) {
        if (manager_) broken(where_, "status %d, but a manager came out", status);
        if (setup_.valid && !starved) broken(where_, "a good setup was refused: %s", kvc_last_error());
    }
    if (where_.trace) setup_.print();
    for (int64_t i = 0; i < kTextTokens; ++i) text_.push_back(static_cast<int32_t>(random_.next()));
}

ManagerFuzz::~ManagerFuzz() { kvc_manager_free(manager_); }

void ManagerFuzz::run(int64_t operations) {
    for (where_.operation = 0; where_.operation < operations; ++where_.operation) {
        one_operation();
        if (where_.trace || where_.operation % 32 == 0) check();
    }
    give_everything_back();
}

void ManagerFuzz::one_operation() {
    using Operation = void (ManagerFuzz::*)();
    // The first ones come more often, so that requests get somewhere.
    static constexpr Operation kOperations[] = {
        &ManagerFuzz::advance,
        &ManagerFuzz::advance,
        &ManagerFuzz::advance,
        &ManagerFuzz::open,
        &ManagerFuzz::open,
        &ManagerFuzz::extend,
        &ManagerFuzz::retain,
        &ManagerFuzz::stops,
        &ManagerFuzz::lookup,
        static_cast<Operation>(&ManagerFuzz::explain),
        &ManagerFuzz::need,
        static_cast<Operation>(&ManagerFuzz::allocate),
        &ManagerFuzz::begin_step,
        &ManagerFuzz::commit,
        &ManagerFuzz::end_step,
        &ManagerFuzz::allocate_many,
        &ManagerFuzz::commit_many,
        &ManagerFuzz::extend_many,
        &ManagerFuzz::close,
        &ManagerFuzz::read,
        &ManagerFuzz::read_counts,
        &ManagerFuzz::take_moves,
        &ManagerFuzz::take_events,
        &ManagerFuzz::take_keyed,
        &ManagerFuzz::end_load,
        &ManagerFuzz::abandon_load,
        &ManagerFuzz::pin,
        &ManagerFuzz::unpin,
        &ManagerFuzz::has_key,
        &ManagerFuzz::clear,
        &ManagerFuzz::clear_namespaces,
    };
    (this->*kOperations[random_.below(std::size(kOperations))])();
}

// ---- arguments ------------------------------------------------------------------------------------------------------

int64_t ManagerFuzz::a_handle() {
    if (handles_.empty() || spite()) {
        if (!closed_.empty() && random_.chance(60)) return random_.in(closed_);
        return random_.hostile();
    }
    return random_.in(handles_);
}

int32_t ManagerFuzz::a_group() {
    return spite() ? random_.hostile32() : static_cast<int32_t>(random_.below(setup_.config.n_groups));
}

bool ManagerFuzz::ask(int64_t handle, kvc_request_info* info) {
    const bool known = call("kvc_info", [&] { return kvc_info(manager_, handle, info); }) == KVC_OK;
    if (where_.trace && known)
        std::fprintf(stderr, "    request %lld has %lld tokens: %lld computed, %lld committed, %lld granted\n",
                     static_cast<long long>(handle), static_cast<long long>(info->n_tokens),
                     static_cast<long long>(info->computed), static_cast<long long>(info->committed),
                     static_cast<long long>(info->granted));
    return known;
}

// ---- operations -----------------------------------------------------------------------------------------------------

void ManagerFuzz::open() {
    if (handles_.size() >= kMostOpen) return close();
    std::vector<int32_t> tokens(text_.begin(), text_.begin() + random_.between(1, kTextTokens / 2));
    if (random_.chance(50)) tokens[static_cast<size_t>(random_.below(static_cast<int64_t>(tokens.size())))] = 7;
    uint8_t root[32] = {static_cast<uint8_t>(random_.below(2))};
    std::vector<uint8_t> digests;
    kvc_open_args args{};
    args.ns = static_cast<uint32_t>(random_.below(4));
    args.session = static_cast<uint64_t>(random_.chance(80) ? random_.below(4) : random_.hostile());
    args.n_tokens = static_cast<int64_t>(tokens.size());
    args.max_tokens = args.n_tokens + random_.between(0, 60);
    if (random_.chance(80)) {
        args.root = root;
        args.tokens = tokens.data();
    } else {
        args.n_digests = args.n_tokens / setup_.config.hash_unit_tokens;
        for (int64_t i = 0; i < args.n_digests * 32; ++i) digests.push_back(static_cast<uint8_t>(i / 32));
        args.digests = digests.data();
        if (random_.chance(50)) args.root = root;
    }
    kvc_media media[2] = {{2, 3, {1}}, {random_.between(5, 9), random_.between(1, 4), {2}}};
    if (args.tokens && args.n_tokens >= 13 && random_.chance(20)) {
        args.media = media;
        args.n_media = 2;
    }
    if (spite()) {
        switch (random_.below(9)) {
            case 6:
                media[random_.below(2)].offset = random_.hostile();
                break;
            case 7:
                media[random_.below(2)].length = random_.hostile();
                break;
            case 8:
                args.n_media = -random_.below(INT64_MAX);
                break;
            case 0:
                args.n_tokens = -random_.below(INT64_MAX);
                break;
            case 1:
                args.max_tokens = random_.hostile();
                break;
            case 2:
                args.n_tokens = args.max_tokens + 1 + random_.below(1000);
                break;
            case 3:
                args.n_digests = random_.hostile() | INT64_MIN;
                break;
            case 4:
                args.root = nullptr;
                break;
            default:
                args.tokens = nullptr;
                break;
        }
    }
    Kept kept;
    if (random_.chance(60)) {
        kept = some_kept();
        args.intervals = kept.intervals.data();
        args.positions = kept.positions.data();
        args.declared = kept.declared.data();
        args.n_positions = kept.n;
    }
    int64_t handle = 0;
    if (call("kvc_open", [&] { return kvc_open(manager_, &args, &handle); }) == KVC_OK) handles_.push_back(handle);
}

void ManagerFuzz::extend() {
    const int64_t handle = a_handle();
    int64_t n = random_.between(0, 6);
    kvc_request_info info{};
    const bool foreign = ask(handle, &info) && info.ns;
    // More than this is refused before it is read: no prompt grows by 60 tokens.
    if (spite()) n = random_.chance(50) ? -random_.below(INT64_MAX) : INT64_MAX - random_.below(1000);
    const int32_t* tokens = foreign != spite() ? nullptr : text_.data();
    call("kvc_extend", [&] { return kvc_extend(manager_, handle, tokens, n); });
}

// What a request keeps, or nonsense.
ManagerFuzz::Kept ManagerFuzz::some_kept() {
    const int64_t grid = setup_.config.grid_tokens;
    Kept kept;
    for (int64_t i = random_.below(4); i-- > 0;) {
        const auto next = static_cast<int64_t>(kept.positions.size()) * 2 + 1;
        kept.positions.push_back(spite() ? random_.hostile() : next * grid);
        kept.declared.push_back(static_cast<uint8_t>(random_.below(3)));
    }
    for (size_t g = 0; g < setup_.groups.size(); ++g)
        kept.intervals.push_back(spite() ? random_.hostile() : random_.below(4) * grid);
    kept.n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(kept.positions.size());
    for (size_t i = 0; where_.trace && i < kept.positions.size(); ++i)
        std::fprintf(stderr, "    keeps %lld, declared %d\n", static_cast<long long>(kept.positions[i]),
                     kept.declared[i]);
    for (size_t g = 0; where_.trace && g < kept.intervals.size(); ++g)
        std::fprintf(stderr, "    interval %lld\n", static_cast<long long>(kept.intervals[g]));
    return kept;
}

void ManagerFuzz::retain() {
    const Kept kept = some_kept();
    const int64_t handle = a_handle();
    call("kvc_retain", [&] {
        return kvc_retain(manager_, handle, kept.intervals.data(), kept.positions.data(), kept.declared.data(), kept.n);
    });
}

void ManagerFuzz::stops() {
    int64_t positions[16], n = 0;
    const int64_t handle = a_handle(), start = a_count(40), end = spite() ? random_.hostile() : random_.between(20, 60);
    call("kvc_stops", [&] { return kvc_stops(manager_, handle, start, end, positions, random_.below(17), &n); });
}

void ManagerFuzz::lookup() { look_up(a_handle()); }

void ManagerFuzz::look_up(int64_t handle) {
    std::vector<std::vector<uint8_t>> held;
    std::vector<const uint8_t*> present;
    std::vector<int64_t> counts;
    for (int32_t g = 0; g < setup_.config.n_groups; ++g) {
        std::vector<uint8_t> bytes(static_cast<size_t>(random_.below(60)));
        for (uint8_t& byte : bytes) byte = random_.chance(80);
        held.push_back(std::move(bytes));
        present.push_back(held.back().data());
        counts.push_back(spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(held.back().size()));
    }
    const bool tier = random_.chance(40);
    kvc_hit hit{};
    const int32_t status = call("kvc_lookup", [&] {
        return kvc_lookup(manager_, handle, tier ? present.data() : nullptr, tier ? counts.data() : nullptr, &hit);
    });
    if (status != KVC_OK) return;
    kvc_request_info info{};
    if (!ask(handle, &info)) return;
    int64_t sum = hit.hit_tokens;
    for (const int64_t lost : hit.lost) sum += lost;
    if (sum != info.n_tokens || hit.hit_tokens < 0 || hit.hit_tokens >= info.n_tokens)
        broken(where_, "a hit of %lld and what was lost do not add up", static_cast<long long>(hit.hit_tokens));
    explain(handle, &hit);
}

void ManagerFuzz::explain() { explain(a_handle(), nullptr); }

// The losses are the whole of what was not hit, in order; as they were told, they are those of the last lookup.
void ManagerFuzz::explain(int64_t handle, const kvc_hit* hit) {
    std::vector<uint8_t> bytes(static_cast<size_t>(random_.below(60)));
    for (uint8_t& byte : bytes) byte = random_.chance(80);
    std::vector<const uint8_t*> held(setup_.groups.size(), bytes.data());
    std::vector<int64_t> counts(setup_.groups.size(), static_cast<int64_t>(bytes.size()));
    if (spite()) counts[0] = random_.hostile() | INT64_MIN;
    const bool tier = random_.chance(50);
    kvc_explained whole{};
    kvc_loss losses[32];
    int64_t n = 0;
    const int64_t cap = random_.chance(90) ? 32 : random_.below(3);
    const int32_t status = call("kvc_explain", [&] {
        return kvc_explain(manager_, handle, tier ? held.data() : nullptr, tier ? counts.data() : nullptr, &whole,
                           losses, cap, &n);
    });
    if (status != KVC_OK || n > cap) return;
    int64_t at = whole.hit_tokens, told[KVC_LOST_CAUSES] = {};
    for (int64_t i = 0; i < n; ++i) {
        const kvc_loss& loss = losses[i];
        if (loss.begin != at || loss.end <= at || loss.cause < 0 || loss.cause > KVC_LOST_KEY || loss.told < 0 ||
            loss.told >= KVC_LOST_CAUSES)
            broken(where_, "loss %lld is out of order", static_cast<long long>(i));
        told[loss.told] += loss.end - loss.begin;
        at = loss.end;
    }
    if (at != whole.n_tokens) broken(where_, "the losses end at %lld", static_cast<long long>(at));
    if (hit && !std::equal(told, told + KVC_LOST_CAUSES, hit->lost))
        broken(where_, "an explanation adds up to other losses than its lookup");
}

void ManagerFuzz::need() {
    std::vector<int64_t> pages(setup_.groups.size());
    const int64_t handle = a_handle(), n = a_count(40), drafts = random_.chance(70) ? 0 : a_count(3);
    call("kvc_need", [&] { return kvc_need(manager_, handle, n, drafts, pages.data()); });
}

int32_t ManagerFuzz::allocate(int64_t handle, int64_t n, int64_t drafts, kvc_grant* grant) {
    const int32_t status = call("kvc_allocate", [&] { return kvc_allocate(manager_, handle, n, drafts, grant); });
    if (where_.trace)
        std::fprintf(stderr, "    request %lld, %lld tokens, %lld drafts: (%lld, %lld] load %lld\n",
                     static_cast<long long>(handle), static_cast<long long>(n), static_cast<long long>(drafts),
                     static_cast<long long>(grant->start), static_cast<long long>(grant->end),
                     static_cast<long long>(grant->load));
    if (status == KVC_OK && grant->load) loads_.push_back(grant->load);
    if (status == KVC_NO_SPACE) expect_a_reason(handle);
    return status;
}

void ManagerFuzz::expect_a_reason(int64_t handle) {
    int32_t reason = 0;
    if (call("kvc_blockage", [&] { return kvc_blockage(manager_, handle, &reason); }) == KVC_OK &&
        (reason <= KVC_BLOCKED_NOT || reason > KVC_BLOCKED_RESTART))
        broken(where_, "no space, for reason %d", reason);
}

void ManagerFuzz::allocate() {
    kvc_grant grant{};
    const int64_t handle = a_handle(), n = a_count(40), drafts = random_.chance(70) ? 0 : a_count(3);
    allocate(handle, n, drafts, &grant);
}

void ManagerFuzz::begin_step() {
    int64_t step = 0;
    if (call("kvc_begin_step", [&] { return kvc_begin_step(manager_, &step); }) == KVC_OK) steps_.push_back(step);
}

void ManagerFuzz::commit() {
    const int64_t handle = a_handle();
    kvc_request_info info{};
    ask(handle, &info);
    const int64_t upto = spite() ? random_.hostile() : info.granted - random_.below(3);
    call("kvc_commit", [&] { return kvc_commit(manager_, handle, upto); });
}

void ManagerFuzz::end_step() {
    const int64_t step = steps_.empty() || spite() ? random_.hostile() : steps_.front();
    if (call("kvc_end_step", [&] { return kvc_end_step(manager_, step); }) == KVC_OK) std::erase(steps_, step);
}

void ManagerFuzz::close() {
    const int64_t handle = a_handle();
    if (random_.chance(30) && spite_percent_) {
        call("kvc_preempt", [&] { return kvc_preempt(manager_, handle); });
        return;
    }
    const bool finish = random_.chance(50);
    const int32_t status = call(finish ? "kvc_finish" : "kvc_abort",
                                [&] { return finish ? kvc_finish(manager_, handle) : kvc_abort(manager_, handle); });
    if (status != KVC_OK) return;
    std::erase(handles_, handle);
    closed_.push_back(handle);
}

void ManagerFuzz::advance() {
    if (handles_.empty()) return open();
    const int64_t handle = random_.in(handles_);
    kvc_request_info info{};
    if (!ask(handle, &info)) return;
    if (info.state == 2) return end_load();
    if (info.state == 0) look_up(handle);
    if (steps_.empty()) begin_step();
    kvc_grant grant{};
    const int64_t n = random_.between(1, std::max<int64_t>(info.n_tokens - info.committed, 1));
    if (allocate(handle, n, 0, &grant) != KVC_OK) return end_step();
    if (grant.load) return;
    call("kvc_commit", [&] { return kvc_commit(manager_, handle, grant.end); });
    if (random_.chance(50)) end_step();
}

}  // namespace fuzz
