// What `cores.h` reads from the kernel.
#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <thread>

#include "kvcache_core.h"

namespace kvc {

namespace {

constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();
constexpr int kMostCpus = 1 << 16;

int32_t affinity_cores() {
    for (int cpus = 1024; cpus <= kMostCpus; cpus *= 2) {  // the kernel refuses a set that is smaller than its own
        const auto free_set = [](cpu_set_t* set) { CPU_FREE(set); };
        const std::unique_ptr<cpu_set_t, decltype(free_set)> set(CPU_ALLOC(static_cast<size_t>(cpus)), free_set);
        const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(cpus));
        if (set && sched_getaffinity(0, bytes, set.get()) == 0) return std::max(1, CPU_COUNT_S(bytes, set.get()));
    }
    return static_cast<int32_t>(std::max(1U, std::thread::hardware_concurrency()));
}

// Of one control group. "max" (version 2) and -1 (version 1) are none.
int32_t limit_of(const std::string& folder, bool unified) {
    double quota = 0, period = 0;
    if (unified) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;
    } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (!(quota > 0 && period > 0)) return kNoLimit;
    const double cpus = quota / period;
    if (cpus >= kMostCpus) return kNoLimit;
    const auto whole = static_cast<int32_t>(cpus);
    return std::max(1, whole < cpus ? whole + 1 : whole);
}

}  // namespace

int32_t quota_cores(const std::string& root) {
    int32_t least = kNoLimit;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
        std::istringstream fields(line);
        std::string number, controllers, path;
        std::getline(std::getline(fields, number, ':'), controllers, ':');
        std::getline(fields, path);
        const bool unified = controllers.empty();
        if (!unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        const std::string base = root + "/sys/fs/cgroup" + (unified ? "" : "/cpu");
        while (!path.empty() && path != "/") {
            least = std::min(least, limit_of(base + path, unified));
            path.resize(std::min(path.rfind('/'), path.size() - 1));
        }
        least = std::min(least, limit_of(base, unified));
    }
    return least;
}

int32_t cores() {
    static const int32_t quota = quota_cores("");
    return std::min(affinity_cores(), quota);
}

}  // namespace kvc

extern "C" int32_t kvc_cores(void) {
    try {
        return kvc::cores();
    } catch (const std::exception&) {
        return 1;
    }
}
