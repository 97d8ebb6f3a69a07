// Random calls to the arena and to a naive model beside it. test_arena [operations in all] [seed]; 1 at the first difference.
#include <random>

#include "arena_follower.h"

namespace {

using kvc::Arena;
using kvc::Page;
using model::Counts;
using model::digest_of;
using model::fail;
using model::kNone;
using model::kNumbers;
using model::Model;

struct Mix {
    int slabs;
    std::vector<int> k, class_of_group;
};
const Mix kMixes[] = {
    {24, {1}, {0, 0}},     {12, {4, 1}, {0, 1, 0}},       {5, {127, 1}, {0, 1}},   {7, {16, 10, 9, 1}, {0, 1, 2, 3, 0}},
    {9, {2, 3}, {0, 1}},   {30, {1, 1, 8}, {0, 1, 2, 2}}, {3, {70, 5}, {0, 1, 1}}, {40, {3, 1}, {0, 1}},
    {130, {4, 2}, {0, 1}},
};

struct Held {
    int group, page;
};

class Run : public model::Follower {
  public:
    Run(const Mix& mix, bool movable, uint64_t seed)
        : Follower(mix.slabs, mix.k, mix.class_of_group, movable, seed), random_(seed), needs_(mix.k.size()) {}

    void operate() {
        const int dice = below(20);
        if (dice < 3) take(false);
        else if (dice < 5) take(true);
        else if (dice < 8) publish();
        else if (dice < 9) confirm_or_unpublish();
        else if (dice < 11) acquire();
        else if (dice < 12) adopt_many();
        else if (dice < 16) release();
        else if (dice < 17) below(2) ? keep() : pin_neighbours();
        else if (dice < 18) look_up();
        else if (!below(8)) dice < 19 ? guarantee() : rare();
        compare_counts();
        if (!below(8)) compare_pages();
    }

    // So that a reader sees that the paths were walked.
    void report() const {
        if (forgotten_ * 20 > remembered_) fail("%d evicted keys were forgotten, %d not", forgotten_, remembered_);
        std::fprintf(stderr,
                     "  %lld evictions, %lld reclaims, %lld moves, %d secured of %d, %d of them tight, %d alone, %lld "
                     "keys taken over\n",
                     static_cast<long long>(arena_.evictions()), static_cast<long long>(arena_.reclaimed_slabs()),
                     static_cast<long long>(arena_.moved_pages()), secured_, asked_, tight_, alone_,
                     static_cast<long long>(model_.taken_over));
    }

  private:
    int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
    int any_group() { return below(static_cast<int>(model_.class_of.size())); }
    Held* any(std::vector<Held>& of) {
        return of.empty() ? nullptr : &of[static_cast<size_t>(below(static_cast<int>(of.size())))];
    }
    // ---- taking
    Counts wanted_counts() {
        Counts n(model_.k.size());
        for (size_t c = 0; c < n.size(); ++c) {
            const int most = std::min(model_.T * model_.k[c], below(4) ? 3 : 3 * model_.k[c] + 3);
            n[c] = below(3) ? below(most + 1) : 0;
        }
        return n;
    }
    std::vector<int> groups_for(const Counts& n) {
        std::vector<int> groups;
        for (int c = 0; c < model_.classes(); ++c)
            for (int64_t i = 0; i < n[c]; ++i) {
                int g = any_group();
                while (model_.class_of[g] != c) g = any_group();
                groups.push_back(g);
            }
        std::shuffle(groups.begin(), groups.end(), random_);
        return groups;
    }
    void take(bool for_mine) { take(for_mine, wanted_counts()); }
    bool take(bool for_mine, const Counts& n) {
        const bool keep = model_.quota() <= model_.T;
        const bool tight = for_mine && !free_choice(n);
        const bool expected = tight ? can_secure_tight(n) : model_.can_secure(n);
        arena_.reserve(n, Counts(model_.class_of.size(), 0));
        const bool can = for_mine ? arena_.can_secure_mine(n) : arena_.can_secure(n);
        const bool secured = for_mine ? arena_.secure_mine(n) : arena_.secure(n);
        if (can != expected || secured != expected)
            fail("secure says %d, can_secure %d, the model %d", secured, can, expected);
        ++asked_;
        if (!secured) return false;
        ++secured_;
        tight_ += tight;
        if (!tight) follow_secure(n);
        Counts left = n;
        for (const int g : groups_for(n)) {
            const int id = for_mine ? arena_.take_mine(g) : arena_.take(g);
            tight ? follow_tight(g, id) : follow_take(g, id, left);
            --left[model_.class_of[g]];
            model_.hold(g, id);
            (for_mine ? mine_ : held_).push_back({g, id});
            if (for_mine) ++model_.mine[{model_.class_of[g], id}];
        }
        if (for_mine && keep && model_.quota() > model_.T) fail("the guaranteed request broke its quota");
        return true;
    }
    // ---- keys
    void publish() {
        for (int n = below(16); n > 0; --n)
            if (const Held* held = any(below(3) ? held_ : mine_); held && !model_.cell(held->group, held->page).key)
                publish(*held);
    }
    void publish(Held held) {
        const auto [g, id] = held;
        const int number = below(kNumbers), key = below(3) ? Page::kVisible : Page::kPending;
        const auto ns = static_cast<uint32_t>(below(3)) * 1000003u;
        arena_.reserve_keys(g, 1);
        const int64_t taken_over = model_.taken_over;
        const bool expected = model_.publish(g, id, number, ns, key);
        if (arena_.publish(g, id, digest_of(number), ns, number, static_cast<Page::Key>(key)) != expected)
            fail("publish of key %d on page %d is not %d", number, id, expected);
        if (model_.taken_over != taken_over && arena_.version() == version_) fail("a key changed its page unnoticed");
    }
    void confirm_or_unpublish() {
        const auto [g, id] = any_keyed();
        if (id == kNone) return;
        model::Cell& x = model_.cell(g, id);
        if (x.key == Page::kPending && below(4)) {
            arena_.confirm(g, id);
            x.key = Page::kVisible;
            model_.events.push_back({true, g, id, 0});
        } else if (!below(3)) {
            arena_.unpublish(g, id);
            model_.unpublish(g, id);
        }
    }
    Held any_keyed() {
        const int c = below(model_.classes());
        auto p = model_.pages[c].lower_bound(below(model_.T * model_.k[c]));
        while (p != model_.pages[c].end() && !p->second.key) ++p;
        return p == model_.pages[c].end() ? Held{0, kNone} : Held{p->second.group, p->first};
    }

    // ---- references
    void acquire() {
        const auto [g, id] = any_keyed();
        if (id == kNone) return;
        model::Cell& x = model_.cell(g, id);
        const bool pin = !below(3);
        if (pin) arena_.pin(g, id);
        else if (below(2)) arena_.acquire(g, id);
        else arena_.adopt(g, id), x.hits = std::min(x.hits + 1, 7);
        model_.acquire(g, id, pin);
        (pin ? pinned_ : held_).push_back({g, id});
    }
    // Readers take neighbours in the order of eviction, and let go of some at once: past others that are held still.
    void pin_neighbours() {
        const int c = below(model_.classes());
        std::vector<std::pair<std::pair<int, uint64_t>, int>> cached;
        for (const auto& [id, x] : model_.pages[c])
            if (x.list) cached.push_back({x.rank(), id});
        if (cached.empty()) return;
        std::sort(cached.begin(), cached.end());
        const int first = below(static_cast<int>(cached.size()));
        const int end = std::min(static_cast<int>(cached.size()), first + 2 + below(7));
        std::shuffle(cached.begin() + first, cached.begin() + end, random_);
        for (int i = first; i < end; ++i) {
            const int id = cached[static_cast<size_t>(i)].second;
            const Held held{model_.pages[c].at(id).group, id};
            arena_.pin(held.group, held.page);
            model_.acquire(held.group, held.page, true);
            pinned_.push_back(held);
        }
        for (int n = below(end - first + 1); n > 0; --n)
            release(pinned_, pinned_.size() - 1 - static_cast<size_t>(below(n)));
    }
    void adopt_many() {
        const Model before = model_;
        std::vector<Held> adopted;
        const int n = below(6);
        arena_.mark(below(2) ? n : 0);
        for (int i = 0; i < n; ++i) {
            const auto [g, id] = any_keyed();
            if (id == kNone) continue;
            model::Cell& x = model_.cell(g, id);
            const bool hit = below(2);
            hit ? arena_.adopt(g, id) : arena_.acquire(g, id);
            x.hits = std::min(x.hits + hit, 7);
            model_.acquire(g, id, false);
            adopted.push_back({g, id});
        }
        if (below(2)) {
            compare_pages();
            arena_.rollback();
            model_ = before;
            compare_pages();
            return;
        }
        arena_.commit_mark();
        const bool by_mine = below(2);
        for (const auto [g, id] : adopted) {
            (by_mine ? mine_ : held_).push_back({g, id});
            if (by_mine) mark_mine({g, id}, +1);
        }
    }
    void mark_mine(Held held, int change) {
        arena_.mine(held.group, held.page, change);
        const auto key = std::pair{model_.class_of[held.group], held.page};
        if (!(model_.mine[key] += change)) model_.mine.erase(key);
    }
    static Held pop(std::vector<Held>& of, size_t i) {
        const Held held = of[i];
        of[i] = of.back();
        of.pop_back();
        return held;
    }
    void release() {
        auto& from = below(5) ? held_ : below(2) ? mine_ : pinned_;
        for (int n = below(below(4) ? 3 : 40); n > 0 && !from.empty(); --n)
            release(from, static_cast<size_t>(below(static_cast<int>(from.size()))));
    }
    void release(std::vector<Held>& from, size_t i) {
        const Held held = pop(from, i);
        const auto [g, id] = held;
        if (&from == &pinned_) {
            arena_.unpin(g, id);
            model_.unpin(g, id);
            return;
        }
        if (&from == &mine_) mark_mine(held, -1);
        const auto list = below(4) ? Arena::kLru : Arena::kVictims;
        arena_.release(g, id, list);
        model_.release(g, id, 1 + list);
    }
    void keep() {
        const auto [g, id] = any_keyed();
        if (id == kNone) return;
        arena_.keep(g, id);
        model_.cell(g, id).kept = true;
    }

    // ---- the guaranteed request
    void guarantee() {
        held_.insert(held_.end(), mine_.begin(), mine_.end());
        mine_.clear();
        model_.mine.clear();
        int left = model_.T;
        for (size_t c = 0; c < needs_.size(); ++c) {
            const int slabs = c + 1 == needs_.size() && below(2) ? left : below(left + 1);
            needs_[c] = int64_t{slabs} * model_.k[c] - (slabs ? below(model_.k[c]) : 0);
            model_.needed[c] = slabs;
            left -= slabs;
        }
        arena_.guarantee(needs_);
        for (int n = below(4); n > 0 && !held_.empty(); --n) {
            mine_.push_back(pop(held_, 0));
            mark_mine(mine_.back(), +1);
        }
    }
    // Alone, and within its quota, it can have all that it said it needs.
    void alone() {
        for (auto* from : {&held_, &pinned_})
            while (!from->empty()) release(*from, from->size() - 1);
        Counts n = needs_;
        for (const auto& [page, marks] : model_.mine) n[page.first] -= 1;
        if (model_.quota() > model_.T || *std::min_element(n.begin(), n.end()) < 0) return;
        if (below(2))
            for (int64_t& wanted : n) wanted = below(static_cast<int>(wanted) + 1);
        ++alone_;
        if (!take(true, n)) fail("the guaranteed request is alone and cannot have what it needs");
    }
    void rare() {
        const int dice = below(16);
        if (dice == 0) forget(below(2) ? kNone : below(3) * 1000003);
        else if (dice == 1) guarantee_nobody();
        else alone();
    }
    void guarantee_nobody() {
        arena_.guarantee({});
        model_.mine.clear();
        model_.needed.assign(needs_.size(), 0);
        needs_.assign(needs_.size(), 0);
        held_.insert(held_.end(), mine_.begin(), mine_.end());
        mine_.clear();
    }
    void forget(int ns) {
        kvc::NamespaceCounts chosen;  // with one that has no keys
        for (const int one : {ns, 7}) chosen.add(static_cast<uint32_t>(one));
        ns == kNone ? arena_.forget_all() : arena_.forget(chosen);
        if (ns == kNone) model_.ghosts.clear();
        for (int c = 0; c < model_.classes(); ++c) {
            const auto pages = model_.pages[c];
            for (const auto& [id, x] : pages)
                if (x.key && (ns == kNone || x.ns == static_cast<uint32_t>(ns))) model_.unpublish(x.group, id);
        }
    }

    // ---- looking up
    void look_up() {
        const int count = 1 + below(32), first = below(kNumbers - 32);
        const auto ns = static_cast<uint32_t>(below(3)) * 1000003u;
        compare_run(any_group(), ns, first, count, below(count), below(2));
    }

    std::mt19937_64 random_;
    Counts needs_;
    std::vector<Held> held_, mine_, pinned_;
    int asked_ = 0, secured_ = 0, tight_ = 0, alone_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const long operations = (argc > 1 ? std::atol(argv[1]) : 100000) / (2 * std::ssize(kMixes));
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    for (size_t mix = 0; mix < std::size(kMixes); ++mix)
        for (const bool movable : {false, true}) {
            std::fprintf(stderr, "mix %zu, movable %d, seed %llu\n", mix, movable,
                         static_cast<unsigned long long>(seed));
            Run run(kMixes[mix], movable, seed * 100 + mix * 2 + movable);
            for (long i = 0; i < operations; ++i) run.operate();
            run.report();
        }
    std::puts("the arena and the model agree");
}
