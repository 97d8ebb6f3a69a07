// A reader of a pool's journal, who knows from it alone which keys are there, and compares.
#pragma once

#include <vector>

#include "fuzz.h"

namespace fuzz {

class JournalReader {
  public:
    // The keys that the pool is ever given, in namespaces 0 and 1.
    JournalReader(kvc_pool* pool, const uint8_t* digests, int64_t n_keys)
        : pool_(pool), digests_(digests), n_keys_(n_keys) {}

    // After kvc_pool_journal(pool, most) has succeeded.
    void started(const Where& where, int64_t most) {
        most_ = most;
        believed_ = present(where);
    }
    // After kvc_pool_take_events: *n and the status were KVC_OK. Room for `cap` events, then one that was marked.
    void took(const Where& where, const std::vector<kvc_pool_event>& events, int64_t cap, int64_t n);

    static kvc_pool_event marked();

  private:
    std::vector<bool> present(const Where& where) const;
    size_t index_of(const Where& where, const kvc_pool_event& event) const;

    kvc_pool* pool_;
    const uint8_t* digests_;
    int64_t n_keys_;
    int64_t most_ = 0;
    std::vector<bool> believed_;
};

}  // namespace fuzz
