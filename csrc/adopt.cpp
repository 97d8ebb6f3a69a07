// What a first grant takes over: the pages of the hit, or as many of them as the oldest request's quota allows.
#include <algorithm>

#include "manager.h"

namespace kvc {

// False where a page of the hit is neither on the device nor in the tier (evicted since the lookup).
bool Manager::gather(const Request& r, Adoption* adoption) const {
    adoption->pages.assign(groups_.size(), {});
    adoption->loads = 0;
    if (!adoption->hit) return true;
    for (int32_t g = 0; g < n_groups_; ++g) {
        const GroupRules& group = rules(g);
        auto& pages = adoption->pages[static_cast<size_t>(g)];
        auto add = [&](const Digest* key, int64_t index) {
            const int32_t page = key ? arena_.find(g, *key, r.ns) : kNoPage;
            const bool visible = page != kNoPage && arena_.page(g, page).key == Page::kVisible;
            if (visible) {
                pages.push_back(page);
            } else if (key && is_present(r, g, index)) {
                pages.push_back(kNoPage);
                ++adoption->loads;
            } else if (group.draft()) {
                pages.push_back(kHole);
            } else {
                return false;
            }
            return true;
        };
        if (group.state() && !add(digest_at(r, adoption->hit), adoption->hit / grid_ - 1)) return false;
        if (!group.blocks()) continue;
        const int64_t first = group.need_begin(adoption->hit) / group.block_tokens;
        const int64_t end = adoption->hit / group.block_tokens;
        pages.reserve(static_cast<size_t>(end - first));
        Digest key;
        if (group.links_per_block && !group.draft()) {  // all keys are known
            pages.resize(static_cast<size_t>(end - first));
            arena_.find_run(g, run_of(r, g, first, end), r.ns, pages.data());
            for (int64_t b = first; b < end; ++b) {
                if (pages[static_cast<size_t>(b - first)] != kNoPage) continue;
                if (!is_present(r, g, b)) return false;
                ++adoption->loads;
            }
            continue;
        }
        for (int64_t b = first; b < end; ++b)
            if (!add(block_key(r, g, b, &key) ? &key : nullptr, b)) return false;
    }
    return true;
}

// Would the oldest request keep its quota with this hit?
bool Manager::keeps_quota(const Adoption& adoption, const Request& r) const {
    std::vector<std::vector<bool>> seen(pages_per_slab_.size());
    std::vector<int64_t> pinned(pages_per_slab_.size(), 0);
    for (int32_t g = 0; g < n_groups_; ++g) {
        const auto c = static_cast<size_t>(rules(g).size_class);
        seen[c].resize(static_cast<size_t>(arena_.created_slabs()));
        for (const int32_t page : adoption.pages[static_cast<size_t>(g)]) {
            if (page < 0) continue;
            auto slab = seen[c][static_cast<size_t>(page / pages_per_slab_[c])];
            pinned[c] += !slab;
            slab = true;
        }
    }
    int64_t quota = 0;
    for (size_t c = 0; c < pages_per_slab_.size(); ++c) quota += std::max(r.needs[c], pinned[c]);
    return quota <= arena_.slabs();
}

// What is left of the last lookup's hit, found again if keys came or went since: never more than the caller knows of. The
// oldest request's is cut to what keeps its quota:
// no hit always does.
Manager::Adoption Manager::adopt(Request& r, bool oldest) const {
    Adoption adoption;
    if (r.looked_up && r.hit_version != arena_.version()) {
        r.hit_left = longest(r, kPresent, std::min(r.hit, reach_of(r))).hit;
        r.hit_version = arena_.version();
    }
    adoption.hit = r.looked_up ? r.hit_left : 0;
    if (!gather(r, &adoption)) {
        adoption.hit = 0;
        gather(r, &adoption);
    }
    if (!oldest || pages_per_slab_.size() == 1 || keeps_quota(adoption, r)) return adoption;
    int64_t good = 0, bad = adoption.hit / grid_;  // in grid units
    while (bad - good > 1) {
        const int64_t middle = good + (bad - good) / 2;
        adoption.hit = longest(r, kPresent, middle * grid_).hit;
        (gather(r, &adoption) && keeps_quota(adoption, r) ? good : bad) = middle;
    }
    adoption.hit = longest(r, kPresent, good * grid_).hit;
    if (!gather(r, &adoption)) adoption = {};
    if (adoption.pages.empty()) gather(r, &adoption);
    return adoption;
}

}  // namespace kvc
