// Sizes and kinds of groups, checked before a manager is made.
#include "config.h"

#include <algorithm>
#include <bit>

#include "error.h"
#include "exclusive.h"
#include "manager.h"

namespace kvc {

namespace {

constexpr int32_t kMostSlabPages = UINT16_MAX;
constexpr int32_t kMostOpenSteps = 1024;

int32_t check_group(const kvc_config& config, int32_t g, const kvc_group& group) {
    using L = long long;
    if (group.kind < KVC_FULL || group.kind > KVC_PRIVATE)
        return fail(KVC_E_ARGUMENT, "group %d has unknown kind %d", g, group.kind);
    if (group.size_class < 0 || group.size_class >= config.n_classes)
        return fail(KVC_E_ARGUMENT, "group %d has size class %d of %d", g, group.size_class, config.n_classes);
    if (group.request_pages < 0 || group.request_pages > kMostSlabPages || group.lookahead_tokens < 0)
        return fail(KVC_E_ARGUMENT, "group %d has %d pages for itself and looks %d tokens ahead", g,
                    group.request_pages, group.lookahead_tokens);
    if (group.transient != 0 && (group.transient != 1 || group.kind != KVC_SPAN || group.chunk_tokens < 2))
        return fail(KVC_E_ARGUMENT, "group %d is transient (%d): 0 or 1, and 1 for spans with chunks only", g,
                    group.transient);
    if (group.kind == KVC_PRIVATE) return KVC_OK;
    if (group.kind == KVC_STATE && (group.block_tokens != config.grid_tokens || group.lookahead_tokens))
        return fail(KVC_E_ARGUMENT, "group %d: the block of a state is the grid, and no draft is a state", g);
    if (group.block_tokens < 1 || config.grid_tokens % group.block_tokens)
        return fail(KVC_E_ARGUMENT, "group %d has blocks of %d tokens: the grid of %d must be a multiple", g,
                    group.block_tokens, config.grid_tokens);
    const bool whole = group.block_tokens % config.hash_unit_tokens == 0;
    if (!whole && (group.kind != KVC_SPAN || config.hash_unit_tokens % group.block_tokens))
        return fail(KVC_E_ARGUMENT, "group %d has blocks of %d tokens, the hash unit is %d", g, group.block_tokens,
                    config.hash_unit_tokens);
    if (group.kind == KVC_SPAN &&
        (group.chunk_tokens < 1 || group.lead_tokens < 0 || group.chunk_tokens > kMostTokens ||
         group.lead_tokens > kMostTokens || (group.chunk_tokens > 1 && group.chunk_tokens % group.block_tokens)))
        return fail(KVC_E_ARGUMENT, "group %d has chunks of %lld tokens and a lead of %lld, blocks of %d", g,
                    static_cast<L>(group.chunk_tokens), static_cast<L>(group.lead_tokens), group.block_tokens);
    return KVC_OK;
}

}  // namespace

int32_t check_config(const kvc_config& config, const kvc_group* groups) {
    if (config.n_groups < 1 || config.n_groups > kMostGroups || config.n_classes < 1 ||
        config.n_classes > config.n_groups)
        return fail(KVC_E_ARGUMENT, "%d groups in %d size classes: 1 to %d groups, at most one class each",
                    config.n_groups, config.n_classes, kMostGroups);
    if (const auto status = not_null("pages_per_slab", config.pages_per_slab, "groups", groups)) return status;
    if (config.hash_unit_tokens < 1 || config.grid_tokens < 1 || config.grid_tokens % config.hash_unit_tokens)
        return fail(KVC_E_ARGUMENT, "the grid of %d tokens is no multiple of the hash unit of %d", config.grid_tokens,
                    config.hash_unit_tokens);
    if (config.max_open_steps < 1 || config.max_open_steps > kMostOpenSteps)
        return fail(KVC_E_ARGUMENT, "%d open steps: 1 to %d are possible", config.max_open_steps, kMostOpenSteps);
    if (config.history_tokens < 0)
        return fail(KVC_E_ARGUMENT, "a history of %lld tokens: 0 or more",
                    static_cast<long long>(config.history_tokens));
    int32_t most = 1;
    for (int32_t c = 0; c < config.n_classes; ++c) {
        if (config.pages_per_slab[c] < 1 || config.pages_per_slab[c] > kMostSlabPages)
            return fail(KVC_E_ARGUMENT, "%d pages in a slab of class %d: 1 to %d are possible",
                        config.pages_per_slab[c], c, kMostSlabPages);
        most = std::max(most, config.pages_per_slab[c]);
    }
    if (config.slabs < 1 || config.slabs > kMostPages / most)
        return fail(KVC_E_ARGUMENT, "%lld slabs of up to %d pages: 1 to %d are possible",
                    static_cast<long long>(config.slabs), most, kMostPages / most);
    uint64_t used = 0;
    for (int32_t g = 0; g < config.n_groups; ++g) {
        if (const auto status = check_group(config, g, groups[g])) return status;
        used |= uint64_t{1} << groups[g].size_class;
    }
    if (std::popcount(used) != config.n_classes)
        return fail(KVC_E_ARGUMENT, "%d size classes, groups use %d of them", config.n_classes, std::popcount(used));
    return KVC_OK;
}

}  // namespace kvc
