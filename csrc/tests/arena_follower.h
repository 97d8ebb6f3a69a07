// What the arena did when pages were taken: predicted from the model, or checked against what it allows, and repeated there.
#pragma once

#include "arena_pair.h"

namespace model {

class Follower : public Pair {
  public:
    using Pair::Pair;

  protected:
    Moves new_moves() {
        const Moves moves(arena_.moves().begin(), arena_.moves().end());
        arena_.forget_moves();
        return moves;
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
    void follow_secure(const Counts& n) {
        Moves moves = new_moves();
        for (int c = 0; c < model_.classes(); ++c)
            if (n[c]) model_.asked[c] = n[c];
        int64_t given = 0;
        Counts lacks(n.size());
        for (int c = 0; c < model_.classes(); ++c)
            for (; model_.available(c) + lacks[c] * model_.k[c] < n[c]; ++lacks[c], ++given)
                if (model_.empty() == given) model_.reclaim(model_.cheapest(Model::kNoRank, n), moves);
        if (!moves.empty()) fail("secure moved more than it had to");
        if (model_.plain()) std::fill(lacks.begin(), lacks.end(), 0);  // nobody else takes what is empty
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
        Moves moves = new_moves();
        if (const int full = model_.fullest(c, kNone); full >= 0) {
            if (!model_.is_free(c, id) || model_.used(c, s) != full) fail("page %d is not of a fullest slab", id);
        } else if (model_.empty() > model_.left_alone(c)) {
            model_.own_new(c, s);
        } else {
            const int victim = model_.coldest(c);
            const auto below = victim == kNone ? Model::kNoRank : model_.pages[c].at(victim).rank();
            const int other = model_.cheapest(below, left);
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
        Moves moves = new_moves();
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
};

}  // namespace model
