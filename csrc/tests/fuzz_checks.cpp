// What must hold of a manager, whatever was called.
#include <cstring>

#include "fuzz_manager.h"

namespace fuzz {

namespace {

// The struct's 64-bit fields; where it ends in two of 32 bits they count as one.
template <typename T>
void append(std::vector<ManagerFuzz::Reading>* all, const char* what, int64_t which, const T& values) {
    int64_t fields[sizeof values / sizeof(int64_t)];
    static_assert(sizeof fields == sizeof values);
    std::memcpy(fields, &values, sizeof values);
    for (size_t i = 0; i < std::size(fields); ++i) all->push_back({what, which, static_cast<int>(i), fields[i]});
}

}  // namespace

void ManagerFuzz::check() {
    where_.function = "kvc_check";
    if (const int32_t status = kvc_check(manager_)) broken(where_, "status %d: %s", status, kvc_last_error());
    ++(*tally_)["kvc_check"][KVC_OK];
}

// Everything that can be read of the manager and its requests. That the oldest request waits may come with "no space".
std::vector<ManagerFuzz::Reading> ManagerFuzz::readings() {
    std::vector<Reading> all;
    kvc_manager_stats stats{};
    kvc_manager_get_stats(manager_, &stats);
    stats.frozen = 0;
    append(&all, "stats", 0, stats);
    kvc_arena_stats arena{};
    kvc_get_arena_stats(manager_, &arena);
    append(&all, "arena", 0, arena);
    for (int32_t c = 0; c < setup_.config.n_classes; ++c) {
        kvc_class_stats of_class{};
        kvc_get_class_stats(manager_, c, &of_class);
        append(&all, "class", c, of_class);
    }
    for (int32_t g = 0; g < setup_.config.n_groups; ++g) {
        kvc_group_stats of_group{};
        kvc_get_group_stats(manager_, g, &of_group);
        append(&all, "group", g, of_group);
    }
    for (const int64_t handle : handles_) {
        kvc_request_info info{};
        kvc_info(manager_, handle, &info);
        append(&all, "request", handle, info);
    }
    return all;
}

void ManagerFuzz::expect_unchanged(int32_t status, const std::vector<Reading>& before) {
    const std::vector<Reading> after = readings();
    for (size_t i = 0; i < after.size(); ++i) {
        const Reading &old = before[i], &now = after[i];
        if (old.value == now.value) continue;
        broken(where_, "status %d (%s), but field %d of %s %lld has changed from %lld to %lld", status,
               kvc_last_error(), now.field, now.what, static_cast<long long>(now.which),
               static_cast<long long>(old.value), static_cast<long long>(now.value));
    }
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
