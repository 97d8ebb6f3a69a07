// The kvc_* functions of the block manager: addresses and counts checked, one thread at a time, exceptions kept inside.
#include <algorithm>

#include "config.h"
#include "error.h"
#include "exclusive.h"
#include "manager.h"

struct kvc_manager {
    kvc::Manager manager;
    kvc::Exclusive exclusive;
};

namespace {

using kvc::check_array;
using kvc::fail;
using kvc::not_null;

template <typename Body>
int32_t enter(kvc_manager* manager, Body&& body) {
    if (!manager) return fail(KVC_E_ARGUMENT, "manager is NULL");
    return kvc::exclusively(manager->exclusive, "manager", [&] { return body(manager->manager); });
}

// Of a batch: nothing is done yet.
int32_t start_batch(const int64_t* handles, int64_t n, int64_t* done) {
    if (const auto status = not_null("done", done)) return status;
    *done = 0;
    return check_array("handles", handles, n);
}

// Calls body(0) to body(n - 1), up to the first that is not KVC_OK, and fetch(i) a few before: since the last step everything
// else may have gone through the caches.
template <typename Fetch, typename Body>
int32_t one_by_one(int64_t n, int64_t* done, Fetch&& fetch, Body&& body) {
    constexpr int64_t kAhead = 4;
    for (int64_t i = 0; i < std::min(n, kAhead); ++i) fetch(i);
    for (; *done < n; ++*done) {
        if (*done + kAhead < n) fetch(*done + kAhead);
        if (const auto status = body(*done)) return status;
    }
    return KVC_OK;
}

}  // namespace

extern "C" {

int32_t kvc_manager_new(const kvc_config* config, const kvc_group* groups, kvc_manager** out) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = not_null("config", config, "groups", groups, "out", out)) return status;
        if (const auto status = kvc::check_config(*config, groups)) return status;
        *out = new kvc_manager{{*config, groups}, {}};
        return KVC_OK;
    });
}

void kvc_manager_free(kvc_manager* manager) { delete manager; }

int32_t kvc_open(kvc_manager* manager, const kvc_open_args* args, int64_t* handle) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("args", args, "handle", handle)) return status;
        if (args->intervals) {
            if (const auto status = check_array("positions", args->positions, args->n_positions)) return status;
            if (const auto status = check_array("declared", args->declared, args->n_positions)) return status;
        }
        return m.open(*args, handle);
    });
}

int32_t kvc_extend(kvc_manager* manager, int64_t handle, const int32_t* tokens, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) { return m.extend(handle, tokens, n); });
}

int32_t kvc_retain(kvc_manager* manager, int64_t handle, const int64_t* intervals, const int64_t* positions,
                   const uint8_t* declared, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("intervals", intervals)) return status;
        if (const auto status = check_array("positions", positions, n)) return status;
        if (const auto status = check_array("declared", declared, n)) return status;
        return m.retain(handle, intervals, positions, declared, n);
    });
}

int32_t kvc_stops(kvc_manager* manager, int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap,
                  int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("positions", positions, cap)) return status;
        return m.stops(handle, start, end, positions, cap, n);
    });
}

int32_t kvc_lookup(kvc_manager* manager, int64_t handle, const uint8_t* const* present, const int64_t* n_present,
                   kvc_hit* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.lookup(handle, present, n_present, out);
    });
}

int32_t kvc_explain(kvc_manager* manager, int64_t handle, const uint8_t* const* elsewhere, const int64_t* n_elsewhere,
                    kvc_explained* out, kvc_loss* losses, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("out", out, "n", n)) return status;
        if (const auto status = check_array("losses", losses, cap)) return status;
        return m.explain(handle, elsewhere, n_elsewhere, out, losses, cap, n);
    });
}

int32_t kvc_need(kvc_manager* manager, int64_t handle, int64_t n_tokens, int64_t n_drafts, int64_t* pages) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("pages", pages);
        return status ? status : m.need(handle, n_tokens, n_drafts, pages);
    });
}

int32_t kvc_allocate(kvc_manager* manager, int64_t handle, int64_t n_tokens, int64_t n_drafts, kvc_grant* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.allocate(handle, n_tokens, n_drafts, out);
    });
}

int32_t kvc_blockage(kvc_manager* manager, int64_t handle, int32_t* reason) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("reason", reason);
        return status ? status : m.blockage(handle, reason);
    });
}

int32_t kvc_begin_step(kvc_manager* manager, int64_t* step) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("step", step);
        return status ? status : m.begin_step(step);
    });
}

int32_t kvc_commit(kvc_manager* manager, int64_t handle, int64_t upto) {
    return enter(manager, [&](kvc::Manager& m) { return m.commit(handle, upto); });
}

int32_t kvc_end_step(kvc_manager* manager, int64_t step) {
    return enter(manager, [&](kvc::Manager& m) { return m.end_step(step); });
}

int32_t kvc_allocate_many(kvc_manager* manager, const int64_t* handles, const int64_t* n_tokens,
                          const int64_t* n_drafts, int32_t commit, int64_t n, kvc_grant* out, int64_t* done) {
    return enter(manager, [&](kvc::Manager& m) -> int32_t {
        if (const auto status = start_batch(handles, n, done)) return status;
        if (const auto status = check_array("n_tokens", n_tokens, n)) return status;
        if (const auto status = check_array("out", out, n)) return status;
        const auto fetch = [&](int64_t i) { m.prefetch(handles[i]); };
        if (!commit)
            return one_by_one(n, done, fetch, [&](int64_t i) {
                return m.allocate(handles[i], n_tokens[i], n_drafts ? n_drafts[i] : 0, &out[i]);
            });
        if (n_drafts) return fail(KVC_E_ARGUMENT, "drafts are committed once it is known which of them are right");
        if (const auto status = n ? m.check_in_step() : KVC_OK) return status;
        return one_by_one(n, done, fetch, [&](int64_t i) {
            const auto status = m.allocate(handles[i], n_tokens[i], 0, &out[i]);
            return status || out[i].end == out[i].start ? status : m.commit(handles[i], out[i].end);
        });
    });
}

int32_t kvc_commit_many(kvc_manager* manager, const int64_t* handles, const int64_t* upto, int64_t n, int64_t* done) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = start_batch(handles, n, done)) return status;
        if (const auto status = check_array("upto", upto, n)) return status;
        const auto fetch = [&](int64_t i) { m.prefetch(handles[i]); };
        return one_by_one(n, done, fetch, [&](int64_t i) { return m.commit(handles[i], upto[i]); });
    });
}

int32_t kvc_extend_many(kvc_manager* manager, const int64_t* handles, const int32_t* tokens, int64_t n_tokens,
                        const int64_t* counts, int64_t n, int64_t* done) {
    return enter(manager, [&](kvc::Manager& m) -> int32_t {
        if (const auto status = start_batch(handles, n, done)) return status;
        if (const auto status = check_array("tokens", tokens, n_tokens)) return status;
        int64_t left = n_tokens;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t count = counts ? counts[i] : 1;
            if (count < 0 || count > left)
                return fail(KVC_E_ARGUMENT, "%lld tokens for request %lld of %lld, %lld are left",
                            static_cast<long long>(count), static_cast<long long>(i), static_cast<long long>(n),
                            static_cast<long long>(left));
            left -= count;
        }
        if (left) return fail(KVC_E_ARGUMENT, "%lld tokens more than the requests get", static_cast<long long>(left));
        const auto fetch = [&](int64_t i) { m.prefetch_tokens(handles[i]); };
        return one_by_one(n, done, fetch, [&](int64_t i) {
            const int64_t count = counts ? counts[i] : 1;
            const int32_t* const own = tokens;
            tokens += count;
            return m.extend(handles[i], own, count);
        });
    });
}

int32_t kvc_finish(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.close(handle, false); });
}

int32_t kvc_preempt(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.preempt(handle); });
}

int32_t kvc_abort(kvc_manager* manager, int64_t handle) {
    return enter(manager, [&](kvc::Manager& m) { return m.close(handle, true); });
}

int32_t kvc_info(kvc_manager* manager, int64_t handle, kvc_request_info* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.info(handle, out);
    });
}

int32_t kvc_digests(kvc_manager* manager, int64_t handle, int64_t first, uint8_t* digests, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("digests", digests, cap)) return status;
        return m.digests(handle, first, digests, cap, n);
    });
}

int32_t kvc_table(kvc_manager* manager, int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap,
                  int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("pages", pages, cap)) return status;
        return m.table(handle, group, first, pages, cap, n);
    });
}

int32_t kvc_state_plan(kvc_manager* manager, int64_t handle, int32_t group, int32_t* source, int64_t* positions,
                       int32_t* pages, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("source", source, "n", n)) return status;
        if (const auto status = check_array("positions", positions, cap)) return status;
        if (const auto status = check_array("pages", pages, cap)) return status;
        return m.state_plan(handle, group, source, positions, pages, cap, n);
    });
}

int32_t kvc_holes(kvc_manager* manager, int64_t handle, int32_t group, int64_t* blocks, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("blocks", blocks, cap)) return status;
        return m.holes(handle, group, blocks, cap, n);
    });
}

int32_t kvc_take_moves(kvc_manager* manager, kvc_move* moves, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("moves", moves, cap)) return status;
        return m.take_moves(moves, cap, n);
    });
}

int32_t kvc_load_items(kvc_manager* manager, int64_t load, kvc_keyed* items, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("items", items, cap)) return status;
        return m.load_items(load, items, cap, n);
    });
}

int32_t kvc_end_load(kvc_manager* manager, int64_t load, const uint8_t* ok, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = check_array("ok", ok, n);
        return status ? status : m.end_load(load, ok, n);
    });
}

int32_t kvc_abandon_load(kvc_manager* manager, int64_t load) {
    return enter(manager, [&](kvc::Manager& m) { return m.abandon_load(load); });
}

int32_t kvc_take_keyed(kvc_manager* manager, kvc_keyed* items, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("items", items, cap)) return status;
        return m.take_keyed(items, cap, n);
    });
}

int32_t kvc_next_evicted(kvc_manager* manager, int64_t slabs, kvc_keyed* items, int64_t cap, int64_t* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("n", n)) return status;
        if (const auto status = check_array("items", items, cap)) return status;
        return m.next_evicted(slabs, items, cap, n);
    });
}

int32_t kvc_pin(kvc_manager* manager, kvc_keyed* items, int64_t n, uint8_t* pinned) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = check_array("items", items, n)) return status;
        if (const auto status = check_array("pinned", pinned, n)) return status;
        return m.pin(items, n, pinned);
    });
}

int32_t kvc_unpin(kvc_manager* manager, int32_t group, const int32_t* pages, int64_t n) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = check_array("pages", pages, n);
        return status ? status : m.unpin(group, pages, n);
    });
}

int32_t kvc_take_events(kvc_manager* manager, const kvc_event_counts* cap, kvc_event_run* runs, uint8_t* keys,
                        int32_t* tokens, kvc_event_counts* n) {
    return enter(manager, [&](kvc::Manager& m) {
        if (const auto status = not_null("cap", cap, "n", n)) return status;
        if (const auto status = check_array("runs", runs, cap->runs)) return status;
        if (const auto status = check_array("keys", keys, cap->keys)) return status;
        const auto status = check_array("tokens", tokens, cap->tokens);
        return status ? status : m.take_events(*cap, runs, keys, tokens, n);
    });
}

int32_t kvc_manager_get_stats(kvc_manager* manager, kvc_manager_stats* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.stats(out);
    });
}

int32_t kvc_get_arena_stats(kvc_manager* manager, kvc_arena_stats* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.arena_stats(out);
    });
}

int32_t kvc_get_class_stats(kvc_manager* manager, int32_t size_class, kvc_class_stats* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.class_stats(size_class, out);
    });
}

int32_t kvc_get_group_stats(kvc_manager* manager, int32_t group, kvc_group_stats* out) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("out", out);
        return status ? status : m.group_stats(group, out);
    });
}

int32_t kvc_has_key(kvc_manager* manager, int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("digest", digest, "page", page);
        return status ? status : m.has_key(group, ns, digest, page);
    });
}

int32_t kvc_namespace_use(kvc_manager* manager, uint32_t ns, int64_t* uses) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = not_null("uses", uses);
        return status ? status : m.namespace_use(ns, uses);
    });
}

int32_t kvc_clear(kvc_manager* manager, int32_t retire) {
    return enter(manager, [&](kvc::Manager& m) { return m.clear(retire != 0); });
}

int32_t kvc_clear_namespaces(kvc_manager* manager, const uint32_t* ns, int64_t n, int32_t retire) {
    return enter(manager, [&](kvc::Manager& m) {
        const auto status = check_array("ns", ns, n);
        return status ? status : m.clear_namespaces(ns, n, retire != 0);
    });
}

int32_t kvc_check(kvc_manager* manager) {
    return enter(manager, [&](kvc::Manager& m) { return m.check(); });
}
}
