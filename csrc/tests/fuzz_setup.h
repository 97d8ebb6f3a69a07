// Managers for the fuzzers: geometries that work, and ones that nobody would ask for.
#pragma once

#include <algorithm>
#include <vector>

#include "fuzz.h"

namespace fuzz {

struct Setup {
    kvc_config config{};  // without the address of pages_per_slab
    std::vector<kvc_group> groups;
    std::vector<int32_t> pages_per_slab;
    bool valid = true;  // false: may be refused, or work

    int32_t make(kvc_manager** manager) const {
        kvc_config complete = config;
        complete.pages_per_slab = pages_per_slab.data();
        return kvc_manager_new(&complete, groups.data(), manager);
    }

    void print() const {
        std::fprintf(stderr, "%lld slabs, unit %d, grid %d, %d open steps, movable %d\n",
                     static_cast<long long>(config.slabs), config.hash_unit_tokens, config.grid_tokens,
                     config.max_open_steps, config.movable);
        for (const kvc_group& group : groups)
            std::fprintf(stderr, "  kind %d, block %d, chunk %lld, lead %lld, pages %d, look-ahead %d, class %d\n",
                         group.kind, group.block_tokens, static_cast<long long>(group.chunk_tokens),
                         static_cast<long long>(group.lead_tokens), group.request_pages, group.lookahead_tokens,
                         group.size_class);
        for (const int32_t k : pages_per_slab) std::fprintf(stderr, "  %d pages in a slab\n", k);
    }
};

// One group of full attention, a page for each four tokens.
inline Setup full_setup() {
    Setup setup;
    kvc_group group{};
    group.kind = KVC_FULL;
    group.block_tokens = 4;
    setup.groups = {group};
    setup.pages_per_slab = {1};
    setup.config.n_groups = setup.config.n_classes = 1;
    setup.config.slabs = 16;
    setup.config.hash_unit_tokens = setup.config.grid_tokens = 4;
    setup.config.max_open_steps = 2;
    setup.config.journal = setup.config.events = 1;
    return setup;
}

inline kvc_group make_group(Random& random, int32_t unit, int32_t grid) {
    const auto divisor = [&](int32_t n) {
        int32_t found = 1;
        for (int32_t d = 1; d <= n; ++d)
            if (n % d == 0 && random.chance(50)) found = d;
        return found;
    };
    kvc_group group{};
    group.kind = random.one_of<int32_t>({KVC_FULL, KVC_FULL, KVC_SPAN, KVC_STATE, KVC_PRIVATE});
    switch (group.kind) {
        case KVC_FULL:
            group.block_tokens = unit * divisor(grid / unit);
            break;
        case KVC_SPAN:
            group.block_tokens = random.chance(50) ? unit * divisor(grid / unit) : divisor(unit);
            group.chunk_tokens = random.chance(40) ? 1 : group.block_tokens * random.between(1, 6);
            group.lead_tokens =
                random.chance(30) ? 0 : random.below(20);  // 0: a pooling state, chunked local attention
            group.transient = group.chunk_tokens > 1 && random.chance(50);
            break;
        case KVC_STATE:
            group.block_tokens = grid;
            [[fallthrough]];
        default:
            group.request_pages = static_cast<int32_t>(random.below(3));
    }
    if (group.kind <= KVC_SPAN && random.chance(25)) group.lookahead_tokens = random.one_of({1, 2, 5});
    return group;
}

inline Setup make_setup(Random& random) {
    Setup setup;
    kvc_config& config = setup.config;
    config.hash_unit_tokens = random.one_of({1, 2, 4});
    config.grid_tokens = config.hash_unit_tokens * random.one_of({1, 2, 3, 4, 8, 12});
    config.n_groups = random.one_of({1, 2, 3, 4});
    config.n_classes = static_cast<int32_t>(random.between(1, config.n_groups));
    for (int32_t g = 0; g < config.n_groups; ++g) {
        setup.groups.push_back(make_group(random, config.hash_unit_tokens, config.grid_tokens));
        setup.groups.back().size_class =
            g < config.n_classes ? g : static_cast<int32_t>(random.below(config.n_classes));
    }
    // Context parallelism over d devices: blocks of attention d times as long, states and hash unit as they were.
    if (const int32_t d = random.one_of({1, 1, 1, 2, 4}); d > 1) {
        config.grid_tokens *= d;
        for (kvc_group& group : setup.groups) {
            group.block_tokens *= d;
            if (group.chunk_tokens > 1) group.chunk_tokens *= d;
        }
    }
    for (int32_t c = 0; c < config.n_classes; ++c) setup.pages_per_slab.push_back(random.one_of({1, 1, 2, 3, 7, 40}));
    const int32_t most = *std::max_element(setup.pages_per_slab.begin(), setup.pages_per_slab.end());
    config.slabs = random.chance(10) ? kvc_unlimited() / most : random.between(8, 160);
    config.max_open_steps = random.one_of({1, 2, 3});
    config.movable = random.chance(50);
    config.journal = random.chance(80);
    config.events = random.chance(80);
    config.history_tokens = random.one_of<int64_t>({0, 1, 60, 100, 1'000'000});
    config.seed = random.next();
    return setup;
}

// One number of a good setup replaced.
inline Setup make_hostile_setup(Random& random) {
    Setup setup = make_setup(random);
    setup.valid = false;
    kvc_group& group = setup.groups[static_cast<size_t>(random.below(setup.config.n_groups))];
    switch (random.below(15)) {
        case 0:
            setup.config.n_groups = random.one_of({0, -1, INT32_MIN, INT32_MAX, 65});
            break;
        case 1:
            setup.config.n_classes = random.one_of({0, -1, INT32_MIN, INT32_MAX, 65});
            break;
        case 2:
            setup.config.slabs = random.hostile();
            break;
        case 3:
            setup.config.hash_unit_tokens = random.hostile32();
            break;
        case 4:
            setup.config.grid_tokens = random.hostile32();
            break;
        case 5:
            setup.config.max_open_steps = random.hostile32();
            break;
        case 6:
            setup.pages_per_slab[0] = random.hostile32();
            break;
        case 7:
            group.kind = random.hostile32();
            break;
        case 8:
            group.block_tokens = random.hostile32();
            break;
        case 9:
            group.chunk_tokens = random.hostile();
            break;
        case 10:
            group.lead_tokens = random.hostile();
            break;
        case 11:
            group.request_pages = random.hostile32();
            break;
        case 12:
            group.lookahead_tokens = random.hostile32();
            break;
        default:
            group.size_class = random.hostile32();
            break;
    }
    return setup;
}

}  // namespace fuzz
