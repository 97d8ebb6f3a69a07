// Implementation of `twins.h`.
#include "twins.h"

#include <algorithm>

namespace fuzz {

Twins::Twins(Where* where, const Setup& setup) : where_(where), setup_(&setup) {
    where_->function = "kvc_manager_new";
    for (int64_t granted = 0;; ++granted) {
        allocations_left = granted;
        const int32_t status = setup.make(&starving_);
        allocations_left = -1;
        if (status == KVC_OK) break;
        if (status != KVC_E_MEMORY || starving_) broken(*where_, "status %d: %s", status, kvc_last_error());
    }
    if (setup.make(&healthy_)) broken(*where_, "a good setup was refused: %s", kvc_last_error());
}

Twins::~Twins() {
    kvc_manager_free(starving_);
    kvc_manager_free(healthy_);
}

void Twins::check(kvc_manager* manager) const {
    if (const int32_t status = kvc_check(manager)) broken(*where_, "kvc_check: %d: %s", status, kvc_last_error());
}

void Twins::read_events() {
    if (!setup_->config.events) return;
    where_->function = "kvc_take_events";
    const Events seen = take_events(*where_, starving_);
    const Events wanted = take_events(*where_, healthy_);
    const bool settled = !open_steps && loads.empty();
    of_healthy_.apply(*where_, *setup_, wanted);
    of_healthy_.check(*where_, *setup_, healthy_, settled);
    if (seen.lost()) {
        if (!lossy_) broken(*where_, "events were lost, and no allocation had failed");
        if (seen.keys.size() > wanted.keys.size() ||
            !std::equal(seen.keys.rbegin(), seen.keys.rend(), wanted.keys.rbegin()))
            broken(*where_, "after a loss other keys are told of than those that followed");
        of_starving_ = of_healthy_;  // start over
        return;
    }
    if (!lossy_ && !(seen == wanted)) broken(*where_, "other events than those of a manager that never ran out");
    of_starving_.apply(*where_, *setup_, seen);
    of_starving_.check(*where_, *setup_, starving_, settled);
}

}  // namespace fuzz
