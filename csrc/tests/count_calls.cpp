// count_calls: a day of agents in miniature, to count the instructions of each call under callgrind (docs/performance.md).
//
// 32 sessions of 8 turns, gpt-oss's kinds of attention (full, window 128, blocks of 16): every turn brings the whole history, a
// lookup, a prefill in chunks, 128 decode steps for all together, and the end of the turn.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kvcache_core.h"

namespace {

constexpr int64_t kSessions = 32, kTurns = 8, kFirst = 4096, kMore = 2048, kOutput = 128, kChunk = 8192;

void check(int32_t status) {
    if (status == KVC_OK) return;
    std::fprintf(stderr, "%s\n", status == KVC_NO_SPACE ? "the arena is too small" : kvc_last_error());
    std::exit(1);
}

kvc_manager* new_manager() {
    kvc_group groups[2] = {};
    groups[0].kind = KVC_FULL;
    groups[1].kind = KVC_SPAN;
    groups[1].lead_tokens = 127;
    for (kvc_group& group : groups) {
        group.block_tokens = 16;
        group.chunk_tokens = 1;
    }
    const int32_t pages_per_slab = 1;
    kvc_config config{};
    config.n_groups = 2;
    config.n_classes = 1;
    config.pages_per_slab = &pages_per_slab;
    config.slabs = 200'000;
    config.hash_unit_tokens = config.grid_tokens = 16;
    config.max_open_steps = 2;
    config.history_tokens = int64_t{1} << 20;
    kvc_manager* manager = nullptr;
    check(kvc_manager_new(&config, groups, &manager));
    return manager;
}

struct Session {
    std::vector<int32_t> text;
    int64_t handle = 0;
};

void prefill(kvc_manager* manager, Session& session, uint64_t name) {
    const auto n = static_cast<int64_t>(session.text.size());
    const uint8_t root[32] = {1};
    const int64_t intervals[2] = {}, positions[1] = {(n - 1) / 16 * 16};
    const uint8_t declared[1] = {};
    kvc_open_args args{};
    args.root = root;
    args.tokens = session.text.data();
    args.n_tokens = n;
    args.max_tokens = n + kOutput;
    args.session = name;
    args.intervals = intervals;
    args.positions = positions;
    args.declared = declared;
    args.n_positions = 1;
    check(kvc_open(manager, &args, &session.handle));
    kvc_hit hit{};
    check(kvc_lookup(manager, session.handle, nullptr, nullptr, &hit));
    for (int64_t at = hit.hit_tokens; at < n;) {
        int64_t step = 0;
        kvc_grant grant{};
        check(kvc_begin_step(manager, &step));
        check(kvc_allocate(manager, session.handle, std::min(kChunk, n - at), 0, &grant));
        check(kvc_commit(manager, session.handle, grant.end));
        check(kvc_end_step(manager, step));
        at = grant.end;
    }
}

}  // namespace

int main() {
    kvc_manager* manager = new_manager();
    std::mt19937 random(1);
    std::vector<Session> sessions(kSessions);
    auto say = [&](Session& session, int64_t n) {
        for (int64_t i = 0; i < n; ++i) session.text.push_back(static_cast<int32_t>(random() % 150'000));
    };
    for (int64_t turn = 0; turn < kTurns; ++turn) {
        std::vector<int64_t> handles, one(kSessions, 1);
        for (int64_t s = 0; s < kSessions; ++s) {
            say(sessions[static_cast<size_t>(s)], turn ? kMore : kFirst);
            prefill(manager, sessions[static_cast<size_t>(s)], static_cast<uint64_t>(s) + 1);
            handles.push_back(sessions[static_cast<size_t>(s)].handle);
        }
        std::vector<int32_t> sampled(kSessions);
        std::vector<kvc_grant> grants(kSessions);
        for (int64_t token = 0; token < kOutput; ++token) {
            int64_t step = 0, done = 0;
            for (size_t s = 0; s < sessions.size(); ++s) {
                say(sessions[s], 1);
                sampled[s] = sessions[s].text.back();
            }
            check(kvc_extend_many(manager, handles.data(), sampled.data(), kSessions, nullptr, kSessions, &done));
            check(kvc_begin_step(manager, &step));
            check(kvc_allocate_many(manager, handles.data(), one.data(), nullptr, 1, kSessions, grants.data(), &done));
            check(kvc_end_step(manager, step));
        }
        for (const int64_t handle : handles) check(kvc_finish(manager, handle));
    }
    kvc_manager_free(manager);
    std::printf("%lld sessions, %lld turns\n", static_cast<long long>(kSessions), static_cast<long long>(kTurns));
}
