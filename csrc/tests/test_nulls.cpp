// test_nulls: what each kvc_* function says to NULL. Each call runs in a process of its own: all that crash are named at once.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "fuzz_setup.h"

namespace {

using Call = std::function<int32_t()>;
struct Case {
    const char* name;
    int32_t expected;
    Call call;
};

// A manager with one request that has pages, in an open step.
struct Rig {
    kvc_manager *manager = nullptr, *other = nullptr;
    kvc_pool* pool = nullptr;
    int64_t handle = 0, step = 0, waiting = 0;
    int32_t page = 0;
    int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint8_t digest[32] = {};
    fuzz::Setup setup = fuzz::full_setup();
    kvc_config config = setup.config;

    Rig() {
        config.pages_per_slab = setup.pages_per_slab.data();
        kvc_open_args args{};
        args.root = digest;
        args.tokens = tokens;
        args.n_tokens = args.max_tokens = 8;
        kvc_grant grant{};
        int64_t taken = 0;
        kvc_hit hit{};
        const int32_t statuses[] = {
            setup.make(&manager),
            kvc_open(manager, &args, &handle),
            kvc_open(manager, &args, &waiting),
            kvc_lookup(manager, handle, nullptr, nullptr, &hit),
            kvc_allocate(manager, handle, 8, 0, &grant),
            kvc_begin_step(manager, &step),
            kvc_commit(manager, handle, 8),
            kvc_pool_new(8, 0, &pool),
            kvc_pool_take(pool, 1, &page, &taken),
        };
        for (const int32_t status : statuses)
            if (status) {
                std::fprintf(stderr, "the rig cannot be set up: %s\n", kvc_last_error());
                std::_Exit(1);
            }
    }
    ~Rig() {
        kvc_manager_free(manager);
        kvc_pool_free(pool);
    }
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;
};

constexpr int32_t kBad = KVC_E_ARGUMENT;
constexpr std::nullptr_t no = nullptr;
const int64_t interval = 0;
const int64_t one_token = 1;
int64_t number = 0;
kvc_grant grant{};
kvc_explained explained{};
int32_t pages[8];
uint8_t bytes[32];
const kvc_event_counts zero{}, one{1, 1, 1};
kvc_event_counts counts;

std::vector<Case> owner_cases(Rig& r) {
    return {
        {"kvc_manager_free", KVC_OK, [] { return kvc_manager_free(no), KVC_OK; }},
        {"kvc_pool_free", KVC_OK, [] { return kvc_pool_free(no), KVC_OK; }},
        {"kvc_pool_version", KVC_OK, [] { return static_cast<int32_t>(kvc_pool_version(no)); }},
        {"kvc_pool_check", kBad, [] { return kvc_pool_check(no); }},
        {"kvc_pool_new, out", kBad, [] { return kvc_pool_new(1, 0, no); }},
        {"kvc_manager_new, config", kBad, [&] { return kvc_manager_new(no, r.setup.groups.data(), &r.other); }},
        {"kvc_manager_new, groups", kBad, [&] { return kvc_manager_new(&r.config, no, &r.other); }},
        {"kvc_manager_new, pages_per_slab", kBad,
         [&] { return kvc_manager_new(&r.setup.config, r.setup.groups.data(), &r.other); }},
        {"kvc_manager_new, out", kBad, [&] { return kvc_manager_new(&r.config, r.setup.groups.data(), no); }},
        {"kvc_check", kBad, [] { return kvc_check(no); }},
        {"kvc_clear", kBad, [] { return kvc_clear(no, 0); }},
    };
}

// `which` of segments, src, dst and a base is NULL; 4: all, and there is nothing to copy.
const kvc_copy_plan* copies_without(int which) {
    static kvc_segment segment;
    static int32_t page;
    static kvc_copy_plan plan;
    const auto given = [which](int part, auto* pointer) { return which == part || which == 4 ? no : pointer; };
    segment = {0, 8, 8, 8, 8, 1, 1};
    plan = {given(0, &segment), given(1, &page), given(2, &page), which != 4, which != 4};
    return &plan;
}

// `which` of queries, out, the pages, tables, begin and end is NULL; 6: all, and there is no row.
int32_t attend_without(int which) {
    static float numbers[64];
    static const int32_t table = 0;
    static const int64_t begin = 0, end = 1;
    const auto given = [which](int part, auto* pointer) { return which == part || which == 6 ? no : pointer; };
    kvc_attention d{};
    d.queries = given(0, numbers + 32), d.out = given(1, numbers + 48), d.tables = given(3, &table);
    d.base = reinterpret_cast<uint64_t>(given(2, numbers)), d.begin = given(4, &begin), d.end = given(5, &end);
    d.query_stride = d.value_offset = d.head_dim = 16, d.page_stride = 128, d.rows = which != 6;
    d.scale = d.table_stride = d.pages = d.kv_heads = d.group = d.block_tokens = 1;
    return kvc_attend(&d, 1);
}

std::vector<Case> hash_and_copy_cases(Rig& r) {
    return {
        {"kvc_sha256, data", kBad, [&] { return kvc_sha256(0, no, 1, r.digest); }},
        {"kvc_sha256, no data", KVC_OK, [&] { return kvc_sha256(0, no, 0, r.digest); }},
        {"kvc_sha256, digest", kBad, [&] { return kvc_sha256(0, r.digest, 1, no); }},
        {"kvc_hash_chain, parent", kBad, [&] { return kvc_hash_chain(0, no, r.tokens, 1, 4, r.digest); }},
        {"kvc_hash_chain, tokens", kBad, [&] { return kvc_hash_chain(0, r.digest, no, 1, 4, r.digest); }},
        {"kvc_hash_chain, digests", kBad, [&] { return kvc_hash_chain(0, r.digest, r.tokens, 1, 4, no); }},
        {"kvc_hash_chain, no blocks", KVC_OK, [&] { return kvc_hash_chain(0, r.digest, no, 0, 4, no); }},
        {"kvc_attend, attention", kBad, [&] { return kvc_attend(no, 1); }},
        {"kvc_attend, queries", kBad, [&] { return attend_without(0); }},
        {"kvc_attend, out", kBad, [&] { return attend_without(1); }},
        {"kvc_attend, pages", kBad, [&] { return attend_without(2); }},
        {"kvc_attend, tables", kBad, [&] { return attend_without(3); }},
        {"kvc_attend, begin", kBad, [&] { return attend_without(4); }},
        {"kvc_attend, end", kBad, [&] { return attend_without(5); }},
        {"kvc_attend, nothing", KVC_OK, [&] { return attend_without(6); }},
        {"kvc_attend, all given", KVC_OK, [&] { return attend_without(7); }},
        {"kvc_copy, plan", kBad, [&] { return kvc_copy(no, 1); }},
        {"kvc_copy, segments", kBad, [&] { return kvc_copy(copies_without(0), 1); }},
        {"kvc_copy, src", kBad, [&] { return kvc_copy(copies_without(1), 1); }},
        {"kvc_copy, dst", kBad, [&] { return kvc_copy(copies_without(2), 1); }},
        {"kvc_copy, a base", kBad, [&] { return kvc_copy(copies_without(3), 1); }},
        {"kvc_copy, nothing", KVC_OK, [] { return kvc_copy(copies_without(4), 1); }},
        {"kvc_copy_ranges, plan", kBad, [&] { return kvc_copy_ranges(no, no, 0, &number); }},
        {"kvc_copy_ranges, segments", kBad, [&] { return kvc_copy_ranges(copies_without(0), no, 0, &number); }},
        {"kvc_copy_ranges, ranges", kBad, [&] { return kvc_copy_ranges(copies_without(4), no, 1, &number); }},
        {"kvc_copy_ranges, n", kBad, [&] { return kvc_copy_ranges(copies_without(4), no, 0, no); }},
        {"kvc_copy_ranges, nothing", KVC_OK, [&] { return kvc_copy_ranges(copies_without(4), no, 0, &number); }},
        {"kvc_checksum, data", kBad, [&] { return kvc_checksum(no, 300, r.digest); }},
        {"kvc_checksum, digest", kBad, [&] { return kvc_checksum(bytes, 300, no); }},
    };
}

// `which` of the arguments is NULL; 8: none that matters, as there are no pages.
int32_t files_without(int which, bool write) {
    static kvc_page_files files{-1, 0, 0, 1, 300, 8, 8};
    static const uint64_t at = 1;
    static const int64_t when = 0;
    static int32_t outcome;
    const auto given = [which](int argument, auto* pointer) { return which == argument || which == 8 ? no : pointer; };
    const kvc_page_files* const how = which == 0 ? no : &files;
    const int64_t n = which == 8 ? 0 : 1;
    if (write)
        return kvc_page_files_write(how, which == 1 ? no : "way", given(2, "a\0\0\0\0\0\0"), given(3, bytes),
                                    given(4, &at), given(5, &when), n, given(6, &outcome));
    return kvc_page_files_read(how, given(2, "a\0\0\0\0\0\0"), given(3, bytes), given(4, &at), given(5, &when), n,
                               given(6, &outcome));
}

std::vector<Case> file_cases() {
    std::vector<Case> cases{
        {"kvc_page_files_write, no pages", KVC_OK, [] { return files_without(8, true); }},
        {"kvc_page_files_read, no pages", KVC_OK, [] { return files_without(8, false); }},
        {"kvc_page_files_remove, files", kBad, [] { return kvc_page_files_remove(no, no, 0, no); }},
    };
    for (const int which : {0, 1, 2, 3, 4, 5, 6}) {
        cases.push_back({"kvc_page_files_write", kBad, [which] { return files_without(which, true); }});
        if (which != 1) cases.push_back({"kvc_page_files_read", kBad, [which] { return files_without(which, false); }});
    }
    return cases;
}

std::vector<Case> pool_cases(Rig& r) {
    return {
        {"kvc_pool_present, digests", kBad, [&] { return kvc_pool_present(r.pool, 0, no, 32, 1, r.digest); }},
        {"kvc_pool_present, present", kBad, [&] { return kvc_pool_present(r.pool, 0, r.digest, 32, 1, no); }},
        {"kvc_pool_acquire, digests", kBad, [&] { return kvc_pool_acquire(r.pool, 0, no, 32, 1, pages); }},
        {"kvc_pool_acquire, pages", kBad, [&] { return kvc_pool_acquire(r.pool, 0, r.digest, 32, 1, no); }},
        {"kvc_pool_take, pages", kBad, [&] { return kvc_pool_take(r.pool, 1, no, &number); }},
        {"kvc_pool_take, taken", kBad, [&] { return kvc_pool_take(r.pool, 1, pages, no); }},
        {"kvc_pool_publish, digests", kBad, [&] { return kvc_pool_publish(r.pool, 0, no, &r.page, 1, r.digest); }},
        {"kvc_pool_publish, pages", kBad, [&] { return kvc_pool_publish(r.pool, 0, r.digest, no, 1, r.digest); }},
        {"kvc_pool_publish, out", kBad, [&] { return kvc_pool_publish(r.pool, 0, r.digest, &r.page, 1, no); }},
        {"kvc_pool_release", kBad, [&] { return kvc_pool_release(r.pool, no, 1); }},
        {"kvc_pool_release, none", KVC_OK, [&] { return kvc_pool_release(r.pool, no, 0); }},
        {"kvc_pool_get_stats", kBad, [&] { return kvc_pool_get_stats(r.pool, no); }},
    };
}

std::vector<Case> shared_cases(Rig& r) {
    static const int64_t eight = 8;
    static int32_t error;
    return {
        {"kvc_shared_layout, slots", kBad, [&] { return kvc_shared_layout(1, no, &eight, &number, &number); }},
        {"kvc_shared_layout, pages_at", kBad, [&] { return kvc_shared_layout(1, &eight, &eight, no, &number); }},
        {"kvc_shared_layout, bytes", kBad, [&] { return kvc_shared_layout(1, &eight, &eight, &number, no); }},
        {"kvc_shared_format, base", kBad, [&] { return kvc_shared_format(no, 8192, 1, &eight, &eight, r.digest, 0); }},
        {"kvc_shared_new, base", kBad, [&] { return kvc_shared_new(no, 8192, 1, &eight, &eight, r.digest, 0, no); }},
        {"kvc_shared_present", kBad, [&] { return kvc_shared_present(no, 0, bytes, bytes, 32, 1, r.digest); }},
        {"kvc_shared_acquire", kBad, [&] { return kvc_shared_acquire(no, 0, bytes, bytes, 32, 1, pages); }},
        {"kvc_shared_take", kBad, [&] { return kvc_shared_take(no, 0, 1, pages, &number); }},
        {"kvc_shared_publish", kBad, [&] { return kvc_shared_publish(no, 0, bytes, bytes, pages, 1, r.digest); }},
        {"kvc_shared_unpublish", kBad, [&] { return kvc_shared_unpublish(no, 0, 0); }},
        {"kvc_shared_release", kBad, [&] { return kvc_shared_release(no, 0, pages, 1); }},
        {"kvc_shared_version", kBad, [&] { return kvc_shared_version(no, 0, no); }},
        {"kvc_shared_get_stats", kBad, [&] { return kvc_shared_get_stats(no, 0, no); }},
        {"kvc_shared_check", kBad, [&] { return kvc_shared_check(no, 0); }},
        {"kvc_shared_detach", kBad, [&] { return kvc_shared_detach(no); }},
        {"kvc_shared_forget", kBad, [&] { return kvc_shared_forget(no, 0); }},
        {"kvc_shared_store", kBad, [&] { return kvc_shared_store(no, 0, no, pages, bytes, 1, 1); }},
        {"kvc_shared_load", kBad, [&] { return kvc_shared_load(no, 0, no, pages, bytes, 1, 1, r.digest); }},
        {"kvc_memory_populate", kBad, [&] { return kvc_memory_populate(0, 1, &error); }},
        {"kvc_memory_populate, error", kBad, [&] { return kvc_memory_populate(4096, 0, no); }},
        {"kvc_memory_prefer_node", kBad, [&] { return kvc_memory_prefer_node(0, 1, 0, &error); }},
        {"kvc_memory_lock", kBad, [&] { return kvc_memory_lock(0, 1, &error); }},
    };
}

std::vector<Case> request_cases(Rig& r) {
    const auto open_without = [&r](int which) {
        kvc_open_args args{};
        args.root = which == 0 ? no : r.digest;
        args.tokens = which == 1 ? no : r.tokens;
        args.n_tokens = args.max_tokens = 8;
        if (which == 2) args.tokens = nullptr, args.n_digests = 8 / r.setup.config.hash_unit_tokens;
        return kvc_open(r.manager, &args, &number);
    };
    return {
        {"kvc_open, args", kBad, [&] { return kvc_open(r.manager, no, &number); }},
        {"kvc_open, root", kBad, [=] { return open_without(0); }},
        {"kvc_open, tokens", kBad, [=] { return open_without(1); }},
        {"kvc_open, digests", kBad, [=] { return open_without(2); }},
        {"kvc_open, handle", kBad,
         [&] {
             kvc_open_args args{};
             args.root = r.digest;
             args.tokens = r.tokens;
             args.n_tokens = args.max_tokens = 8;
             return kvc_open(r.manager, &args, no);
         }},
        {"kvc_extend, none", KVC_OK, [&] { return kvc_extend(r.manager, r.handle, no, 0); }},
        {"kvc_retain, intervals", kBad, [&] { return kvc_retain(r.manager, r.handle, no, no, no, 0); }},
        {"kvc_retain, positions", kBad, [&] { return kvc_retain(r.manager, r.handle, &interval, no, r.digest, 1); }},
        {"kvc_retain, kept", kBad,
         [&] {
             const int64_t position = r.setup.config.grid_tokens;
             return kvc_retain(r.manager, r.handle, &interval, &position, no, 1);
         }},
        {"kvc_retain, none", KVC_OK, [&] { return kvc_retain(r.manager, r.handle, &interval, no, no, 0); }},
        {"kvc_stops, n", kBad, [&] { return kvc_stops(r.manager, r.handle, 0, 8, no, 0, no); }},
        {"kvc_stops, no room", KVC_OK, [&] { return kvc_stops(r.manager, r.handle, 0, 8, no, 0, &number); }},
        {"kvc_lookup, out", kBad, [&] { return kvc_lookup(r.manager, r.waiting, no, no, no); }},
        {"kvc_lookup, counts", kBad,
         [&] {
             const uint8_t* present = r.digest;
             kvc_hit hit{};
             return kvc_lookup(r.manager, r.waiting, &present, no, &hit);
         }},
        {"kvc_explain, out", kBad, [&] { return kvc_explain(r.manager, r.handle, no, no, no, no, 0, &number); }},
        {"kvc_explain, n", kBad, [&] { return kvc_explain(r.manager, r.handle, no, no, &explained, no, 0, no); }},
        {"kvc_explain, losses", kBad,
         [&] { return kvc_explain(r.manager, r.handle, no, no, &explained, no, 1, &number); }},
        {"kvc_explain, counts", kBad,
         [&] {
             const uint8_t* held = no;
             return kvc_explain(r.manager, r.handle, &held, no, &explained, no, 0, &number);
         }},
        {"kvc_explain, elsewhere of a group", kBad,
         [&] {
             const uint8_t* held = no;
             return kvc_explain(r.manager, r.handle, &held, &one_token, &explained, no, 0, &number);
         }},
        {"kvc_explain, none wanted", KVC_OK,
         [&] { return kvc_explain(r.manager, r.handle, no, no, &explained, no, 0, &number); }},
        {"kvc_lookup, present of a group", kBad,
         [&] {
             const uint8_t* present = nullptr;
             const int64_t count = 1;
             kvc_hit hit{};
             return kvc_lookup(r.manager, r.waiting, &present, &count, &hit);
         }},
        {"kvc_need", kBad, [&] { return kvc_need(r.manager, r.waiting, 1, 0, no); }},
        {"kvc_allocate", kBad, [&] { return kvc_allocate(r.manager, r.waiting, 1, 0, no); }},
        {"kvc_begin_step", kBad, [&] { return kvc_begin_step(r.manager, no); }},
    };
}

std::vector<Case> batch_cases(Rig& r) {
    return {
        {"kvc_allocate_many, handles", kBad,
         [&] { return kvc_allocate_many(r.manager, no, &one_token, no, 0, 1, &grant, &number); }},
        {"kvc_allocate_many, n_tokens", kBad,
         [&] { return kvc_allocate_many(r.manager, &r.handle, no, no, 0, 1, &grant, &number); }},
        {"kvc_allocate_many, out", kBad,
         [&] { return kvc_allocate_many(r.manager, &r.handle, &one_token, no, 0, 1, no, &number); }},
        {"kvc_allocate_many, done", kBad,
         [&] { return kvc_allocate_many(r.manager, &r.handle, &one_token, no, 0, 1, &grant, no); }},
        {"kvc_allocate_many, none", KVC_OK,
         [&] { return kvc_allocate_many(r.manager, no, no, no, 1, 0, no, &number); }},
        {"kvc_commit_many, handles", kBad, [&] { return kvc_commit_many(r.manager, no, &one_token, 1, &number); }},
        {"kvc_commit_many, upto", kBad, [&] { return kvc_commit_many(r.manager, &r.handle, no, 1, &number); }},
        {"kvc_commit_many, done", kBad, [&] { return kvc_commit_many(r.manager, &r.handle, &one_token, 1, no); }},
        {"kvc_commit_many, none", KVC_OK, [&] { return kvc_commit_many(r.manager, no, no, 0, &number); }},
        {"kvc_extend_many, handles", kBad, [&] { return kvc_extend_many(r.manager, no, r.tokens, 1, no, 1, &number); }},
        {"kvc_extend_many, tokens", kBad, [&] { return kvc_extend_many(r.manager, &r.handle, no, 1, no, 1, &number); }},
        {"kvc_extend_many, done", kBad, [&] { return kvc_extend_many(r.manager, &r.handle, r.tokens, 1, no, 1, no); }},
        {"kvc_extend_many, no tokens", KVC_OK,
         [&] { return kvc_extend_many(r.manager, &r.handle, no, 0, &interval, 1, &number); }},
        {"kvc_extend_many, none", KVC_OK, [&] { return kvc_extend_many(r.manager, no, no, 0, no, 0, &number); }},
    };
}

std::vector<Case> reading_cases(Rig& r) {
    return {
        {"kvc_info", kBad, [&] { return kvc_info(r.manager, r.handle, no); }},
        {"kvc_digests, digests", kBad, [&] { return kvc_digests(r.manager, r.handle, 0, no, 1, &number); }},
        {"kvc_digests, no room", KVC_OK, [&] { return kvc_digests(r.manager, r.handle, 0, no, 0, &number); }},
        {"kvc_digests, n", kBad, [&] { return kvc_digests(r.manager, r.handle, 0, bytes, 1, no); }},
        {"kvc_table, n", kBad, [&] { return kvc_table(r.manager, r.handle, 0, 0, pages, 8, no); }},
        {"kvc_table, pages", kBad, [&] { return kvc_table(r.manager, r.handle, 0, 0, no, 8, &number); }},
        {"kvc_table, no room", KVC_OK, [&] { return kvc_table(r.manager, r.handle, 0, 0, no, 0, &number); }},
        {"kvc_load_items, n", kBad, [&] { return kvc_load_items(r.manager, 1, no, 0, no); }},
        {"kvc_take_keyed, n", kBad, [&] { return kvc_take_keyed(r.manager, no, 0, no); }},
        {"kvc_take_keyed, items", kBad,
         [&] {
             kvc_end_step(r.manager, r.step);
             return kvc_take_keyed(r.manager, no, 100, &number);
         }},
        {"kvc_next_evicted, n", kBad, [&] { return kvc_next_evicted(r.manager, 1, no, 0, no); }},
        {"kvc_next_evicted, items", kBad, [&] { return kvc_next_evicted(r.manager, 1, no, 1, &number); }},
        {"kvc_pin, items", kBad, [&] { return kvc_pin(r.manager, no, 1, r.digest); }},
        {"kvc_pin, pinned", kBad,
         [&] {
             kvc_keyed item{};
             return kvc_pin(r.manager, &item, 1, no);
         }},
        {"kvc_pin, none", KVC_OK, [&] { return kvc_pin(r.manager, no, 0, no); }},
        {"kvc_unpin", kBad, [&] { return kvc_unpin(r.manager, 0, no, 1); }},
        {"kvc_manager_get_stats", kBad, [&] { return kvc_manager_get_stats(r.manager, no); }},
        {"kvc_get_arena_stats", kBad, [&] { return kvc_get_arena_stats(r.manager, no); }},
        {"kvc_get_class_stats", kBad, [&] { return kvc_get_class_stats(r.manager, 0, no); }},
        {"kvc_get_group_stats", kBad, [&] { return kvc_get_group_stats(r.manager, 0, no); }},
        {"kvc_namespace_use", kBad, [&] { return kvc_namespace_use(r.manager, 0, no); }},
        {"kvc_clear_namespaces", kBad, [&] { return kvc_clear_namespaces(r.manager, no, 1, 0); }},
        {"kvc_clear_namespaces, none", KVC_OK, [&] { return kvc_clear_namespaces(r.manager, no, 0, 0); }},
        {"kvc_blockage", kBad, [&] { return kvc_blockage(r.manager, r.handle, no); }},
        {"kvc_holes, n", kBad, [&] { return kvc_holes(r.manager, r.handle, 0, no, 0, no); }},
        {"kvc_holes, blocks", kBad, [&] { return kvc_holes(r.manager, r.handle, 0, no, 1, &number); }},
        {"kvc_take_moves, n", kBad, [&] { return kvc_take_moves(r.manager, no, 0, no); }},
        {"kvc_take_moves, moves", kBad, [&] { return kvc_take_moves(r.manager, no, 1, &number); }},
        {"kvc_take_events, cap", kBad, [&] { return kvc_take_events(r.manager, no, no, no, no, &counts); }},
        {"kvc_take_events, runs", kBad, [&] { return kvc_take_events(r.manager, &one, no, bytes, pages, &counts); }},
        {"kvc_take_events, n", kBad, [&] { return kvc_take_events(r.manager, &zero, no, no, no, no); }},
        {"kvc_has_key, digest", kBad, [&] { return kvc_has_key(r.manager, 0, 0, no, pages); }},
        {"kvc_has_key, page", kBad, [&] { return kvc_has_key(r.manager, 0, 0, r.digest, no); }},
    };
}

// True: as expected, and the manager is as sound as before.
bool run(const Case& test, const Rig& rig) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const int32_t status = test.call();
        const bool right = status == test.expected && !rig.other && kvc_check(rig.manager) == KVC_OK;
        if (!right) std::fprintf(stderr, "%s: status %d, not %d\n", test.name, status, test.expected);
        std::_Exit(right ? 0 : 1);
    }
    int result = 0;
    if (child < 0 || waitpid(child, &result, 0) != child) return false;
    if (!WIFEXITED(result)) std::fprintf(stderr, "%s: NULL crashes it\n", test.name);
    return WIFEXITED(result) && WEXITSTATUS(result) == 0;
}

}  // namespace

int main() {
    Rig rig;
    int total = 0, wrong = 0;
    for (const auto& cases : {owner_cases(rig), hash_and_copy_cases(rig), file_cases(), pool_cases(rig),
                              shared_cases(rig), request_cases(rig), batch_cases(rig), reading_cases(rig)})
        for (const Case& test : cases) {
            ++total;
            wrong += !run(test, rig);
        }
    std::printf("%d of %d calls with NULL were answered as they should be\n", total - wrong, total);
    return wrong != 0;
}
