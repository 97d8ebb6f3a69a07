// What a group of layers stores, and what a hit or a query at a position reads of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kvcache_core.h"

namespace kvc {

struct GroupRules : kvc_group {
    GroupRules(const kvc_group& group, int64_t unit)
        : kvc_group(group),
          links_per_block(block_tokens && block_tokens % unit == 0 ? block_tokens / unit : 0),
          ahead_links((lookahead_tokens + unit - 1) / unit) {}

    int64_t links_per_block;  // of the hash chain; 0: blocks are smaller than a link
    int64_t ahead_links;

    bool full() const { return kind == KVC_FULL; }
    bool span() const { return kind == KVC_SPAN; }
    bool state() const { return kind == KVC_STATE; }
    bool cacheable() const { return kind != KVC_PRIVATE; }
    bool draft() const { return lookahead_tokens > 0; }
    bool blocks() const { return full() || span(); }
    // Part of what decides a hit.
    bool votes() const { return cacheable() && !draft(); }

    // A hit that ends at `position`, and a query there, read the tokens from here on.
    int64_t need_begin(int64_t position) const {
        if (!span()) return 0;
        return std::max<int64_t>(position / chunk_tokens * chunk_tokens - lead_tokens, 0);
    }
    int64_t blocks_upto(int64_t position) const { return (position + block_tokens - 1) / block_tokens; }

    // Most pages that a request of `most` tokens has to hold at one time, token by token (docs/memory.md).
    int64_t need(int64_t most, int64_t grid) const {
        switch (kind) {
            case KVC_FULL:
                return blocks_upto(most);
            case KVC_SPAN: {
                const int64_t chunk = chunk_tokens > 1 ? chunk_tokens - std::gcd(chunk_tokens, grid) : 0;
                const int64_t lead = blocks_upto(lead_tokens);
                int64_t window = lead + (chunk + grid) / block_tokens;
                // What the last grid point reads, and what the next token does.
                if (transient) window = std::min(window, 2 * lead + (chunk + chunk_tokens) / block_tokens);
                return std::min(blocks_upto(most), window);
            }
            case KVC_STATE:
                return 2 + request_pages;
            default:
                return request_pages;
        }
    }
};

}  // namespace kvc
