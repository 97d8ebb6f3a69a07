// Shared pools and host memory, as a hostile caller uses them: two users of one region in one process.
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "fuzz_pool.h"

namespace fuzz {

namespace {

constexpr int64_t kKeys = 30, kPage = 100, kLargest = 300;

class SharedFuzz {
  public:
    SharedFuzz(uint64_t seed, Tally* tally) : random_(seed), where_{.seed = seed, .function = ""}, tally_(tally) {
        for (uint8_t& byte : digests_) byte = static_cast<uint8_t>(random_.next());
    }
    ~SharedFuzz() {
        for (kvc_shared* pool : pools_) kvc_shared_free(pool);
        if (base_) munmap(base_, bytes_);
    }
    SharedFuzz(const SharedFuzz&) = delete;
    SharedFuzz& operator=(const SharedFuzz&) = delete;

    void run(int64_t operations) {
        if (!make()) return;
        for (where_.operation = 0; where_.operation < operations; ++where_.operation) one_operation();
        for (int user = 0; user < 2; ++user) {
            for (int64_t group = 0; group < 2; ++group)
                while (!held_[user][group].empty()) release(user, group);
            call("kvc_shared_forget", [&] { return kvc_shared_forget(pools_[user], user); });
        }
        for (int64_t group = 0; group < 2; ++group) {
            kvc_shared_stats stats{};
            call("kvc_shared_check", [&] { return kvc_shared_check(pools_[0], group); });
            if (call("kvc_shared_get_stats", [&] { return kvc_shared_get_stats(pools_[0], group, &stats); }) ||
                stats.held)
                broken(where_, "slots are held that nobody holds");
        }
        call("kvc_shared_detach", [&] { return kvc_shared_detach(pools_[0]); });
        int32_t slots[4];
        int64_t taken = 0;
        if (call("kvc_shared_take", [&] { return kvc_shared_take(pools_[0], 0, 4, slots, &taken); }) == KVC_OK)
            call("kvc_shared_release", [&] { return kvc_shared_release(pools_[0], 0, slots, taken); });
    }

  private:
    bool spite() { return random_.chance(10); }
    template <typename Body>
    int32_t call(const char* function, Body&& body) {
        where_.function = function;
        const int32_t status = body();
        check_status(where_, status, false);
        ++(*tally_)[function][status];
        return status;
    }

    bool make() {
        int64_t slots[2] = {random_.between(1, 12), random_.between(1, 5)};
        int64_t page_bytes[2] = {kPage, kLargest};
        int64_t pages_at[2] = {}, all = 0;
        if (random_.chance(20)) (random_.chance(50) ? slots : page_bytes)[random_.below(2)] = random_.hostile();
        const int64_t groups = random_.chance(90) ? 2 : random_.hostile() | INT64_C(1) << 40;
        call("kvc_shared_layout", [&] { return kvc_shared_layout(groups, slots, page_bytes, pages_at, &all); });
        if (groups != 2 || !all || slots[0] + slots[1] > 1000 || page_bytes[0] + page_bytes[1] > 9999) return false;
        bytes_ = static_cast<size_t>(all) + 4096;
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return false;
        base_ = static_cast<uint8_t*>(memory);
        largest_ = std::max(page_bytes[0], page_bytes[1]);
        int32_t error = 0;
        const auto address = reinterpret_cast<uint64_t>(base_);
        call("kvc_memory_prefer_node", [&] {
            return kvc_memory_prefer_node(address, static_cast<int64_t>(bytes_), spite() ? random_.hostile32() : 0,
                                          &error);
        });
        call("kvc_memory_populate",
             [&] { return kvc_memory_populate(address, spite() ? -1 : static_cast<int64_t>(bytes_), &error); });
        call("kvc_memory_lock", [&] { return kvc_memory_lock(spite() ? 0 : address, 4096, &error); });
        const auto size = static_cast<int64_t>(bytes_);
        if (call("kvc_shared_format", [&] {
                return kvc_shared_format(base_, spite() ? all - 1 : size, 2, slots, page_bytes, digests_, where_.seed);
            }) != KVC_OK)
            return false;
        for (int user = 0; user < 2; ++user)
            if (call("kvc_shared_new", [&] {
                    return kvc_shared_new(base_, size, 2, slots, page_bytes, digests_, user, &pools_[user]);
                }) != KVC_OK)
                return false;
        kvc_shared* other = nullptr;
        if (spite()) ++slots[random_.below(2)];
        else digests_[0] = static_cast<uint8_t>(digests_[0] + 1);
        if (call("kvc_shared_new",
                 [&] { return kvc_shared_new(base_, size, 2, slots, page_bytes, digests_, 2, &other); }) == KVC_OK)
            broken(where_, "a region of another kind was taken");
        return true;
    }

    void one_operation() {
        const int user = static_cast<int>(random_.below(2));
        const int64_t group = spite() ? random_.hostile() : random_.below(2);
        kvc_shared* pool = pools_[user];
        auto& held = held_[user][group == 1];
        const int64_t first = random_.below(kKeys), n = spite() ? -1 - random_.below(99) : random_.below(kKeys - first);
        const uint8_t* digests = digests_ + first * 32;
        const uint8_t* space = random_.chance(70) ? zeros_ : digests_;
        std::vector<int32_t> slots(kKeys, -1);
        std::vector<uint8_t> flags(kKeys);
        switch (random_.below(9)) {
            case 0:
                call("kvc_shared_present",
                     [&] { return kvc_shared_present(pool, group, space, digests, 32, n, flags.data()); });
                break;
            case 1:
                if (held.size() > 60 || call("kvc_shared_acquire", [&] {
                                            return kvc_shared_acquire(pool, group, space, digests, 32, n, slots.data());
                                        }) != KVC_OK)
                    break;
                for (int64_t i = 0; i < n; ++i)
                    if (slots[static_cast<size_t>(i)] >= 0) held.push_back(slots[static_cast<size_t>(i)]);
                break;
            case 2: {
                int64_t taken = 0;
                const int64_t wanted = std::min<int64_t>(n, 4);
                if (call("kvc_shared_take",
                         [&] { return kvc_shared_take(pool, group, wanted, slots.data(), &taken); }) == KVC_OK)
                    held.insert(held.end(), slots.begin(), slots.begin() + taken);
                break;
            }
            case 3: {
                const int32_t slot = held.empty() || spite() ? random_.hostile32() : random_.in(held);
                call("kvc_shared_publish",
                     [&] { return kvc_shared_publish(pool, group, space, digests, &slot, 1, flags.data()); });
                break;
            }
            case 4: {
                const int32_t slot = held.empty() || spite() ? random_.hostile32() : random_.in(held);
                call("kvc_shared_unpublish", [&] { return kvc_shared_unpublish(pool, group, slot); });
                break;
            }
            case 5:
                if (group == 0 || group == 1) release(user, group);
                break;
            case 6:
                copy(pool, group, held);
                break;
            case 7:
                if (held.size() > 60 || call("kvc_shared_acquire_held", [&] {
                                            return kvc_shared_acquire_held(pool, group, space, digests, 32, n,
                                                                           held.data(), std::ssize(held), slots.data());
                                        }) != KVC_OK)
                    break;
                for (int64_t i = 0; i < n; ++i)
                    if (slots[static_cast<size_t>(i)] >= 0) held.push_back(slots[static_cast<size_t>(i)]);
                break;
            default: {
                uint64_t version = 0, users = 0;
                kvc_shared_stats stats{};
                call("kvc_shared_version", [&] { return kvc_shared_version(pool, group, &version); });
                call("kvc_shared_get_stats", [&] { return kvc_shared_get_stats(pool, group, &stats); });
                call("kvc_shared_check", [&] { return kvc_shared_check(pool, group); });
                call("kvc_shared_users", [&] { return kvc_shared_users(pool, &users); });
                if (users != 3) broken(where_, "other users than came");
                call("kvc_shared_forget", [&] { return kvc_shared_forget(pool, spite() ? -1 : 63); });
            }
        }
    }

    void release(int user, int64_t group) {
        auto& held = held_[user][group];
        if (held.empty()) {
            const int32_t nobody = random_.hostile32() | 1 << 30;
            if (call("kvc_shared_release", [&] { return kvc_shared_release(pools_[user], group, &nobody, 1); }) ==
                KVC_OK)
                broken(where_, "a slot was released that does not exist");
            return;
        }
        const auto at = static_cast<size_t>(random_.below(static_cast<int64_t>(held.size())));
        if (call("kvc_shared_release", [&] { return kvc_shared_release(pools_[user], group, &held[at], 1); }) == KVC_OK)
            held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
    }

    void copy(kvc_shared* pool, int64_t group, const std::vector<int32_t>& held) {
        std::vector<uint8_t> page(static_cast<size_t>(largest_), 7), back(page.size() + 1, 9), names(64, 1);
        const auto from = reinterpret_cast<uint64_t>(page.data()), to = reinterpret_cast<uint64_t>(back.data());
        const int32_t slot = held.empty() || spite() ? random_.hostile32() : random_.in(held);
        uint8_t ok = 0;
        const int32_t stored =
            call("kvc_shared_store", [&] { return kvc_shared_store(pool, group, &from, &slot, names.data(), 1, 2); });
        const int32_t loaded =
            call("kvc_shared_load", [&] { return kvc_shared_load(pool, group, &to, &slot, names.data(), 1, 2, &ok); });
        if (stored != loaded || (!loaded && !ok)) broken(where_, "what was stored did not come back");
        if (back.back() != 9) broken(where_, "more than a page was written");
        names[63] = 2;
        if (!loaded && (kvc_shared_load(pool, group, &to, &slot, names.data(), 1, 2, &ok) || ok))
            broken(where_, "a page came under a name that it does not have");
    }

    Random random_;
    Where where_;
    Tally* tally_;
    uint8_t* base_ = nullptr;
    size_t bytes_ = 0;
    int64_t largest_ = 0;
    kvc_shared* pools_[2] = {};
    std::vector<int32_t> held_[2][2];
    uint8_t zeros_[32] = {};
    uint8_t digests_[kKeys * 32];
};

}  // namespace

void fuzz_shared(uint64_t seed, int64_t operations, Tally* tally) { SharedFuzz(seed, tally).run(operations); }

}  // namespace fuzz
