// Random calls to the arena and to a naive model beside it. test_arena [operations in all] [seed]; 1 at the first difference.
#include <cstring>
#include <random>

#include "arena_model.h"

namespace {

using kvc::Arena;
using kvc::Digest;
using kvc::Page;
using model::Counts;
using model::fail;
using model::kNone;
using model::Model;

constexpr int kNumbers = 400;  // keys: few, so that the same one comes again
constexpr int kPerUnit = 4;

// Key number = unit * 4 + (blocks that follow in the unit), which is XORed into the end of the unit's digest.
Digest digest_of(int number) {
    Digest digest{};
    const int unit = number / kPerUnit;
    std::memcpy(digest.bytes, &unit, sizeof unit);
    digest.bytes[28] = static_cast<uint8_t>(0xf0 ^ (number % kPerUnit));
    return digest;
}

int number_of(const Digest& digest) {
    int unit;
    std::memcpy(&unit, digest.bytes, sizeof unit);
    return unit * kPerUnit + (digest.bytes[28] ^ 0xf0);
}

struct Recorder : kvc::KeyListener {
    std::vector<model::Event> events;
    void stored(int32_t group, int32_t page) override { add({true, group, page, 0}); }
    void removed(int32_t group, const Digest& digest, uint32_t ns) override {
        add({false, group, number_of(digest), ns});
    }
    void add(model::Event event) { events.push_back(event); }
};

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

class Run {
  public:
    Run(const Mix& mix, bool movable, uint64_t seed)
        : random_(seed),
          model_(mix.slabs, mix.k, mix.class_of_group, movable),
          arena_(mix.slabs, {mix.k.begin(), mix.k.end()}, {mix.class_of_group.begin(), mix.class_of_group.end()},
                 movable, seed, &recorder_),
          needs_(mix.k.size()) {}

    void operate() {
        switch (below(20)) {
            case 0:
            case 1:
            case 2:
                take(false);
                break;
            case 3:
            case 4:
                take(true);
                break;
            case 5:
            case 6:
            case 7:
                publish();
                break;
            case 8:
                confirm_or_unpublish();
                break;
            case 9:
            case 10:
                acquire();
                break;
            case 11:
                adopt_many();
                break;
            case 12:
            case 13:
            case 14:
            case 15:
                release();
                break;
            case 16:
                touch_or_keep();
                break;
            case 17:
                look_up();
                break;
            case 18:
                if (!below(8)) guarantee();
                break;
            case 19:
                if (!below(8)) rare();
                break;
        }
        compare_counts();
        if (!below(8)) compare_pages();
    }

    // So that a reader sees that the paths were walked.
    void report() const {
        if (forgotten_ * 20 > remembered_) fail("%d evicted keys were forgotten, %d not", forgotten_, remembered_);
        std::fprintf(stderr,
                     "  %lld evictions, %lld reclaims, %lld moves, %d secured of %d, %d of them tight, %d alone, %d "
                     "keys taken over\n",
                     static_cast<long long>(arena_.evictions()), static_cast<long long>(arena_.reclaimed_slabs()),
                     static_cast<long long>(arena_.moved_pages()), secured_, asked_, tight_, alone_, taken_over_);
    }

  private:
    int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
    int any_group() { return below(static_cast<int>(model_.class_of.size())); }
    Held* any(std::vector<Held>& of) {
        return of.empty() ? nullptr : &of[static_cast<size_t>(below(static_cast<int>(of.size())))];
    }
    model::Moves new_moves() {
        const model::Moves moves(arena_.moves().begin(), arena_.moves().end());
        arena_.forget_moves();
        return moves;
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
    // As documented for secure_mine().
    bool free_choice(const Counts& n) const {
        int64_t worst = 0;
        for (int c = 0; c < model_.classes(); ++c) {
            const int64_t more = (n[c] + model_.k[c] - 1) / model_.k[c], pinned = model_.pinned(c);
            const int64_t most = std::min({pinned + n[c], model_.owned(c) + more, int64_t{model_.T}});
            worst += std::max({pinned, most, model_.needed[c]});
        }
        return worst <= model_.T || model_.quota() > model_.T;
    }
    bool can_secure_tight(const Counts& n) const {
        int64_t lacking = 0, whole = model_.empty(), slabs = 0;
        for (int c = 0; c < model_.classes(); ++c) {
            int64_t own = 0, more = 0;
            for (int s = 0; s < std::ssize(model_.owner); ++s)
                if (model_.owner[s] == c && model_.own_slab(c, s)) own += model_.k[c] - model_.held(c, s);
            for (; own < n[c]; own += model_.k[c]) ++more;
            lacking += more;
            whole += model_.idle(c);
            slabs += std::max(model_.pinned(c) + more, model_.needed[c]);
        }
        return lacking <= whole && slabs <= model_.T;
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
    void follow_secure(const Counts& n) {
        model::Moves moves = new_moves();
        int64_t given = 0;
        Counts lacks(n.size());
        for (int c = 0; c < model_.classes(); ++c)
            for (; model_.available(c) + lacks[c] * model_.k[c] < n[c]; ++lacks[c], ++given)
                if (model_.empty() == given)
                    model_.reclaim(model_.coldest_class([&](int h) { return model_.spare(h, n[h]) > 0; }), moves);
        if (!moves.empty()) fail("secure moved more than it had to");
        for (int s = 0; s < arena_.created_slabs(); ++s)
            if (const int c = owner_of(s); c != kNone && (s >= std::ssize(model_.owner) || model_.owner[s] == kNone)) {
                model_.own_new(c, s);
                if (--lacks[c] < 0) fail("class %d got a slab too many", c);
            }
        if (std::any_of(lacks.begin(), lacks.end(), [](int64_t n) { return n != 0; }))
            fail("a class got too few slabs");
    }
    int owner_of(int s) const {
        for (int g = 0; g < std::ssize(model_.class_of); ++g)
            if (arena_.contains(g, int64_t{s} * model_.k[model_.class_of[g]])) return model_.class_of[g];
        return kNone;
    }
    void follow_take(int group, int id, const Counts& left) {
        const int c = model_.class_of[group], s = id / model_.k[c];
        model::Moves moves = new_moves();
        if (const int full = model_.fullest(c, kNone); full >= 0) {
            if (!model_.is_free(c, id) || model_.used(c, s) != full) fail("page %d is not of a fullest slab", id);
        } else if (model_.empty() > model_.left_alone(c)) {
            model_.own_new(c, s);
        } else {
            const int victim = model_.coldest(c);
            const int other = model_.coldest_class([&](int h) {
                return model_.spare(h, left[h]) > 0 &&
                       (victim == kNone || model_.rank_of(h) < model_.pages[c].at(victim).rank());
            });
            if (other != kNone) {
                model_.reclaim(other, moves);
                model_.own_new(c, s);
            } else {
                if (id != victim) fail("page %d was evicted, not %d", id, victim);
                model_.evict(c, id);
            }
        }
        if (!moves.empty()) fail("take moved more than it had to");
    }
    void follow_tight(int group, int id) {
        const int c = model_.class_of[group], k = model_.k[c], s = id / k;
        model::Moves moves = new_moves();
        bool own_free = false;
        for (int i = 0; i < std::ssize(model_.owner); ++i)
            own_free |= model_.owner[i] == c && model_.own_slab(c, i) && model_.used(c, i) < k;
        int victim = kNone;
        for (const auto& [page, x] : model_.pages[c])
            if (x.list && model_.own_slab(c, page / k) &&
                (victim == kNone || x.rank() < model_.pages[c].at(victim).rank()))
                victim = page;
        if (own_free) {
            if (!model_.own_slab(c, s)) fail("page %d is not of an own slab", id);
        } else if (victim != kNone) {
            if (id != victim) fail("page %d was evicted, not %d of an own slab", id, victim);
            model_.evict(c, id);
        } else {
            if (!model_.empty()) model_.reclaim(model_.coldest_class([&](int h) { return model_.idle(h) > 0; }), moves);
            model_.own_new(c, s);
        }
        if (!moves.empty()) fail("take_mine moved more than it had to");
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
        const int other = model_.find(g, number, ns);
        bool expected = true, taken_over = false;
        if (other != kNone) {
            const model::Cell& x = model_.cell(g, other);
            taken_over = key == Page::kVisible && x.key == Page::kVisible && !x.refs;
            expected = taken_over || (key == Page::kVisible && x.key == Page::kPending);
            if (expected && !taken_over) model_.unpublish(g, other);
        }
        if (arena_.publish(g, id, digest_of(number), ns, number, static_cast<Page::Key>(key)) != expected)
            fail("publish of key %d on page %d is not %d", number, id, expected);
        if (!expected) return;
        model::Cell& x = model_.cell(g, id);
        if (taken_over) {
            const model::Cell old = model_.cell(g, other);
            x.key = old.key, x.number = old.number, x.ns = old.ns, x.end = old.end, x.kept = old.kept,
            x.hits = old.hits;
            model_.remove(model_.class_of[g], other);
            ++taken_over_;
            return;
        }
        x.key = key, x.number = number, x.ns = ns, x.end = number, x.kept = false, x.hits = 0;
        if (key == Page::kVisible) model_.events.push_back({true, g, id, 0});
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
        x.list = 0;
        ++x.refs;
        x.pins += pin;
        (pin ? pinned_ : held_).push_back({g, id});
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
            x.list = 0;
            ++x.refs;
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
            --model_.cell(g, id).pins;
            arena_.unpin(g, id);
            model_.release(g, id, 1 + Arena::kLru);
            return;
        }
        if (&from == &mine_) mark_mine(held, -1);
        const auto list = below(4) ? Arena::kLru : Arena::kVictims;
        arena_.release(g, id, list);
        model_.release(g, id, 1 + list);
    }
    void touch_or_keep() {
        const auto [g, id] = any_keyed();
        if (id == kNone) return;
        if (!below(3)) {
            arena_.keep(g, id);
            model_.cell(g, id).kept = true;
            return;
        }
        arena_.touch(g, id);
        if (model_.cell(g, id).list) model_.cache(g, id, 1 + Arena::kLru);
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
        switch (below(16)) {
            case 0:
                forget(below(2) ? kNone : below(3) * 1000003);
                break;
            case 1:
                arena_.guarantee({}), model_.mine.clear(), model_.needed.assign(needs_.size(), 0),
                    needs_.assign(needs_.size(), 0), held_.insert(held_.end(), mine_.begin(), mine_.end()),
                    mine_.clear();
                break;
            default:
                alone();
        }
    }
    void forget(int ns) {
        ns == kNone ? arena_.forget_all() : arena_.forget(static_cast<uint32_t>(ns));
        if (ns == kNone) model_.ghosts.clear();
        for (int c = 0; c < model_.classes(); ++c) {
            const auto pages = model_.pages[c];
            for (const auto& [id, x] : pages)
                if (x.key && (ns == kNone || x.ns == static_cast<uint32_t>(ns))) model_.unpublish(x.group, id);
        }
    }

    // ---- comparing
    void look_up() {
        const int g = any_group(), per_unit = 1 << below(3), units = 1 + below(8),
                  first = below(kNumbers / kPerUnit - 8);
        const auto ns = static_cast<uint32_t>(below(3)) * 1000003u;
        const int64_t stride = below(2) ? 32 : 45;
        std::vector<uint8_t> digests(static_cast<size_t>(units * stride));
        for (int u = 0; u < units; ++u)
            std::memcpy(&digests[static_cast<size_t>(u * stride)], digest_of((first + u) * kPerUnit).bytes, 32);
        const kvc::DigestRun run{digests.data(), stride, int64_t{units} * per_unit, per_unit};
        const bool allow_pending = below(2);
        const int begin = below(units * per_unit);
        int length = 0;
        std::vector<uint8_t> present(static_cast<size_t>(units * per_unit));
        arena_.present(g, run, ns, present.data());
        bool running = true;
        for (int i = 0; i < units * per_unit; ++i) {
            const int number = (first + i / per_unit) * kPerUnit + per_unit - 1 - i % per_unit;
            const int id = model_.find(g, number, ns);
            if (arena_.find(g, run.at(i), ns) != id) fail("key %d is not on page %d", number, id);
            const int key = id == kNone ? Page::kNone : model_.cell(g, id).key;
            if (present[static_cast<size_t>(i)] != (key == Page::kVisible)) fail("present is wrong for key %d", number);
            if (i < begin) continue;
            running &= key == Page::kVisible || (key == Page::kPending && allow_pending);
            length += running;
            const bool evicted = arena_.was_evicted(g, run.at(i), ns);
            if (evicted && !model_.ghosts.contains({g, ns, number})) fail("key %d was never evicted", number);
            remembered_ += evicted;
            forgotten_ += !evicted && model_.ghosts.contains({g, ns, number});
        }
        if (arena_.run_length(g, run, ns, begin, allow_pending) != length) fail("run_length is not %d", length);
    }
    void compare_counts() {
        if (recorder_.events != model_.events) fail("the events differ");
        if (!model_.events.empty() && arena_.version() == version_) fail("a key changed, the version did not");
        version_ = arena_.version();
        recorder_.events.clear();
        model_.events.clear();
        for (int c = 0; c < model_.classes(); ++c) {
            const int64_t cached = model_.cached(c), used = std::ssize(model_.pages[c]), owned = model_.owned(c);
            if (arena_.owned_slabs(c) != owned || arena_.cached_pages(c) != cached ||
                arena_.held_pages(c) != used - cached || arena_.free_pages(c) != owned * model_.k[c] - used ||
                arena_.pinned_slabs(c) != model_.pinned(c))
                fail("the counts of class %d differ", c);
        }
        if (arena_.quota() != model_.quota() || arena_.moved_pages() != model_.moved ||
            arena_.reclaimed_slabs() != model_.reclaimed || arena_.created_slabs() != std::ssize(model_.owner) ||
            arena_.empty_slabs() + arena_.slabs() - arena_.created_slabs() != model_.empty())
            fail("the counts of slabs differ");
    }
    void compare_pages() {
        if (const char* broken = arena_.check()) fail("check: %s", broken);
        Counts keys(model_.class_of.size()), held(model_.class_of.size());
        std::map<uint32_t, int64_t> of_namespace{{0, 0}, {1000003, 0}, {2000006, 0}, {7, 0}};
        int64_t pending = 0;
        for (int g = 0; g < std::ssize(model_.class_of); ++g) {
            const int c = model_.class_of[g];
            for (int id = 0; id < std::ssize(model_.owner) * model_.k[c]; ++id) {
                if (arena_.contains(g, id) != (model_.owner[id / model_.k[c]] == c))
                    fail("slab of page %d has another owner", id);
                if (!arena_.contains(g, id)) continue;
                const auto found = model_.pages[c].find(id);
                compare_page(id, arena_.page(g, id), found == model_.pages[c].end() ? model::Cell{} : found->second);
            }
            for (const auto& [id, x] : model_.pages[c])
                if (x.group == g)
                    keys[g] += x.key > 0, held[g] += x.refs > 0, pending += x.key == Page::kPending,
                        of_namespace[x.ns] += x.key > 0;
            if (arena_.keyed(g) != keys[g] || arena_.held_of(g) != held[g] ||
                arena_.evictions(g) != model_.evicted_of[g])
                fail("the counts of group %d differ", g);
        }
        if (arena_.pending() != pending) fail("pending is not %lld", static_cast<long long>(pending));
        for (const auto& [ns, n] : of_namespace)
            if (arena_.keyed_in(ns) != n) fail("namespace %u has not %lld keys", ns, static_cast<long long>(n));
    }
    static void compare_page(int id, const Page& page, const model::Cell& x) {
        bool same = page.refs == x.refs && page.pins == static_cast<uint64_t>(x.pins) &&
                    page.key == static_cast<uint64_t>(x.key) && page.list == static_cast<uint64_t>(x.list);
        if (x.key)
            same &= number_of(page.digest) == x.number && page.ns == x.ns &&
                    page.group == static_cast<uint64_t>(x.group) && page.hits == static_cast<uint64_t>(x.hits) &&
                    page.kept == x.kept && page.end == static_cast<uint64_t>(x.end);
        if (x.list) same &= page.age == x.age;
        if (!same) fail("page %d differs from the model", id);
    }

    std::mt19937_64 random_;
    Recorder recorder_;
    Model model_;
    Arena arena_;
    Counts needs_;
    std::vector<Held> held_, mine_, pinned_;
    uint64_t version_ = 0;
    int asked_ = 0, secured_ = 0, tight_ = 0, alone_ = 0, taken_over_ = 0, remembered_ = 0, forgotten_ = 0;
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
