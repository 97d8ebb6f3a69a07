// What became findable in a page pool and what went, in order, until somebody takes it. Bounded.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "arena.h"
#include "kvcache_core.h"

namespace kvc {

// What does not fit any more is lost, and said to be: everything that waits goes, and the next reader hears of it first.
class PoolJournal final : public KeyListener {
  public:
    explicit PoolJournal(const Arena* arena) : arena_(arena) {}

    // At most so many events wait from now on; 0: none are kept, nothing is lost. What waited is gone.
    void start(int64_t most) {
        most_ = static_cast<size_t>(most);
        lost_ = false;
        events_.clear();
    }

    void stored(int32_t group, int32_t page) override {
        const Page& target = arena_->page(group, page);
        push(KVC_EVENT_STORED, target.digest, target.ns);
    }
    void removed(int32_t, const Digest& digest, uint32_t ns) override { push(KVC_EVENT_REMOVED, digest, ns); }

    int64_t count() const { return static_cast<int64_t>(events_.size()) + lost_; }
    // Writes count() events and forgets them.
    void take(kvc_pool_event* out) {
        if (lost_) {
            *out = {};
            out++->kind = KVC_EVENT_LOST;
        }
        std::copy(events_.begin(), events_.end(), out);
        start(static_cast<int64_t>(most_));
    }

    template <typename Visit>
    void each_space(Visit&& visit) const {
        for (const kvc_pool_event& event : events_) visit(event.ns);
    }

  private:
    void push(int32_t kind, const Digest& digest, uint32_t ns) {
        if (!most_) return;
        try {
            if (events_.size() == most_) throw std::bad_alloc();
            kvc_pool_event event{};
            event.kind = kind;
            event.ns = ns;
            std::copy_n(digest.bytes, 32, event.digest);
            events_.push_back(event);
        } catch (const std::bad_alloc&) {
            events_.clear();
            lost_ = true;
        }
    }

    const Arena* arena_;
    size_t most_ = 0;
    bool lost_ = false;
    std::vector<kvc_pool_event> events_;
};

}  // namespace kvc
