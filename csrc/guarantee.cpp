// The guaranteed request of `arena.h`: what it may take so that it can always finish.
#include <algorithm>

#include "arena.h"

namespace kvc {

void Arena::guarantee(std::span<const int64_t> needs) {
    if (++epoch_ == 0) {  // come round: no mark may look new
        for (Slab& s : slabs_) s.mine = 0;
        epoch_ = 1;
    }
    for (size_t i = 0; i < classes_.size(); ++i) {
        SizeClass& c = classes_[i];
        c.pinned = 0;
        c.needed = needs.empty() ? 0 : slabs_for(c, needs[i]);
    }
}

void Arena::mine(int32_t group, int32_t id, int32_t change) {
    if (plain()) return;
    SizeClass& c = of(class_of(group));
    Slab& s = slab(slab_of(c, id));
    const int32_t before = mine_in(s);
    s.epoch = epoch_;
    s.mine = before + change;
    c.pinned += (s.mine > 0) - (before > 0);
}

int64_t Arena::quota() const {
    int64_t slabs = 0;
    for (const SizeClass& c : classes_) slabs += std::max(c.pinned, c.needed);
    return slabs;
}

// Even if each page comes to lie in one more slab: of the class's own, or of those that it gets on the way, which are at
// most ceil(n / k) as it takes its free pages first. True also where the quota is broken already: nothing to keep.
bool Arena::any_choice_keeps_quota(std::span<const int64_t> n) const {
    int64_t worst = 0;
    for (size_t i = 0; i < classes_.size(); ++i) {
        const SizeClass& c = classes_[i];
        const int64_t most = std::min({c.pinned + n[i], c.owned + slabs_for(c, n[i]), most_slabs_});
        worst += std::max({c.pinned, most, c.needed});
    }
    return worst <= most_slabs_ || quota() > most_slabs_;
}

// Whole slabs for n pages, after what its own slabs have.
int64_t Arena::lacking_slabs(int32_t size_class, int64_t n) const {
    const SizeClass& c = of(size_class);
    if (n == 0) return 0;
    for (int32_t s = 0; c.k > 1 && s < static_cast<int32_t>(created_slabs()); ++s)
        if (slab(s).owner == size_class && mine_in(slab(s)) > 0) n -= c.k - slab(s).held;
    return slabs_for(c, std::max<int64_t>(n, 0));
}

bool Arena::can_secure_mine(std::span<const int64_t> n) const {
    if (any_choice_keeps_quota(n)) return can_secure(n);
    int64_t lacking = 0, whole = empty_ + uncreated(), slabs = 0;
    for (int32_t i = 0; i < classes(); ++i) {
        const SizeClass& c = of(i);
        const int64_t more = lacking_slabs(i, n[static_cast<size_t>(i)]);
        lacking += more;
        whole += c.idle();
        slabs += std::max(c.pinned + more, c.needed);
    }
    return lacking <= whole && slabs <= most_slabs_;
}

bool Arena::secure_mine(std::span<const int64_t> n) {
    give_back_unused();
    if (any_choice_keeps_quota(n)) return secure(n);
    if (!can_secure_mine(n)) return false;
    prepare_to_evict();  // of its own slabs first, even where others are empty
    tight_ = true;
    for (int32_t i = 0; i < classes(); ++i) {
        of(i).wanted = n[static_cast<size_t>(i)];
        reset_own_cursors(of(i));
    }
    return true;
}

int32_t Arena::take_mine(int32_t group) {
    int32_t id;
    if (!tight_) {
        id = take(group);
    } else {
        id = take_own(class_of(group));
        if (id == kNoPage) id = take_whole_slab(class_of(group));
        if (id != kNoPage) held_now(group, id);
    }
    if (id != kNoPage) mine(group, id, +1);
    return id;
}

// Until the class gives up a slab nothing comes into its slabs but what it takes, so both searches go on where they stopped.
void Arena::reset_own_cursors(SizeClass& c) {
    c.mine_slab = 0;
    c.mine_page = coldest(c);
}

// A free page in a slab of its, else the coldest cached page there.
int32_t Arena::take_own(int32_t size_class) {
    SizeClass& c = of(size_class);
    if (c.k == 1) return kNoPage;
    for (; c.mine_slab < static_cast<int32_t>(created_slabs()); ++c.mine_slab) {
        const Slab& s = slab(c.mine_slab);
        if (slab(c.mine_slab).owner == size_class && s.used < c.k && mine_in(s) > 0) return take_from(c, c.mine_slab);
    }
    while (c.mine_page != kNoPage) {
        const int32_t id = c.mine_page;
        c.mine_page = after(c, id);
        if (mine_in(slab(slab_of(c, id))) == 0) continue;
        evict(c, id);
        return id;
    }
    return kNoPage;
}

int32_t Arena::take_whole_slab(int32_t size_class) {
    if (empty_ + uncreated() == 0) {
        int32_t coldest_class = kNoClass;
        for (int32_t i = 0; i < classes(); ++i) {
            if (of(i).idle() == 0) continue;
            if (coldest_class == kNoClass ||
                rank(page_in(of(i), coldest(of(i)))) < rank(page_in(of(coldest_class), coldest(of(coldest_class)))))
                coldest_class = i;
        }
        if (coldest_class == kNoClass) return kNoPage;
        reclaim(coldest_class);
        // The class that takes has no free or cached page left in a slab of its.
        if (coldest_class != size_class) reset_own_cursors(of(coldest_class));
    }
    SizeClass& c = of(size_class);
    const int32_t id = take_new(size_class);
    c.mine_slab = std::min(c.mine_slab, slab_of(c, id));
    return id;
}

}  // namespace kvc
