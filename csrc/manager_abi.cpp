// The kvc_* functions of the block manager: one thread at a time, exceptions kept inside, then Manager.
#include "error.h"
#include "exclusive.h"
#include "manager.h"

struct kvc_manager {
    kvc::Manager manager;
    kvc::Exclusive exclusive;
};

namespace {

using kvc::fail;

template <typename Body>
int32_t enter(kvc_manager* manager, Body&& body) {
    if (!manager) return fail(KVC_E_ARGUMENT, "manager is NULL");
    return kvc::exclusively(manager->exclusive, "manager", [&] { return body(manager->manager); });
}

int32_t check_config(const kvc_config& config, const kvc_group* groups) {
    if (config.n_groups < 1 || config.hash_unit_tokens < 1 || config.grid_tokens < 1 || config.max_open_steps < 1)
        return fail(KVC_E_ARGUMENT, "groups, hash unit, grid and open steps must all be above 0");
    if (config.grid_tokens % config.hash_unit_tokens)
        return fail(KVC_E_ARGUMENT, "the grid of %d tokens is no multiple of the hash unit of %d", config.grid_tokens,
                    config.hash_unit_tokens);
    for (int32_t g = 0; g < config.n_groups; ++g) {
        const kvc_group& group = groups[g];
        if (group.kind != KVC_FULL && group.kind != KVC_RECURRENT)
            return fail(KVC_E_ARGUMENT, "group %d has unknown kind %d", g, group.kind);
        if (group.block_tokens < 1 || group.block_tokens % config.hash_unit_tokens ||
            config.grid_tokens % group.block_tokens)
            return fail(KVC_E_ARGUMENT, "group %d has blocks of %d tokens: not between hash unit %d and grid %d", g,
                        group.block_tokens, config.hash_unit_tokens, config.grid_tokens);
        if (group.pages < 1 || group.pages > kvc::kUnlimitedPages)
            return fail(KVC_E_ARGUMENT, "group %d has %lld pages: 1 to %lld are possible", g,
                        static_cast<long long>(group.pages), static_cast<long long>(kvc::kUnlimitedPages));
    }
    return KVC_OK;
}

}  // namespace

extern "C" {

int32_t kvc_manager_new(const kvc_config* config, const kvc_group* groups, kvc_manager** out) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = check_config(*config, groups)) return status;
        *out = new kvc_manager{kvc::Manager(*config, groups), {}};
        return KVC_OK;
    });
}

void kvc_manager_free(kvc_manager* manager) { delete manager; }

int32_t kvc_open(kvc_manager* manager, const kvc_open_args* args, int64_t* handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.open(*args, handle); });
}

int32_t kvc_extend(kvc_manager* manager, int64_t handle, const int32_t* tokens, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) { return m.extend(handle, tokens, n); });
}

int32_t kvc_retain(kvc_manager* manager, int64_t handle, int64_t interval, const int64_t* positions,
                   const uint8_t* kept, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) { return m.retain(handle, interval, positions, kept, n); });
}

int32_t kvc_stops(kvc_manager* manager, int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap,
                  int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) { return m.stops(handle, start, end, positions, cap, n); });
}

int32_t kvc_lookup(kvc_manager* manager, int64_t handle, const uint8_t* const* present, const int64_t* n_present,
                   kvc_hit* out) {
    return enter(manager, [&](kvc::Manager& m) { return m.lookup(handle, present, n_present, out); });
}

int32_t kvc_need(kvc_manager* manager, int64_t handle, int64_t n_tokens, int64_t* pages) {
    return enter(manager, [&](kvc::Manager& m) { return m.need(handle, n_tokens, pages); });
}

int32_t kvc_allocate(kvc_manager* manager, int64_t handle, int64_t n_tokens, kvc_grant* out) {
    return enter(manager, [&](kvc::Manager& m) { return m.allocate(handle, n_tokens, out); });
}

int32_t kvc_begin_step(kvc_manager* manager, int64_t* step) {
    return enter(manager, [&](kvc::Manager& m) { return m.begin_step(step); });
}

int32_t kvc_commit(kvc_manager* manager, int64_t handle, int64_t upto) {
    return enter(manager, [&](kvc::Manager& m) { return m.commit(handle, upto); });
}

int32_t kvc_end_step(kvc_manager* manager, int64_t step) {
    return enter(manager, [&](kvc::Manager& m) { return m.end_step(step); });
}

int32_t kvc_finish(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.close(handle); });
}

int32_t kvc_preempt(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.preempt(handle); });
}

int32_t kvc_abort(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.close(handle); });
}

int32_t kvc_info(kvc_manager* manager, int64_t handle, kvc_request_info* out) {
    return enter(manager, [&](kvc::Manager& m) { return m.info(handle, out); });
}

int32_t kvc_digests(kvc_manager* manager, int64_t handle, const uint8_t** digests, int64_t* n_units) {
    return enter(manager, [&](kvc::Manager& m) { return m.digests(handle, digests, n_units); });
}

int32_t kvc_table(kvc_manager* manager, int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap,
                  int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) { return m.table(handle, group, first, pages, cap, n); });
}

int32_t kvc_state_plan(kvc_manager* manager, int64_t handle, int32_t group, int32_t* source, int64_t* positions,
                       int32_t* pages, int64_t cap, int64_t* n) {
    return enter(manager,
                 [&](kvc::Manager& m) { return m.state_plan(handle, group, source, positions, pages, cap, n); });
}

int32_t kvc_load_items(kvc_manager* manager, int64_t load, kvc_keyed* items, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) { return m.load_items(load, items, cap, n); });
}

int32_t kvc_end_load(kvc_manager* manager, int64_t load, const uint8_t* ok, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) { return m.end_load(load, ok, n); });
}

int32_t kvc_abandon_load(kvc_manager* manager, int64_t load) {
    return enter(manager, [&](kvc::Manager& m) { return m.abandon_load(load); });
}

int32_t kvc_take_keyed(kvc_manager* manager, kvc_keyed* items, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) { return m.take_keyed(items, cap, n); });
}

int32_t kvc_pin(kvc_manager* manager, const kvc_keyed* items, int64_t n, uint8_t* pinned) {
    return enter(manager, [&](kvc::Manager& m) { return m.pin(items, n, pinned); });
}

int32_t kvc_unpin(kvc_manager* manager, int32_t group, const int32_t* pages, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) { return m.unpin(group, pages, n); });
}

int32_t kvc_manager_get_stats(kvc_manager* manager, kvc_manager_stats* out) {
    return enter(manager, [&](kvc::Manager& m) { return m.stats(out); });
}

int32_t kvc_group_stats(kvc_manager* manager, int32_t group, kvc_pool_stats* out) {
    return enter(manager, [&](kvc::Manager& m) { return m.group_stats(group, out); });
}

int32_t kvc_has_key(kvc_manager* manager, int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page) {
    return enter(manager, [&](kvc::Manager& m) { return m.has_key(group, ns, digest, page); });
}

int32_t kvc_clear(kvc_manager* manager) {
    return enter(manager, [&](kvc::Manager& m) { return m.clear(); });
}

int32_t kvc_check(kvc_manager* manager) {
    return enter(manager, [&](kvc::Manager& m) { return m.check(); });
}
}
