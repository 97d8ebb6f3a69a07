// A reader of a manager's events, who knows from them alone which keys each group has, and compares.
#pragma once

#include <array>
#include <set>
#include <tuple>
#include <vector>

#include "fuzz.h"
#include "fuzz_setup.h"

namespace fuzz {

struct Events {
    std::vector<kvc_event_run> runs;
    std::vector<uint8_t> keys;
    std::vector<int32_t> tokens;

    bool lost() const { return !runs.empty() && runs[0].kind == KVC_EVENT_LOST; }
    bool operator==(const Events& other) const;
};

// All that wait; a second call finds none.
Events take_events(const Where& where, kvc_manager* manager);

class EventIndex {
  public:
    void apply(const Where& where, const Setup& setup, const Events& events);
    // `settled`: no step and no load is open, so every key of the manager is visible.
    void check(const Where& where, const Setup& setup, kvc_manager* manager, bool settled) const;

  private:
    using Key = std::tuple<int32_t, uint32_t, std::array<uint8_t, 32>>;  // group, namespace, digest
    std::set<Key> keys_;
};

}  // namespace fuzz
