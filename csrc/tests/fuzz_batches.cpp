// Calls for several requests at once, as a hostile caller makes them.
#include "fuzz_manager.h"

namespace fuzz {

std::vector<int64_t> ManagerFuzz::some_handles() {
    std::vector<int64_t> handles;
    for (int64_t i = random_.below(6); i-- > 0;) handles.push_back(a_handle());  // some of them twice
    return handles;
}

void ManagerFuzz::allocate_many() {
    const std::vector<int64_t> handles = some_handles();
    std::vector<int64_t> tokens, drafts;
    for (size_t i = 0; i < handles.size(); ++i) {
        tokens.push_back(random_.chance(60) ? 1 : a_count(20));
        drafts.push_back(random_.chance(70) ? 0 : a_count(3));
    }
    std::vector<kvc_grant> grants(handles.size());
    const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(handles.size());
    const int64_t* guesses = random_.chance(50) ? drafts.data() : nullptr;
    const int32_t commit = random_.chance(30);
    int64_t done = 0;
    const auto body = [&] {
        return kvc_allocate_many(manager_, handles.data(), tokens.data(), guesses, commit, n, grants.data(), &done);
    };
    const int32_t status = call_many("kvc_allocate_many", n, &done, body, commit != 0);
    for (int64_t i = 0; i < done; ++i)
        if (const int64_t load = grants[static_cast<size_t>(i)].load) loads_.push_back(load);
    if (status == KVC_NO_SPACE) expect_a_reason(handles[static_cast<size_t>(done)]);
}

void ManagerFuzz::commit_many() {
    const std::vector<int64_t> handles = some_handles();
    std::vector<int64_t> ends;
    for (const int64_t handle : handles) {
        kvc_request_info info{};
        ask(handle, &info);
        ends.push_back(spite() ? random_.hostile() : info.granted);
    }
    const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(handles.size());
    int64_t done = 0;
    call_many("kvc_commit_many", n, &done,
              [&] { return kvc_commit_many(manager_, handles.data(), ends.data(), n, &done); });
}

void ManagerFuzz::extend_many() {
    const std::vector<int64_t> handles = some_handles();
    std::vector<int64_t> counts;
    const bool single = random_.chance(50);
    int64_t total = 0;
    for (size_t i = 0; i < handles.size(); ++i) total += counts.emplace_back(single ? 1 : random_.between(0, 4));
    if (spite()) total += random_.one_of({-1, 1});
    if (spite() && !counts.empty()) counts[0] = random_.hostile();
    const int64_t n = spite() ? -1 - random_.below(INT64_MAX) : static_cast<int64_t>(handles.size());
    int64_t done = 0;
    call_many("kvc_extend_many", n, &done, [&] {
        return kvc_extend_many(manager_, handles.data(), text_.data(), total, single ? nullptr : counts.data(), n,
                               &done);
    });
}

}  // namespace fuzz
