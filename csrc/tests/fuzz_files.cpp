// Page files, as a hostile caller uses them: what is refused writes no file and no page.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz_pool.h"

namespace fuzz {

namespace {

// A folder of its own for the process.
class Folder {
  public:
    Folder() : path_((std::filesystem::temp_directory_path() / "kvcache-fuzz-XXXXXX").string()) {
        if (!mkdtemp(path_.data())) std::abort();
        fd_ = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    ~Folder() {
        close(fd_);
        std::filesystem::remove_all(path_);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    int fd() const { return fd_; }

  private:
    std::string path_;
    int fd_;
};

}  // namespace

void fuzz_files(uint64_t seed, Tally* tally) {
    static const Folder folder;
    constexpr int64_t kPages = 4, kPage = 300, kName = 16;
    Random random(seed);
    Where where{.seed = seed, .function = "kvc_checksum"};
    const auto count = [&](int32_t status, bool starved) {
        check_status(where, status, starved);
        ++(*tally)[where.function][status];
        return status;
    };
    std::vector<uint8_t> from(kPages * kPage, 1), to(kPages * kPage, 2), heads(kPages * 8, 3);
    uint8_t digest[16];
    count(kvc_checksum(from.data(), random.chance(80) ? random.between(0, kPages * kPage) : -1, digest), false);

    kvc_page_files files{folder.fd(), 0, 0, 2, kPage, 8, kName};
    if (random.chance(30)) files.direct = 1;
    if (random.chance(10)) files.folder = -1;
    if (random.chance(30)) {  // numbers that cannot be
        int64_t* const fields[] = {&files.page_bytes, &files.head_bytes, &files.name_bytes};
        const int64_t which = random.below(4);
        if (which < 3) *fields[which] = random.chance(50) ? -random.below(INT64_MAX) : INT64_MAX - random.below(9);
        else files.threads = random.chance(50) ? -static_cast<int32_t>(random.below(INT32_MAX)) : 1000;
    }
    std::string names(kPages * kName, '\0');
    std::vector<uint64_t> source, target;
    std::vector<int64_t> times;
    for (int64_t i = 0; i < kPages; ++i) {
        const std::string name = (random.chance(50) ? "a/" : "") + std::to_string(random.below(3));
        name.copy(&names[static_cast<size_t>(i * kName)], name.size());
        source.push_back(reinterpret_cast<uint64_t>(from.data()) + static_cast<uint64_t>(i * kPage));
        target.push_back(reinterpret_cast<uint64_t>(to.data()) + static_cast<uint64_t>(i * kPage));
        times.push_back(random.chance(95) ? random.below(INT64_MAX) : -1 - random.below(INT64_MAX));
    }
    if (random.chance(5)) names[static_cast<size_t>(random.below(kPages) * kName)] = 0;
    if (random.chance(5)) names.back() = 'x';
    if (random.chance(5)) source[0] = target[0] = 0;
    const int64_t n = random.chance(90) ? random.below(kPages + 1) : -1 - random.below(INT64_MAX);
    int32_t outcomes[kPages];
    const auto filled = [&] { std::fill_n(outcomes, kPages, -77); };
    const auto untouched = [&] { return std::all_of(outcomes, outcomes + kPages, [](int32_t o) { return o == -77; }); };
    bool starved = false;
    where.function = "kvc_page_files_write";
    filled();
    const int32_t wrote = count(starving(random, 10, &starved,
                                         [&] {
                                             return kvc_page_files_write(&files, "way", names.data(), heads.data(),
                                                                         source.data(), times.data(), n, outcomes);
                                         }),
                                starved);
    if (wrote && !untouched()) broken(where, "refused, but outcomes were written");
    where.function = "kvc_page_files_read";
    filled();
    const int32_t read = count(starving(random, 10, &starved,
                                        [&] {
                                            return kvc_page_files_read(&files, names.data(), heads.data(),
                                                                       target.data(), times.data(), n, outcomes);
                                        }),
                               starved);
    if (read && (!untouched() || std::any_of(to.begin(), to.end(), [](uint8_t byte) { return byte != 2; })))
        broken(where, "refused, but bytes or outcomes were written");
    where.function = "kvc_page_files_remove";
    count(kvc_page_files_remove(&files, names.data(), n, outcomes), false);
}

}  // namespace fuzz
