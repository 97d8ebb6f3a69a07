/* The C ABI of the kvcache core: hashing, page pools, the block manager, copies of pages, attention over
 * pages, page files.
 *
 * This header is also the cffi cdef: preprocessor lines are dropped, the rest is parsed verbatim, so keep to plain
 * declarations. Rules of the ABI:
 *   - no exception crosses it; every call that can fail returns a kvc_status and leaves a text in kvc_last_error();
 *   - positive statuses are answers, not errors, and leave everything as it was;
 *   - memory passed in stays the caller's; memory handed out stays the callee's and says until when it is valid;
 *   - a manager or pool is used by one thread at a time; two threads at once are refused with KVC_E_STATE;
 *   - lengths are in elements, sizes in bytes, positions in tokens from the start of the request.
 */
#ifndef KVCACHE_CORE_H
#define KVCACHE_CORE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum kvc_status {
    KVC_OK = 0,
    KVC_NO_SPACE = 1,     /* not now: nothing changed, try again when pages were freed */
    KVC_BUSY = 2,         /* not now: another process has the lock */
    KVC_PAUSED = 3,       /* nor soon: so it was several times in a row */
    KVC_E_ARGUMENT = -1,  /* a bad value */
    KVC_E_HANDLE = -2,    /* unknown or closed request, load or step */
    KVC_E_STATE = -3,     /* a call that the contract forbids now */
    KVC_E_CAPACITY = -4,  /* can never fit */
    KVC_E_MEMORY = -5,    /* out of memory */
    KVC_E_INVARIANT = -6, /* check() found a fault of this library */
};

int32_t kvc_abi_version(void);
const char* kvc_last_error(void); /* of this thread; valid until its next failing call */

/* ---- hashing ------------------------------------------------------------------------------------------------- */

/* path: 0 = best for this CPU, 1 = portable, 2 = SHA-NI (KVC_E_ARGUMENT where the CPU lacks it). */
const char* kvc_sha256_path(void); /* what path 0 resolves to: "sha-ni" or "portable" */
int32_t kvc_sha256(int32_t path, const uint8_t* data, int64_t n_bytes, uint8_t* digest);

/* H_i = SHA-256(64-byte domain block || tokens of block i as little-endian int32 || H_{i-1}), H_{-1} = parent.
 * Writes n_blocks * 32 bytes. O(n). */
int32_t kvc_hash_chain(int32_t path, const uint8_t* parent, const int32_t* tokens, int64_t n_blocks,
                       int64_t block_tokens, uint8_t* digests);

/* ---- page pool: also the index of a host tier ---------------------------------------------------------------------
 *
 * A page is free (no key, no reference), held (references), or cached (a key, no reference: evictable in LRU order).
 * A key is (ns, 32-byte digest). Digest arrays have a stride in bytes, so that every second, fourth, ... link of a
 * chain can be read in place. */
typedef struct kvc_pool kvc_pool;

typedef struct {
    int64_t capacity; /* pages that may exist; kvc_unlimited() for no bound */
    int64_t created;  /* pages that exist so far */
    int64_t free;     /* created, no key, no reference */
    int64_t cached;   /* a key, no reference */
    int64_t held;     /* references */
    int64_t keyed;    /* entries of the index */
    int64_t evictions;
} kvc_pool_stats;

int64_t kvc_unlimited(void);
int32_t kvc_pool_new(int64_t capacity, uint64_t seed, kvc_pool** out);
void kvc_pool_free(kvc_pool* pool);
/* present[i] = 1 where the key is there. version changes whenever a key appears or goes: equal version, equal answer. */
int32_t kvc_pool_present(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         uint8_t* present);
uint64_t kvc_pool_version(kvc_pool* pool);
/* pages[i] = page of the key with one more reference, or -1. */
int32_t kvc_pool_acquire(kvc_pool* pool, uint32_t ns, const uint8_t* digests, int64_t stride_bytes, int64_t n,
                         int32_t* pages);
/* Takes up to n pages without key, one reference each, evicting cached pages in LRU order; *taken <= n. */
int32_t kvc_pool_take(kvc_pool* pool, int64_t n, int32_t* pages, int64_t* taken);
/* Gives each page its key (n * 32 bytes). published[i] = 0 where the key is on another page: that page gets none.
 * A page that is not held, or has a key already, is KVC_E_STATE; pages before it keep what they got. */
int32_t kvc_pool_publish(kvc_pool* pool, uint32_t ns, const uint8_t* digests, const int32_t* pages, int64_t n,
                         uint8_t* published);
/* Drops the key of a page, if any (a bad object: it must not be found again). */
int32_t kvc_pool_unpublish(kvc_pool* pool, int32_t page);
/* Drops one reference of each page, in this order: the first is evicted first. All or nothing. */
int32_t kvc_pool_release(kvc_pool* pool, const int32_t* pages, int64_t n);
/* What became findable and what went (evicted or unpublished), one key each, kind as in kvc_event_kind. */
typedef struct {
    int32_t kind;
    uint32_t ns;
    uint8_t digest[32]; /* of KVC_EVENT_LOST: zeros */
} kvc_pool_event;
/* From now on at most so many events wait to be taken; 0, as at first: none are kept. What waited is forgotten. */
int32_t kvc_pool_journal(kvc_pool* pool, int64_t most);
/* Events since the last call, in order. Where one found no room, it and all that waited are gone and a KVC_EVENT_LOST
 * comes first: what follows it is right and complete. *n = how many; with less room than that (cap) nothing is written
 * or forgotten. */
int32_t kvc_pool_take_events(kvc_pool* pool, kvc_pool_event* events, int64_t cap, int64_t* n);
/* The ns of all keys and of all events that wait, ascending, each once. *n = how many; with less room (cap) nothing is
 * written. O(pages). */
int32_t kvc_pool_spaces(kvc_pool* pool, uint32_t* spaces, int64_t cap, int64_t* n);
int32_t kvc_pool_get_stats(kvc_pool* pool, kvc_pool_stats* out);
int32_t kvc_pool_check(kvc_pool* pool);

/* ---- slots shared between processes ----------------------------------------------------------------------------- */
/* A region is memory that several processes map: tables, then pages. Keys are a namespace and a digest, 32 bytes each. One
 * lock guards all; who finds its owner dead repairs the tables. A call that did not get it within 50 ms returns KVC_BUSY;
 * after three in a row KVC_PAUSED, at once, for a second. Nothing was done then, but for kvc_shared_take, which may have taken
 * some, and kvc_shared_publish, _unpublish and _release: they are done before this user's next call that gets the lock. Each
 * attachment is a user with a number, at most 64; what a dead user holds comes back by kvc_shared_forget. One thread at a
 * time, but for kvc_shared_store, _load, _users and _forget, which one other may call. */
typedef struct kvc_shared kvc_shared;
typedef struct {
    int64_t capacity;
    int64_t created; /* slots that were ever used */
    int64_t mine;    /* held by this user */
    int64_t used;    /* held by anybody, or with a key */
    int64_t held;    /* by anybody */
    int64_t keyed;
    int64_t evictions;  /* by this user */
    int64_t recoveries; /* repairs after a death, of the whole region */
} kvc_shared_stats;

/* Where the pages of each group begin: they follow one another, each group from a multiple of 4096 on, the first behind the
 * tables. *n_bytes = of all. */
int32_t kvc_shared_layout(int64_t n_groups, const int64_t* slots, const int64_t* page_bytes, int64_t* pages_at,
                          int64_t* n_bytes);
/* Makes the tables in memory that is all zeros and that nobody else uses yet. layout: 32 bytes. */
int32_t kvc_shared_format(uint8_t* base, int64_t n_bytes, int64_t n_groups, const int64_t* slots,
                          const int64_t* page_bytes, const uint8_t* layout, uint64_t seed);
/* KVC_E_ARGUMENT says what is different where the region was made for something else. `base` must outlive it. */
int32_t kvc_shared_new(uint8_t* base, int64_t n_bytes, int64_t n_groups, const int64_t* slots,
                       const int64_t* page_bytes, const uint8_t* layout, int32_t user, kvc_shared** out);
void kvc_shared_free(kvc_shared* pool);
/* As those of kvc_pool. */
int32_t kvc_shared_present(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           int64_t stride_bytes, int64_t n, uint8_t* present);
int32_t kvc_shared_acquire(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           int64_t stride_bytes, int64_t n, int32_t* slots);
/* As acquire, of slots that are held here, without the lock: right, and O(n + n_held), where both are in one order. */
int32_t kvc_shared_acquire_held(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                                int64_t stride_bytes, int64_t n, const int32_t* held, int64_t n_held, int32_t* slots);
int32_t kvc_shared_take(kvc_shared* pool, int64_t group, int64_t n, int32_t* slots, int64_t* taken);
int32_t kvc_shared_publish(kvc_shared* pool, int64_t group, const uint8_t* space, const uint8_t* digests,
                           const int32_t* slots, int64_t n, uint8_t* published);
int32_t kvc_shared_unpublish(kvc_shared* pool, int64_t group, int32_t slot);
int32_t kvc_shared_release(kvc_shared* pool, int64_t group, const int32_t* slots, int64_t n);
int32_t kvc_shared_version(kvc_shared* pool, int64_t group, uint64_t* version);
int32_t kvc_shared_get_stats(kvc_shared* pool, int64_t group, kvc_shared_stats* out);
int32_t kvc_shared_check(kvc_shared* pool, int64_t group);
/* The region is about to go: it is not looked at any more, nothing is found or taken, what is held is let go here alone. */
int32_t kvc_shared_detach(kvc_shared* pool);
/* Bits of users that came and were not forgotten since. */
int32_t kvc_shared_users(kvc_shared* pool, uint64_t* users);
/* The user is dead: nothing is held by it any more. */
int32_t kvc_shared_forget(kvc_shared* pool, int32_t user);
/* Pages at these addresses to slots that the user holds, each with a checksum of what arrived and of its name (64 bytes:
 * namespace, digest); and back: ok[i] = 0 where what arrived is not what was stored under that name. threads: as of
 * kvc_copy; all have ended when this returns. */
int32_t kvc_shared_store(kvc_shared* pool, int64_t group, const uint64_t* pages, const int32_t* slots,
                         const uint8_t* names, int64_t n, int32_t threads);
int32_t kvc_shared_load(kvc_shared* pool, int64_t group, const uint64_t* pages, const int32_t* slots,
                        const uint8_t* names, int64_t n, int32_t threads, uint8_t* ok);

/* ---- host memory -------------------------------------------------------------------------------------------------- */
/* Fills the page tables of a range, beside others that use it; places it on a NUMA node where that has room; keeps it from
 * being swapped. *error = 0, or the system's error number. The first two write nothing; the range must be the caller's. */
int32_t kvc_memory_populate(uint64_t address, int64_t n_bytes, int32_t* error);
int32_t kvc_memory_prefer_node(uint64_t address, int64_t n_bytes, int32_t node, int32_t* error);
int32_t kvc_memory_lock(uint64_t address, int64_t n_bytes, int32_t* error);

/* ---- block manager --------------------------------------------------------------------------------------------- */
typedef struct kvc_manager kvc_manager;

/* What a hit that ends at position H, or a query there, reads of a group:
 *   FULL     all blocks of [0, H)
 *   SPAN     the blocks of [max(0, H / chunk * chunk - lead), H): a sliding window W has chunk 1 and lead W - 1, chunked
 *            local attention its chunk and lead 0, a compressor of ratio r its pooling state with chunk r
 *   STATE    one page: the state after H tokens
 *   PRIVATE  nothing: pages belong to one request and are never cached */
enum kvc_kind { KVC_FULL = 0, KVC_SPAN = 1, KVC_STATE = 2, KVC_PRIVATE = 3 };

typedef struct {
    int32_t kind;
    int32_t block_tokens;  /* tokens per page; STATE: the grid; PRIVATE: 0 */
    int64_t chunk_tokens;  /* SPAN */
    int64_t lead_tokens;   /* SPAN */
    int32_t request_pages; /* PRIVATE: pages of a request; STATE: pages for drafts beside the two that it always has */
    int32_t lookahead_tokens; /* above 0: a draft group, whose content at a token depends on so many tokens after it */
    int32_t size_class;       /* groups of one class have pages of one size and share page numbers */
    int32_t transient; /* SPAN with chunks: 1: a step has the rows that it writes at hand, only later ones read the
                                 pages. So a grant gives a page to those blocks alone that a kept position, its last grid
                                 point or its end reads; the others are -1 in kvc_table for good */
} kvc_group;

typedef struct {
    int32_t n_groups;              /* at most 64 */
    int32_t n_classes;             /* at most n_groups */
    const int32_t* pages_per_slab; /* of each class */
    int64_t slabs; /* pages of a class are numbered slab * pages_per_slab + slot; kvc_unlimited(): no bound */
    int32_t hash_unit_tokens;
    int32_t grid_tokens; /* hits end on multiples of it */
    int32_t max_open_steps;
    int32_t movable;        /* 1: the caller does the copies of kvc_take_moves */
    int32_t journal;        /* 1: kvc_take_keyed will be read */
    int32_t events;         /* 1: kvc_take_events will be read */
    int64_t history_tokens; /* of closed requests, whose content is remembered for kvc_explain; 0: of none */
    uint64_t seed;          /* of the index's hash function */
} kvc_config;

int32_t kvc_manager_new(const kvc_config* config, const kvc_group* groups, kvc_manager** out);
void kvc_manager_free(kvc_manager* manager);

/* Something beside tokens that went into [offset, offset + length): an image, prompt embeddings. */
typedef struct {
    int64_t offset;
    int64_t length;
    uint8_t digest[32];
} kvc_media;

/* Opens a request. Native: tokens given, root = first parent of its chain. Foreign: tokens NULL, digests = one 32-byte
 * key for each full hash unit of the prompt; root may be given, and tells then when the number `ns` has a new meaning.
 * Keys of different namespaces never meet. session: 0, or a number by which kvc_explain names it.
 * KVC_E_CAPACITY when max_tokens (prompt + output) needs more slabs than the arena has. O(n_tokens) to hash. */
typedef struct {
    uint32_t ns;
    const uint8_t* root;
    const int32_t* tokens;
    int64_t n_tokens;
    int64_t max_tokens;
    const uint8_t* digests;
    int64_t n_digests;
    const kvc_media* media; /* native only; ascending, not overlapping */
    int64_t n_media;
    uint64_t session;
    const int64_t* intervals; /* what it keeps, as for kvc_retain; NULL: nothing */
    const int64_t* positions;
    const uint8_t* declared;
    int64_t n_positions;
} kvc_open_args;
int32_t kvc_open(kvc_manager* manager, const kvc_open_args* args, int64_t* handle);
/* Appends generated tokens; foreign requests pass tokens NULL (no keys beyond the prompt). */
int32_t kvc_extend(kvc_manager* manager, int64_t handle, const int32_t* tokens, int64_t n);

/* What the SPAN and STATE groups of a request keep: what a hit reads at every multiple of intervals[group] (0: none; a
 * multiple of the grid otherwise), and at the listed positions, on the grid, ascending. declared[i] = 1: keeps its place
 * in the eviction order when a later boundary of the request supersedes it; 0: goes first then. Replaces the earlier
 * answer; positions already passed have no effect. */
int32_t kvc_retain(kvc_manager* manager, int64_t handle, const int64_t* intervals, const int64_t* positions,
                   const uint8_t* declared, int64_t n);
/* Positions in (start, end] at which a state must be snapshotted, ascending: those of kvc_retain, and the last grid point
 * of the range (so that a preempted, aborted or finished request can leave it). *n = how many; writes at most cap. */
int32_t kvc_stops(kvc_manager* manager, int64_t handle, int64_t start, int64_t end, int64_t* positions, int64_t cap,
                  int64_t* n);

/* Why a token was lost: hit + sum of lost = prompt. */
enum kvc_cause {
    KVC_LOST_LAST = 0,    /* the last token is always recomputed, and what lies past the last whole grid unit */
    KVC_LOST_STATE = 1,   /* the full groups have it, but no state or span was kept here */
    KVC_LOST_EVICTED = 2, /* was there, evicted (remembered by a bounded table) */
    KVC_LOST_PENDING = 3, /* being written or loaded now */
    KVC_LOST_NEW = 4,     /* never stored, or other tokens */
    KVC_LOST_CAUSES = 5
};

typedef struct {
    int64_t hit_tokens;     /* longest prefix that every group can serve, device and `present` together */
    int64_t device_tokens;  /* the same from the device alone */
    int64_t pending_tokens; /* what hit_tokens would be, at least, if all that is pending were there */
    int64_t junction; /* where the full groups, pending blocks included, go on and no state or span is kept: what the
                               request should keep; 0 if nothing is missing */
    int64_t lost[5];
} kvc_hit;

/* Looks up all known tokens (hit + lost = n_tokens); changes nothing in the arena. present[g] (or present NULL) tells what
 * a tier holds: one byte per block, for a state group one per grid point (index i = state after (i + 1) * grid tokens); it
 * is copied. Only for requests without pages (opened, preempted, or after a failed load). Asked again, it goes on where the
 * last lookup was; while it finds the same, `lost` stays what the first lookup that found it has told. */
int32_t kvc_lookup(kvc_manager* manager, int64_t handle, const uint8_t* const* present, const int64_t* n_present,
                   kvc_hit* out);

/* What kvc_explain says beyond kvc_cause: parts of KVC_LOST_NEW, but KVC_LOST_ELSEWHERE, which comes first everywhere. */
enum kvc_loss_cause {
    KVC_LOST_ELSEWHERE = 5, /* a tier or replica holds it, it was not loaded */
    KVC_LOST_TOKENS = 6,    /* the tokens differ from those of the request that has most in common with this one */
    KVC_LOST_KEY = 7        /* another request had the same tokens under another key */
};
/* Why content that another request had as well was not there. */
enum kvc_why {
    KVC_WHY_NEW = 0,        /* no other request is known that had it */
    KVC_WHY_ABORTED = 1,    /* the other one was aborted before it had computed it */
    KVC_WHY_ENDED = 2,      /* the other one finished before it had computed it */
    KVC_WHY_UNCOMPUTED = 3, /* the other one was open, and had not computed it when this one was looked up */
    KVC_WHY_CLEARED = 4,    /* its keys were dropped by a clear */
    KVC_WHY_RETIRED = 5,    /* this request's root is out of use */
    KVC_WHY_FORGOTTEN = 6,  /* evicted, and more was evicted since than is remembered */
    KVC_WHY_UNKEPT = 7      /* computed, and not among what the retention policy keeps */
};
typedef struct {
    int64_t begin; /* tokens [begin, end) */
    int64_t end;
    int32_t cause; /* kvc_cause or kvc_loss_cause */
    int32_t told;  /* the kvc_cause that kvc_lookup counted them under */
    int32_t why;   /* kvc_why */
    int32_t group; /* EVICTED: of the first page that went; STATE: that had nothing for the full groups' hit; else -1 */
    /* -1, or EVICTED: first token of that page, or after how many tokens the state was; STATE: where the hit ends; TOKENS,
     * KEY: where they differ first (KEY: -1 where the root is another one) */
    int64_t position;
    int64_t evicted_ns;    /* EVICTED: so long ago; -1: not remembered */
    int64_t evicted_pages; /* ... and so many pages of all groups went from then on until the lookup */
    double evicted_slabs;  /* ... with the memory of so many slabs */
    int64_t step;          /* PENDING: the step that writes it, if it is open still; else 0 */
    int64_t load;          /* PENDING: the load that fills it, if it is open still; else 0 */
    int64_t other; /* handle of the request spoken of: who took the page, writes it, or had most in common; 0: none */
    uint64_t other_session; /* as in kvc_open_args */
    int64_t other_tokens;   /* -1, as the next two, of one that took a page */
    int64_t other_computed;
    int64_t other_closed_ns; /* closed so long ago; -1: open */
    uint8_t other_root[32];
    int32_t n_before; /* TOKENS, native: tokens before the difference, the last ones ... */
    int32_t n_own;    /* ... and from it on, of this request */
    int32_t n_others; /* ... and of the other one */
    int32_t before[8];
    int32_t own[8];
    int32_t others[8];
} kvc_loss;
typedef struct {
    int64_t n_tokens;
    int64_t hit_tokens;
    int64_t full_tokens; /* where the hit of the full groups alone ended */
} kvc_explained;
/* Why the last kvc_lookup of a request, which may run by now, lost what it did: ascending, from hit_tokens to n_tokens.
 * *n = how many; writes at most cap. elsewhere: NULL, or as `present` of kvc_lookup: what somebody holds that was not
 * asked. Others are known while they are open, and as long as kvc_config.history_tokens remembers them. O(known
 * requests * log of their blocks + blocks that were lost + items of open loads), and the common part of requests with
 * another root. */
int32_t kvc_explain(kvc_manager* manager, int64_t handle, const uint8_t* const* elsewhere, const int64_t* n_elsewhere,
                    kvc_explained* out, kvc_loss* losses, int64_t cap, int64_t* n);

typedef struct {
    int64_t hit_tokens; /* prefix adopted by this call, 0 for a running request */
    int64_t start;      /* first token that the grant covers */
    int64_t end;        /* one past the last, drafts included */
    int64_t load;       /* 0, or the id of a load that must end before tokens can be granted */
    int64_t n_loads;    /* pages that the load fills */
} kvc_grant;

/* Pages of each group that kvc_allocate would take, new pages only. */
int32_t kvc_need(kvc_manager* manager, int64_t handle, int64_t n_tokens, int64_t n_drafts, int64_t* pages);
/* Atomic: KVC_NO_SPACE changes nothing but what kvc_blockage says. First call of a request: adopts the hit of the last
 * lookup, or what is left of it (looked up again by itself if pages came or went since), then grants n_tokens, and n_drafts guessed ones after
 * them. If parts of the hit must be loaded, grants only the pages of the load. Later calls: capacity beyond what is
 * committed; replaces an uncommitted grant. A grant may end before start + n_tokens: where the request could never hold
 * all that, even alone. So the oldest request always gets on. Until its commit the newest open step fences the request's
 * pages: a grant may be computed before it is known what is to be committed, under a step that is open. */
int32_t kvc_allocate(kvc_manager* manager, int64_t handle, int64_t n_tokens, int64_t n_drafts, kvc_grant* out);
/* Why the last kvc_allocate of the request said KVC_NO_SPACE. */
enum kvc_blockage_reason {
    KVC_BLOCKED_NOT = 0,
    KVC_BLOCKED_FROZEN = 1,  /* the oldest request waits for space: it goes first */
    KVC_BLOCKED_PREEMPT = 2, /* younger requests hold pages: preempt them, the youngest first */
    KVC_BLOCKED_WAIT = 3,    /* older requests, open steps, loads or pins hold what is needed */
    KVC_BLOCKED_RESTART = 4  /* its own pages lie so that it cannot get on: preempt this request itself */
};
int32_t kvc_blockage(kvc_manager* manager, int64_t handle, int32_t* reason);

int32_t kvc_begin_step(kvc_manager* manager, int64_t* step);
/* The newest open step writes the granted tokens up to `upto` (with STATE or transient groups: the granted end, less any of
 * the drafts). Their keys are pending until kvc_end_step. Pages of drafts that are left out come free with the step. */
int32_t kvc_commit(kvc_manager* manager, int64_t handle, int64_t upto);
int32_t kvc_end_step(kvc_manager* manager, int64_t step); /* the oldest open step only */

/* The same for the n requests of a step: as n single calls in this order, up to the first that is not KVC_OK, whose status
 * is returned; *done = how many were made before. n_drafts may be NULL: none. commit = 1, without drafts: each grant is
 * committed whole before the next request is asked for (and stands where memory runs out in between). counts may be NULL:
 * one token each; tokens holds all requests' tokens one after the other. */
int32_t kvc_allocate_many(kvc_manager* manager, const int64_t* handles, const int64_t* n_tokens,
                          const int64_t* n_drafts, int32_t commit, int64_t n, kvc_grant* out, int64_t* done);
int32_t kvc_commit_many(kvc_manager* manager, const int64_t* handles, const int64_t* upto, int64_t n, int64_t* done);
int32_t kvc_extend_many(kvc_manager* manager, const int64_t* handles, const int32_t* tokens, int64_t n_tokens,
                        const int64_t* counts, int64_t n, int64_t* done);

/* finish, abort: the handle is closed. preempt: the request stays, without pages, to be looked up again. All leave what a
 * hit reads at the last completed grid point; what an open step writes for the request is dropped. */
int32_t kvc_finish(kvc_manager* manager, int64_t handle);
int32_t kvc_preempt(kvc_manager* manager, int64_t handle);
int32_t kvc_abort(kvc_manager* manager, int64_t handle);

/* ---- what the engine reads ---- */
typedef struct {
    int64_t n_tokens; /* known tokens */
    int64_t n_prompt;
    int64_t computed;  /* tokens whose step (or load) has ended */
    int64_t committed; /* computed, or written by an open step */
    int64_t granted;   /* end of the current grant */
    int64_t n_units;   /* known links of its hash chain */
    int64_t load;      /* it waits for; 0: none */
    int32_t state;     /* 0 waiting (no pages), 1 running, 2 loading */
    uint32_t ns;
} kvc_request_info;
int32_t kvc_info(kvc_manager* manager, int64_t handle, kvc_request_info* out);
/* Digests of the request's chain from link `first` on, 32 bytes each. *n = how many there are from there; writes at most cap. */
int32_t kvc_digests(kvc_manager* manager, int64_t handle, int64_t first, uint8_t* digests, int64_t cap, int64_t* n);
/* Pages of a group with blocks (or of a PRIVATE one) from block `first` on, -1 where a span was given up or has
 * no page; *n = blocks there are from `first`; writes at most cap. */
int32_t kvc_table(kvc_manager* manager, int64_t handle, int32_t group, int64_t first, int32_t* pages, int64_t cap,
                  int64_t* n);
/* The grant's plan for a state group: start from the state in page `source` (-1: the zero state); the state after
 * positions[i] tokens goes to pages[i]. Equal neighbours are an update in place. *n = how many; writes at most cap.
 * Valid until the step that commits the grant has ended. */
int32_t kvc_state_plan(kvc_manager* manager, int64_t handle, int32_t group, int32_t* source, int64_t* positions,
                       int32_t* pages, int64_t cap, int64_t* n);
/* Blocks of a draft group's hit that hold no content. *n = how many; writes at most cap. */
int32_t kvc_holes(kvc_manager* manager, int64_t handle, int32_t group, int64_t* blocks, int64_t cap, int64_t* n);

/* Cached pages that changed their place: copy page `from` to page `to` of the class, in this order, before anything that
 * was given out since is read or written. *n = how many; with less room than that (cap) nothing is written or forgotten. */
typedef struct {
    int32_t size_class;
    int32_t from;
    int32_t to;
} kvc_move;
int32_t kvc_take_moves(kvc_manager* manager, kvc_move* moves, int64_t cap, int64_t* n);

/* ---- tiers ---- */
typedef struct {
    int64_t end;    /* position after the block, or of the state */
    int64_t handle; /* the request that wrote or wants it; it may be closed by now */
    uint32_t ns;
    int32_t group;
    int32_t page; /* when this was written; it may have moved since */
    uint8_t digest[32];
} kvc_keyed;

/* Pages of a load, in the order of its flags. *n = how many; writes at most cap. */
int32_t kvc_load_items(kvc_manager* manager, int64_t load, kvc_keyed* items, int64_t cap, int64_t* n);
/* The load is over: ok[i] = 1 where item i holds the right bytes. Good pages get their keys. All good: the request runs
 * on from its hit. Else it waits again, without pages: look it up anew, the good part is a device hit now. After an
 * abort or kvc_abandon_load the request is not touched; good pages are cached all the same. */
int32_t kvc_end_load(kvc_manager* manager, int64_t load, const uint8_t* ok, int64_t n);
/* The load missed its deadline: the request waits again, without these pages; they stay out of use (quarantine) until
 * kvc_end_load says that nobody writes to them any more. */
int32_t kvc_abandon_load(kvc_manager* manager, int64_t load);

/* Pages that got their key since the last call, oldest first: what a tier may store. *n = how many; with less room than
 * that (cap) nothing is written or forgotten. Empty unless the manager was made with `journal`. Bounded by twice the
 * pages that exist: older entries are dropped and counted in kvc_manager_stats. */
int32_t kvc_take_keyed(kvc_manager* manager, kvc_keyed* items, int64_t cap, int64_t* n);
/* What would be evicted, in order, for `slabs` slabs of space beyond what is used now: cached pages with their keys, handle
 * 0. *n = how many; with less room than that (cap) only the first are written. Changes nothing. */
int32_t kvc_next_evicted(kvc_manager* manager, int64_t slabs, kvc_keyed* items, int64_t cap, int64_t* n);
/* A reference for a reader outside (a store in flight). The page is found by its key and written to items[i].page.
 * pinned[i] = 0 where the key is gone, or while the oldest request waits for space (kvc_manager_stats.frozen). */
int32_t kvc_pin(kvc_manager* manager, kvc_keyed* items, int64_t n, uint8_t* pinned);
int32_t kvc_unpin(kvc_manager* manager, int32_t group, const int32_t* pages, int64_t n);

/* ---- events ---- */
enum kvc_event_kind {
    KVC_EVENT_STORED = 1,  /* n_keys neighbouring blocks (states: grid points) became findable */
    KVC_EVENT_REMOVED = 2, /* n_keys keys of a group are gone */
    KVC_EVENT_LOST = 3     /* events were dropped, for want of a reader: start over */
};
typedef struct {
    int32_t kind;
    int32_t group;
    uint32_t ns;
    int32_t has_parent; /* 0: the first block starts at token 0 */
    int64_t handle;     /* the writer; 0: gone */
    int64_t first_end;  /* position after the first block */
    int64_t n_keys;
    int64_t n_tokens; /* n_keys times the group's block; 0 where they are not known (foreign keys) */
    uint8_t parent[32];
} kvc_event_run;
typedef struct {
    int64_t runs;
    int64_t keys; /* of 32 bytes */
    int64_t tokens;
} kvc_event_counts;
/* Takes what waits: runs, and their keys and tokens, each as one sequence over all runs. *n = how many of each; where one of
 * them is above its cap nothing is written and nothing forgotten. */
int32_t kvc_take_events(kvc_manager* manager, const kvc_event_counts* cap, kvc_event_run* runs, uint8_t* keys,
                        int32_t* tokens, kvc_event_counts* n);

/* ---- counts ---- */
typedef struct {
    int64_t open_requests;
    int64_t open_steps;
    int64_t open_loads;
    int64_t pinned;         /* references of outside readers */
    int64_t keyed_dropped;  /* kvc_take_keyed entries lost for want of a reader */
    int64_t events_dropped; /* keys of events lost for want of a reader */
    int64_t frozen;         /* 1: the oldest request waits for space */
} kvc_manager_stats;
int32_t kvc_manager_get_stats(kvc_manager* manager, kvc_manager_stats* out);
typedef struct {
    int64_t slabs;   /* bound */
    int64_t created; /* that exist so far */
    int64_t empty;   /* created, owned by no class */
    int64_t moved_pages;
    int64_t reclaimed_slabs;
    int64_t evictions;
} kvc_arena_stats;
int32_t kvc_get_arena_stats(kvc_manager* manager, kvc_arena_stats* out);
typedef struct {
    int64_t slabs; /* owned by the class */
    int64_t free;
    int64_t cached; /* a key, no reference */
    int64_t held;
} kvc_class_stats;
int32_t kvc_get_class_stats(kvc_manager* manager, int32_t size_class, kvc_class_stats* out);
typedef struct {
    int64_t keyed; /* entries of the index, pending ones too */
    int64_t evictions;
} kvc_group_stats;
int32_t kvc_get_group_stats(kvc_manager* manager, int32_t group, kvc_group_stats* out);
/* Is the key there and readable now? For tests and tools. */
int32_t kvc_has_key(kvc_manager* manager, int32_t group, uint32_t ns, const uint8_t* digest, int32_t* page);
/* Keys, requests, loads and unread records of a namespace; at 0 its number may be given to another. */
int32_t kvc_namespace_use(kvc_manager* manager, uint32_t ns, int64_t* uses);
/* Drops every key (of these namespaces). O(pages), however many there are. Requests that hold pages run on, and leave no
 * keys until they start anew. With `retire` = 1 the root is out of use: its open requests find no keys and leave none, in
 * tiers too. */
int32_t kvc_clear(kvc_manager* manager, int32_t retire);
int32_t kvc_clear_namespaces(kvc_manager* manager, const uint32_t* ns, int64_t n, int32_t retire);
/* Recounts references, lists, index, pending keys, slabs, what the oldest request holds. O(pages). */
int32_t kvc_check(kvc_manager* manager);

/* ---- copies of pages ---------------------------------------------------------------------------------------------
 *
 * One form of plan for whatever moves pages: the host copy below, and executors for devices.
 *
 *     for every segment, for every pair i < n_pairs:
 *         dst_base + dst_stride * dst[i]  <-  src_base + src_stride * src[i]      bytes
 *
 * A segment is what lies at one place in every page on both sides: a layer, a layer's K or V, a state, all of a page.
 * Layer-first memory has a segment for each layer with `stride` = bytes of a page of the layer; page-first memory has all
 * layers within one stride. A pair is two page ids, 8 bytes whatever the number of layers; page 0 begins at the base.
 *
 * What must hold, and is checked before the first byte moves (else KVC_E_ARGUMENT, with the numbers, and nothing moved):
 * no base is NULL, bytes and pages are above 0, strides at least the bytes, no view passes the end of the address space,
 * every id is below its side's pages, no dst id is named twice, and no byte that is written is read or written by another
 * pair or segment. Sources may repeat. That the addresses are mapped is the caller's promise. Alignment is not asked for. */
typedef struct {
    uint64_t src_base;
    uint64_t dst_base;
    int64_t src_stride;
    int64_t dst_stride;
    int64_t bytes;
    int64_t src_pages; /* pages on either side */
    int64_t dst_pages;
} kvc_segment;
typedef struct {
    const kvc_segment* segments;
    const int32_t* src;
    const int32_t* dst;
    int64_t n_segments;
    int64_t n_pairs;
} kvc_copy_plan;
/* One contiguous move. */
typedef struct {
    uint64_t src;
    uint64_t dst;
    int64_t bytes;
} kvc_range;

const char* kvc_copy_path(void); /* "avx512", "avx2" or "memcpy" */
/* Threads that can run at a time here: the CPUs of the affinity mask, or fewer by the quota of a control group. */
int32_t kvc_cores(void);
/* Between host memories. threads: at most so many, 1 to 256, the caller's among them; no more than kvc_cores(), and one
 * for each 2 MiB. They end with the call. When it returns, all bytes are visible to other threads. */
int32_t kvc_copy(const kvc_copy_plan* plan, int32_t threads);
/* The plan as moves, for executors that take a list: neighbouring pairs that are one range on both sides are merged,
 * whether their ids rise or fall. At most n_segments * n_pairs. *n = how many; writes at most cap. */
int32_t kvc_copy_ranges(const kvc_copy_plan* plan, kvc_range* ranges, int64_t cap, int64_t* n);

/* ---- attention over pages -----------------------------------------------------------------------------------------
 *
 * Softmax attention of one new token for each row, over K and V (float32) where they lie in pages:
 *
 *     page p       base + p * page_stride bytes: K of each token [kv_heads, head_dim], V `value_offset` elements behind it
 *     row r        queries + r * query_stride: [kv_heads * group, head_dim]; query head h reads KV head h / group;
 *                  out + r * kv_heads * group * head_dim: the same shape
 *                  tables + r * table_stride: its pages; it sees tokens begin[r] to end[r] - 1 of them
 *
 * On one machine, neither other rows nor threads change a bit of a row's result. */
typedef struct {
    const float* queries;
    float* out;
    uint64_t base;
    const int32_t* tables;
    const int64_t* begin;
    const int64_t* end;
    int64_t rows;
    int64_t query_stride; /* elements */
    int64_t table_stride; /* elements */
    int64_t page_stride;  /* bytes */
    int64_t value_offset; /* elements */
    int64_t pages;        /* ids in tables are below it */
    int32_t kv_heads;
    int32_t group; /* query heads of a KV head */
    int32_t head_dim;
    int32_t block_tokens; /* of a page */
    float scale;          /* of scores */
} kvc_attention;

/* threads: as of kvc_copy, one for each MiB that is read, and for each 512 tokens. O(tokens seen). `out` is written on KVC_OK
 * alone. That the pages are mapped is the caller's promise. */
int32_t kvc_attend(const kvc_attention* attention, int32_t threads);

/* ---- page files --------------------------------------------------------------------------------------------------
 *
 * One page, one file: the caller's head and a checksum of everything in the first 4096 bytes, then the page, both filled
 * up with zeros to multiples of 4096. A file appears under its name complete or not at all. A loss of power may leave
 * one with other bytes unless it was written with durable = 1: reading notices. */

/* XXH3, 128 bits, of 241 bytes or more, as its canonical form writes it. Against damage, not against malice. */
int32_t kvc_checksum(const uint8_t* data, int64_t n_bytes, uint8_t* digest);

enum kvc_page_fault {
    KVC_PAGE_LENGTH = -1,   /* cut short, or no file */
    KVC_PAGE_HEAD = -2,     /* of another page, layout or version */
    KVC_PAGE_CHECKSUM = -3, /* bytes changed */
};
typedef struct {
    int32_t folder;  /* descriptor of the folder that names are relative to */
    int32_t direct;  /* 1: past the kernel's cache (O_DIRECT), where the file system can */
    int32_t durable; /* 1: written files outlive a loss of power */
    int32_t threads; /* at most so many, the caller's among them */
    int64_t page_bytes;
    int64_t head_bytes; /* of one head: at most kvc_page_head_bytes() */
    int64_t name_bytes; /* of one name, filled up with zeros, at least one */
} kvc_page_files;
int64_t kvc_page_head_bytes(void);
int64_t kvc_page_file_bytes(int64_t page_bytes); /* 0 where page_bytes cannot be */
/* Page i lies at pages[i], goes to name i with head i, and is of times[i] (nanoseconds since 1970). Files are made as
 * `temporary` followed by the number of the page and renamed: no two calls at once with one `temporary`. outcomes[i]: 0, or
 * an errno, and then there is no new file. After the first that finds no space (ENOSPC, EDQUOT) the rest is not tried. */
int32_t kvc_page_files_write(const kvc_page_files* files, const char* temporary, const char* names,
                             const uint8_t* heads, const uint64_t* pages, const int64_t* times, int64_t n,
                             int32_t* outcomes);
/* outcomes[i]: 0 where the file has this head and is whole; its page is at pages[i] then, and the file of times[i]. An
 * errno. Or a kvc_page_fault, and then the file is removed. Where it is not 0, the bytes at pages[i] are anything. */
int32_t kvc_page_files_read(const kvc_page_files* files, const char* names, const uint8_t* heads, const uint64_t* pages,
                            const int64_t* times, int64_t n, int32_t* outcomes);
/* outcomes[i]: 0, also where there is none, or an errno. */
int32_t kvc_page_files_remove(const kvc_page_files* files, const char* names, int64_t n, int32_t* outcomes);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
