// How many threads of this process can run at a time.
#pragma once

#include <cstdint>
#include <string>

namespace kvc {

// CPUs of the affinity mask, as it is now, or fewer where a control group's quota allows fewer. The quota is the one of
// the first call. At least 1.
int32_t cores();

// The smallest quota of this process's control groups (versions 1 and 2) in whole CPUs, rounded up; INT32_MAX where there
// is none. /proc and /sys are looked up under `root`; what cannot be read sets no limit.
int32_t quota_cores(const std::string& root);

}  // namespace kvc
