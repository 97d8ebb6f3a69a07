// What must hold of a manager, whatever was called.
#include "fuzz_manager.h"

namespace fuzz {

void ManagerFuzz::check() {
    where_.function = "kvc_check";
    if (const int32_t status = kvc_check(manager_)) broken(where_, "status %d: %s", status, kvc_last_error());
    ++(*tally_)["kvc_check"][KVC_OK];
}

void ManagerFuzz::give_everything_back() {
    spite_percent_ = starve_percent_ = 0;
    while (!steps_.empty()) end_step();
    while (!loads_.empty()) end_load();
    while (!handles_.empty()) close();
    while (!pins_.empty()) unpin();
    check();
    for (int32_t c = 0; c < setup_.config.n_classes; ++c) {
        kvc_class_stats stats{};
        kvc_get_class_stats(manager_, c, &stats);
        if (stats.held) broken(where_, "class %d still holds %lld pages", c, static_cast<long long>(stats.held));
    }
    clear();
    check();
}

}  // namespace fuzz
