// test_threads [ROUNDS]: what threads may share, and what is refused.
//
// Different managers, pools, hashes and copies run side by side; a second thread inside one manager or pool is refused,
// whatever it calls, and nothing is spoiled by that. Meant for a build with ThreadSanitizer. A join has no deadline of its
// own: the whole program has one.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <latch>
#include <new>
#include <thread>
#include <vector>

#include "error.h"
#include "exclusive.h"
#include "fuzz_manager.h"
#include "fuzz_pool.h"

namespace {

constexpr int kThreads = 4;
constexpr unsigned kDeadlineSeconds = 900;

[[noreturn]] void too_late(int) {
    constexpr char text[] = "not at its end within 900 seconds: a thread waits for ever\n";
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(2);
    _exit(1);
}

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

template <typename Body>
void on_threads(Body&& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back([&body, i] { body(i); });
    for (std::thread& thread : threads) thread.join();
}

// Both SHA-256 paths, chosen for the first time by several threads at once.
void hashes_side_by_side() {
    std::vector<int32_t> tokens(4096, 3);
    std::vector<uint8_t> digests[kThreads];
    const uint8_t parent[32] = {};
    on_threads([&](int i) {
        digests[i].resize(256 * 32);
        expect(kvc_hash_chain(i % 2, parent, tokens.data(), 256, 16, digests[i].data()) == KVC_OK, "a hash failed");
    });
    for (const auto& other : digests) expect(other == digests[0], "threads hash differently");
}

void copies_side_by_side() {
    constexpr int64_t kPage = 4096, kPages = 32;
    std::vector<uint8_t> from(kPage * kPages), to[kThreads];
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + i / 4096);
    std::vector<int32_t> pages;
    for (int32_t i = 0; i < kPages; ++i) pages.push_back(i);
    on_threads([&](int i) {
        to[i].resize(from.size());
        const kvc_segment segment{reinterpret_cast<uint64_t>(from.data()),
                                  reinterpret_cast<uint64_t>(to[i].data()),
                                  kPage,
                                  kPage,
                                  kPage,
                                  kPages,
                                  kPages};
        const kvc_copy_plan plan{&segment, pages.data(), pages.data(), 1, kPages};
        expect(kvc_copy(&plan, 1) == KVC_OK, "a copy failed");
    });
    for (const auto& copied : to) expect(copied == from, "a copy is not what was copied");
}

void managers_side_by_side(int rounds) {
    on_threads([&](int i) {
        fuzz::Tally tally;
        for (int round = 0; round < rounds; ++round) {
            const auto seed = static_cast<uint64_t>(round * kThreads + i);
            fuzz::ManagerFuzz manager(seed, &tally);
            if (manager.made()) manager.run(200);
            fuzz::fuzz_pool(seed, 200, &tally);
        }
    });
}

void the_text_of_an_error_is_the_threads_own() {
    std::latch both(kThreads);
    on_threads([&](int i) {
        kvc_sha256(100 + i, nullptr, 0, nullptr);
        both.arrive_and_wait();
        const std::string wanted = "path " + std::to_string(100 + i);
        expect(std::strstr(kvc_last_error(), wanted.c_str()), "an error has the text of another thread");
    });
}

void a_second_thread_is_refused_while_the_first_is_inside() {
    kvc::Exclusive exclusive;
    std::latch inside(1), leave(1);
    int32_t first = -1;
    std::thread owner([&] {
        first = kvc::exclusively(exclusive, "thing", [&]() -> int32_t {
            inside.count_down();
            leave.wait();
            return KVC_OK;
        });
    });
    const auto nothing = []() -> int32_t { return KVC_OK; };
    inside.wait();
    expect(kvc::exclusively(exclusive, "thing", nothing) == KVC_E_STATE, "a second thread got in");
    expect(std::strstr(kvc_last_error(), "two threads are in one thing"), "the refusal does not say why");
    leave.count_down();
    owner.join();
    expect(first == KVC_OK && kvc::exclusively(exclusive, "thing", nothing) == KVC_OK, "nobody gets in any more");
    const int32_t thrown = kvc::exclusively(exclusive, "thing", []() -> int32_t { throw std::bad_alloc(); });
    expect(thrown == KVC_E_MEMORY && kvc::exclusively(exclusive, "thing", nothing) == KVC_OK,
           "an exception locks everybody out");
}

// One thread opens long prompts, the other asks until it was refused: OK or KVC_E_STATE, never anything else.
void a_shared_manager_refuses_and_survives() {
    const fuzz::Setup setup = fuzz::full_setup();
    kvc_manager* manager = nullptr;
    expect(setup.make(&manager) == KVC_OK, "no manager");
    std::atomic<bool> refused{false};
    std::thread owner([&] {
        const std::vector<int32_t> tokens(64, 5);
        const uint8_t root[32] = {};
        kvc_open_args args{};
        args.root = root;
        args.tokens = tokens.data();
        args.n_tokens = args.max_tokens = 64;
        while (!refused) {
            int64_t handle = 0;
            int32_t status = kvc_open(manager, &args, &handle);
            while (status == KVC_OK && (status = kvc_abort(manager, handle)) == KVC_E_STATE) status = KVC_OK;
            expect(status == KVC_OK || status == KVC_E_STATE, "a call failed for another reason");
            refused = refused || status == KVC_E_STATE;
        }
    });
    kvc_manager_stats stats{};
    while (!refused) {
        const int32_t status = kvc_manager_get_stats(manager, &stats);
        expect(status == KVC_OK || status == KVC_E_STATE, "a call failed for another reason");
        if (status == KVC_E_STATE) refused = true;
    }
    owner.join();
    expect(kvc_check(manager) == KVC_OK, "a refused call has spoiled the manager");
    kvc_manager_free(manager);
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGALRM, too_late);
    alarm(kDeadlineSeconds);
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
    hashes_side_by_side();
    copies_side_by_side();
    the_text_of_an_error_is_the_threads_own();
    a_second_thread_is_refused_while_the_first_is_inside();
    a_shared_manager_refuses_and_survives();
    managers_side_by_side(rounds);
    std::printf("%d threads, %d rounds: as they should be\n", kThreads, rounds);
    return 0;
}
