// The content of requests that are closed, moved here: bounded, the oldest dropped first. So that it can be told later which
// token differed, or whose key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "content.h"

namespace kvc {

// A conversation takes one entry: an entry is replaced when the same session closes a request that begins with all of it.
class History {
  public:
    static constexpr int64_t kMostEntries = 4096;

    explicit History(int64_t most_tokens) : most_tokens_(most_tokens) {}

    bool keeps_any() const { return most_tokens_ > 0; }
    // Out of memory: it is not kept. No work per token or link.
    void add(Content&& content) noexcept;
    // What was kept under a number that has another root now says nothing any more.
    void forget(uint32_t ns);
    template <typename Visit>
    void each(Visit&& visit) const {
        for (int32_t i = newest_; i >= 0; i = at(i).older) visit(at(i).content);
    }
    // The same, of content that may be changed but for its length.
    template <typename Visit>
    void each(Visit&& visit) {
        for (int32_t i = newest_; i >= 0; i = at(i).older) visit(entries_[static_cast<size_t>(i)].content);
    }
    int64_t tokens() const { return tokens_; }
    int64_t entries() const { return entries_kept_; }
    const char* check() const;  // nullptr, or what is broken

  private:
    struct Entry {
        Content content;
        int32_t older = -1;
        int32_t newer = -1;
    };
    static constexpr size_t kSessions = 4096;

    const Entry& at(int32_t i) const { return entries_[static_cast<size_t>(i)]; }
    void drop(int32_t i);
    bool continues(const Entry& entry, const Content& content) const;

    int64_t most_tokens_;
    int64_t tokens_ = 0;
    int64_t entries_kept_ = 0;
    std::vector<Entry> entries_;
    std::vector<int32_t> unused_;  // places in it
    int32_t newest_ = -1;
    int32_t oldest_ = -1;
    std::vector<int32_t> newest_of_;  // session modulo kSessions -> where its newest entry was put
};

}  // namespace kvc
