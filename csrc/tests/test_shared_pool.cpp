// test_shared_pool [ROUNDS [SEED]]: processes that are killed at any instruction, in the middle of changes of the tables or of
// copies. The others repair what they left: sound tables, whole pages under their keys, nothing held by the dead. Exit 1
// otherwise, with the seed.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "fuzz.h"

namespace {

constexpr int64_t kGroups = 2, kKeys = 60;
constexpr int64_t kSlots[kGroups] = {24, 7}, kPages[kGroups] = {3000, 260};

// A page of a key: its digest again and again.
void digest_of(int64_t key, uint8_t digest[32]) {
    fuzz::Random random(static_cast<uint64_t>(key) + 1);
    for (int i = 0; i < 4; ++i) {
        const uint64_t word = random.next();
        std::memcpy(digest + 8 * i, &word, 8);
    }
}

class Rounds {
  public:
    Rounds(uint64_t seed, fuzz::Where where) : random_(seed), where_(where) {
        int64_t pages_at[kGroups], all = 0;
        must(kvc_shared_layout(kGroups, kSlots, kPages, pages_at, &all));
        bytes_ = all + 4096;
        base_ = static_cast<uint8_t*>(
            mmap(nullptr, static_cast<size_t>(bytes_) + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
        steps_ = new (base_ + bytes_) std::atomic<int64_t>(0);
        must(kvc_shared_format(base_, bytes_, kGroups, kSlots, kPages, zeros_, seed));
    }
    ~Rounds() { munmap(base_, static_cast<size_t>(bytes_) + 64); }
    Rounds(const Rounds&) = delete;
    Rounds& operator=(const Rounds&) = delete;

    int64_t run() {
        kvc_shared* mine = attach(0);
        for (int death = 0; death < 10; ++death) {
            const pid_t child = fork();
            const uint64_t seed = random_.next();
            if (child == 0) work(1, seed);
            const int64_t enough = steps_->load() + random_.between(1, 300);
            for (int64_t i = random_.below(20); i-- > 0;) step(mine, random_);
            for (int64_t waited = 0; steps_->load() < enough; ++waited) {
                if (waited > 1'000'000) fuzz::broken(where_, "the other process does not get on");
                usleep(30);
            }
            kill(child, SIGKILL);
            waitpid(child, nullptr, 0);
            must(kvc_shared_forget(mine, 1));
            for (int64_t group = 0; group < kGroups; ++group) {
                must(kvc_shared_check(mine, group));
                kvc_shared_stats stats{};
                must(kvc_shared_get_stats(mine, group, &stats));
                if (stats.held != stats.mine) fuzz::broken(where_, "the dead hold %d", static_cast<int>(stats.held));
                recoveries_ = stats.recoveries;
            }
            for (int64_t key = 0; key < kKeys; ++key) load(mine, key % kGroups, key);
        }
        kvc_shared_free(mine);
        return recoveries_;
    }

  private:
    void must(int32_t status) {
        if (status) fuzz::broken(where_, "status %d: %s", status, kvc_last_error());
    }
    kvc_shared* attach(int user) {
        kvc_shared* pool = nullptr;
        must(kvc_shared_new(base_, bytes_, kGroups, kSlots, kPages, zeros_, user, &pool));
        return pool;
    }
    [[noreturn]] void work(int user, uint64_t seed) {
        kvc_shared* pool = attach(user);
        fuzz::Random random(seed);
        for (;; ++*steps_) step(pool, random);
    }
    // Loads a key, or stores it; now and then keeps what it holds for ever, if it is to be killed.
    void step(kvc_shared* pool, fuzz::Random& random) {
        if (random.chance(3)) return hold_many(pool, random.below(kGroups));
        const int64_t key = random.below(kKeys), group = key % kGroups;
        if (random.chance(50) && load(pool, group, key)) return;
        int32_t slot = -1;
        int64_t taken = 0;
        if (kvc_shared_take(pool, group, 1, &slot, &taken) != KVC_OK || !taken) return;
        uint8_t name[64] = {}, published = 0;
        digest_of(key, name + 32);
        std::vector<uint8_t> page(static_cast<size_t>(kPages[group]));
        for (size_t i = 0; i < page.size(); ++i) page[i] = name[32 + i % 32];
        const auto from = reinterpret_cast<uint64_t>(page.data());
        must(kvc_shared_store(pool, group, &from, &slot, name, 1, 2));
        if (kvc_shared_publish(pool, group, name, name + 32, &slot, 1, &published) < 0) must(-1);
        if (kvc_shared_release(pool, group, &slot, 1) < 0) must(-1);
    }
    // More keys than are looked up, and more slots than are let go, under one lock.
    void hold_many(kvc_shared* pool, int64_t group) {
        constexpr int64_t kMany = 20'000;
        std::vector<uint8_t> digests(kMany * 32);
        for (int64_t i = 0; i < kMany; ++i) digest_of(i % kKeys, &digests[static_cast<size_t>(i) * 32]);
        std::vector<int32_t> slots(kMany, -1);
        const int32_t status = kvc_shared_acquire(pool, group, zeros_, digests.data(), 32, kMany, slots.data());
        if (status < 0) must(status);
        std::erase(slots, -1);
        if (status && !slots.empty()) fuzz::broken(where_, "a lookup that got no answer holds slots");
        if (kvc_shared_release(pool, group, slots.data(), std::ssize(slots)) < 0) must(-1);
    }
    // True: it was there, with every byte.
    bool load(kvc_shared* pool, int64_t group, int64_t key) {
        uint8_t name[64] = {}, ok = 0;
        digest_of(key, name + 32);
        int32_t slot = -1;
        if (kvc_shared_acquire(pool, group, name, name + 32, 32, 1, &slot) != KVC_OK || slot < 0) return false;
        std::vector<uint8_t> page(static_cast<size_t>(kPages[group]));
        const auto to = reinterpret_cast<uint64_t>(page.data());
        must(kvc_shared_load(pool, group, &to, &slot, name, 1, 2, &ok));
        if (!ok) fuzz::broken(where_, "key %d has another checksum", static_cast<int>(key));
        for (size_t i = 0; i < page.size(); ++i)
            if (page[i] != name[32 + i % 32]) fuzz::broken(where_, "key %d has a wrong byte", static_cast<int>(key));
        if (kvc_shared_release(pool, group, &slot, 1) < 0) must(-1);
        return true;
    }

    fuzz::Random random_;
    fuzz::Where where_;
    uint8_t* base_;
    int64_t bytes_ = 0;
    std::atomic<int64_t>* steps_;  // of all that are to be killed, behind the region
    int64_t recoveries_ = 0;
    uint8_t zeros_[32] = {};
};

}  // namespace

int main(int argc, char** argv) {
    const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 20;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    int64_t recoveries = 0;
    for (int64_t i = 0; i < rounds; ++i) {
        const uint64_t seed = first + static_cast<uint64_t>(i);
        recoveries += Rounds(seed, {.seed = seed, .function = "shared pool"}).run();
    }
    std::printf("%lld rounds, %lld repairs\n", static_cast<long long>(rounds), static_cast<long long>(recoveries));
    return rounds < 20 || recoveries ? 0 : 1;  // killed in the middle of a change now and then, or it tests nothing
}
