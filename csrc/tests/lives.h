// Requests that live as an engine lets them, in two managers at once: see twins.h.
//
// Several of them in up to three open steps, with guesses of which some are rejected, loads, pins, preemptions, clears.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "twins.h"

namespace fuzz {

class Lives {
  public:
    using Counts = std::map<std::string, std::pair<int64_t, int64_t>>;  // as Twins::tally

    Lives(uint64_t seed, Counts* tally);
    void run(int64_t operations);

  private:
    struct Pin {
        int32_t group, page;
    };

    void operate();
    // lives.cpp, lives_batches.cpp
    kvc_request_info info_of(int64_t handle);
    void open();
    void progress();
    void progress_together();
    bool grant_as_starving(int64_t handle, int64_t tokens);
    void commit_together(const std::vector<int64_t>& handles, const std::vector<int64_t>& ends);
    void extend_together(const std::vector<int64_t>& handles);
    void commit(int64_t handle, const kvc_grant& grant, int64_t sure);
    int64_t held_pages();
    void expect_no_blocks_beyond(int64_t handle, int64_t upto);
    void extend(int64_t handle, int64_t n);
    int64_t look_up(int64_t handle);
    void retain();
    void begin_step();
    void end_step();
    void close(int32_t (*how)(kvc_manager*, int64_t));
    void make_space();
    // lives_tiers.cpp
    void end_load();
    void abandon_load();
    void pin();
    void unpin();
    void remember_keys();
    void take_moves();
    void clear();
    void give_everything_back();

    Random random_;
    Where where_;
    Setup setup_;
    Counts* tally_;
    Twins twins_{&where_, setup_};
    std::vector<int32_t> text_;  // prompts are prefixes of it, some with one other token; outputs go on in it
    std::vector<int64_t> steps_;
    std::vector<Pin> pins_;
    std::vector<kvc_keyed> keyed_;  // some that were seen
};

}  // namespace fuzz
