// Several requests of `lives.h` in one call, as a scheduler asks for all that run.
#include <algorithm>
#include <array>

#include "lives.h"

namespace fuzz {

namespace {

constexpr size_t kMost = 8;  // as many requests as are open at most
using Grants = std::array<kvc_grant, kMost>;

}  // namespace

// A grant for whoever runs, mostly of one token; then what was granted is committed, and new tokens are told.
void Lives::progress_together() {
    std::vector<int64_t> handles, tokens, drafts, ends;
    for (const int64_t handle : twins_.handles) {
        const kvc_request_info info = info_of(handle);
        if (info.state != 1 || handles.size() == kMost) continue;
        const int64_t known = info.n_tokens - info.committed;
        handles.push_back(handle);
        tokens.push_back(known > 1 && random_.chance(50) ? known : 1);
        drafts.push_back(random_.chance(70) ? 0 : random_.between(1, 2));
    }
    if (handles.empty()) return progress();
    const int64_t* guesses = random_.chance(50) ? drafts.data() : nullptr;
    const bool commit = !guesses && random_.chance(50);
    if (commit && (steps_.empty() || random_.chance(60))) begin_step();
    Grants of_batch{}, of_singles{};
    int64_t done = 0;
    const int32_t status = twins_.ask_many(
        "kvc_allocate_many", static_cast<int64_t>(handles.size()), &done,
        [&](kvc_manager* manager, int64_t first, int64_t* more) {
            return kvc_allocate_many(manager, handles.data() + first, tokens.data() + first,
                                     guesses ? guesses + first : nullptr, commit,
                                     static_cast<int64_t>(handles.size()) - first, of_batch.data() + first, more);
        },
        [&](kvc_manager* manager, int64_t i) {
            const auto at = static_cast<size_t>(i);
            const auto status =
                kvc_allocate(manager, handles[at], tokens[at], guesses ? guesses[at] : 0, &of_singles[at]);
            return status || !commit ? status : kvc_commit(manager, handles[at], of_singles[at].end);
        },
        [&](int64_t i) {
            return commit && grant_as_starving(handles[static_cast<size_t>(i)], tokens[static_cast<size_t>(i)]);
        });
    handles.resize(static_cast<size_t>(done));
    for (size_t i = 0; i < handles.size(); ++i) {
        if (std::memcmp(&of_batch[i], &of_singles[i], sizeof(kvc_grant)))
            broken(where_, "grant %zu is another one than that of a single call", i);
        ends.push_back(std::min(of_batch[i].start + tokens[i], of_batch[i].end));
    }
    if (!commit && !handles.empty() && random_.chance(90)) commit_together(handles, ends);
    if (random_.chance(60)) extend_together(handles);
    if (status == KVC_NO_SPACE) make_space();
}

// Memory ran out when a grant was to be committed: it stands.
bool Lives::grant_as_starving(int64_t handle, int64_t tokens) {
    kvc_request_info starving{}, healthy{};
    kvc_info(twins_.starving(), handle, &starving);
    kvc_info(twins_.healthy(), handle, &healthy);
    if (starving.granted == healthy.granted) return false;
    kvc_grant grant{};
    kvc_allocate(twins_.healthy(), handle, tokens, 0, &grant);
    return true;
}

void Lives::commit_together(const std::vector<int64_t>& handles, const std::vector<int64_t>& ends) {
    if (steps_.empty() || random_.chance(60)) begin_step();
    int64_t done = 0;
    twins_.ask_many(
        "kvc_commit_many", static_cast<int64_t>(handles.size()), &done,
        [&](kvc_manager* manager, int64_t first, int64_t* more) {
            return kvc_commit_many(manager, handles.data() + first, ends.data() + first,
                                   static_cast<int64_t>(handles.size()) - first, more);
        },
        [&](kvc_manager* manager, int64_t i) {
            return kvc_commit(manager, handles[static_cast<size_t>(i)], ends[static_cast<size_t>(i)]);
        });
    if (random_.chance(50)) end_step();
}

// What their next tokens are is told, of all that have native keys.
void Lives::extend_together(const std::vector<int64_t>& handles) {
    std::vector<int64_t> told, counts, starts;
    std::vector<int32_t> tokens;
    for (const int64_t handle : handles) {
        const kvc_request_info info = info_of(handle);
        const int64_t n = random_.between(0, 2);
        if (info.ns == 2 || info.n_tokens + n > static_cast<int64_t>(text_.size())) continue;
        told.push_back(handle);
        counts.push_back(n);
        starts.push_back(static_cast<int64_t>(tokens.size()));
        tokens.insert(tokens.end(), text_.begin() + info.n_tokens, text_.begin() + info.n_tokens + n);
    }
    int64_t done = 0;
    const auto total = static_cast<int64_t>(tokens.size());
    starts.push_back(total);
    twins_.ask_many(
        "kvc_extend_many", static_cast<int64_t>(told.size()), &done,
        [&](kvc_manager* manager, int64_t first, int64_t* more) {
            const int64_t start = starts[static_cast<size_t>(first)];
            return kvc_extend_many(manager, told.data() + first, tokens.data() + start, total - start,
                                   counts.data() + first, static_cast<int64_t>(told.size()) - first, more);
        },
        [&](kvc_manager* manager, int64_t i) {
            const auto at = static_cast<size_t>(i);
            return kvc_extend(manager, told[at], tokens.data() + starts[at], counts[at]);
        });
}

}  // namespace fuzz
