// test_page_files [ROUNDS [SEED]]: pages to files and back, at random: what a file holds, byte for byte, and that damage of
// any byte or of its length is noticed. Exit 1 at the first difference, with the seed.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

using fuzz::broken;
using fuzz::Random;
using Bytes = std::vector<uint8_t>;

constexpr int64_t kHead = 24, kName = 12, kUnit = 4096, kGuard = 64;

Bytes content(const std::string& path) {
    Bytes bytes(std::filesystem::file_size(path));
    const int fd = open(path.c_str(), O_RDONLY);
    if (fd < 0 || read(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
    close(fd);
    return bytes;
}

void overwrite(const std::string& path, const Bytes& bytes) {
    const int fd = open(path.c_str(), O_WRONLY | O_TRUNC);
    if (fd < 0 || write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
    close(fd);
}

// Pages with guards between them, on a boundary of direct access or beside it.
class Pages {
  public:
    Pages(Random& random, int64_t n, int64_t bytes, uint8_t fill) : bytes_(bytes) {
        const bool aligned = random.chance(50);
        stride_ = aligned ? (bytes + kGuard + kUnit - 1) / kUnit * kUnit : bytes + kGuard;
        memory_.assign(static_cast<size_t>(n * stride_ + 2 * kUnit + kGuard), fill);
        const uint64_t begin = reinterpret_cast<uint64_t>(memory_.data());
        first_ = aligned ? (begin + kUnit - 1) / kUnit * kUnit : begin + 1;
        for (int64_t i = 0; i < n; ++i) at.push_back(first_ + static_cast<uint64_t>(i * stride_));
    }
    uint8_t* page(int64_t i) { return reinterpret_cast<uint8_t*>(at[static_cast<size_t>(i)]); }
    bool guards_hold(uint8_t fill) {
        for (size_t i = 0; i < at.size(); ++i)
            for (int64_t j = 0; j < kGuard; ++j)
                if (page(static_cast<int64_t>(i))[bytes_ + j] != fill) return false;
        return true;
    }
    std::vector<uint64_t> at;

  private:
    int64_t bytes_, stride_ = 0;
    uint64_t first_ = 0;
    Bytes memory_;
};

class Rounds {
  public:
    Rounds(std::string folder, uint64_t seed) : folder_(std::move(folder)), random_(seed), where_{.seed = seed} {
        files_.folder = open(folder_.c_str(), O_RDONLY | O_DIRECTORY);
        files_.head_bytes = kHead;
        files_.name_bytes = kName;
    }
    ~Rounds() { close(files_.folder); }
    Rounds(const Rounds&) = delete;
    Rounds& operator=(const Rounds&) = delete;

    void run() {
        files_.page_bytes = random_.one_of<int64_t>({1, 100, 241, 4095, 4096, 4097, 8192, 50'000, 65'536});
        files_.threads = static_cast<int32_t>(random_.between(1, 4));
        files_.durable = random_.chance(10);
        files_.direct = random_.chance(50);
        const int64_t n = random_.below(7);
        Pages from(random_, n, files_.page_bytes, 7), to(random_, n, files_.page_bytes, 9);
        Bytes heads(static_cast<size_t>(n * kHead));
        std::string names(static_cast<size_t>(n * kName), '\0');
        std::vector<int64_t> times;
        std::vector<int32_t> outcomes(static_cast<size_t>(n), 1);
        for (uint8_t& byte : heads) byte = static_cast<uint8_t>(random_.next());
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t j = 0; j < files_.page_bytes; ++j) from.page(i)[j] = static_cast<uint8_t>(random_.next());
            const std::string name = std::to_string(i % 2) + "/" + std::to_string(i);
            name.copy(&names[static_cast<size_t>(i * kName)], name.size());
            times.push_back(1'700'000'000'000'000'000 + random_.below(1'000'000'000'000));
        }
        where_.function = "kvc_page_files_write";
        call(kvc_page_files_write(&files_, "way", names.data(), heads.data(), from.at.data(), times.data(), n,
                                  outcomes.data()));
        if (n && outcomes[0] == EINVAL && files_.direct) return;  // a file system without direct access
        for (int64_t i = 0; i < n; ++i) check_file(i, outcomes[static_cast<size_t>(i)], heads, from, times);
        std::vector<int32_t> expected(static_cast<size_t>(n), 0);
        for (int64_t i = 0; i < n; ++i)
            if (random_.chance(50)) expected[static_cast<size_t>(i)] = damage(path(i));
        where_.function = "kvc_page_files_read";
        call(kvc_page_files_read(&files_, names.data(), heads.data(), to.at.data(), times.data(), n, outcomes.data()));
        if (!to.guards_hold(9)) broken(where_, "bytes beside a page were written");
        for (int64_t i = 0; i < n; ++i) {
            const int32_t wanted = expected[static_cast<size_t>(i)], got = outcomes[static_cast<size_t>(i)];
            if (got != wanted) broken(where_, "file %d gave %d, not %d", static_cast<int>(i), got, wanted);
            if (!got && std::memcmp(from.page(i), to.page(i), static_cast<size_t>(files_.page_bytes)) != 0)
                broken(where_, "other bytes came back");
            if (std::filesystem::exists(path(i)) != (got == 0))
                broken(where_, "a bad file is there, or a good one gone");
        }
        where_.function = "kvc_page_files_remove";
        call(kvc_page_files_remove(&files_, names.data(), n, outcomes.data()));
        for (int64_t i = 0; i < n; ++i)
            if (outcomes[static_cast<size_t>(i)] || std::filesystem::exists(path(i))) broken(where_, "a file is left");
    }

  private:
    std::string path(int64_t i) const { return folder_ + "/" + std::to_string(i % 2) + "/" + std::to_string(i); }

    void call(int32_t status) {
        if (status) broken(where_, "status %d: %s", status, kvc_last_error());
    }

    void check_file(int64_t i, int32_t outcome, const Bytes& heads, Pages& from, const std::vector<int64_t>& times) {
        if (outcome) broken(where_, "file %d was not written: %s", static_cast<int>(i), std::strerror(outcome));
        struct stat about{};
        stat(path(i).c_str(), &about);
        if (about.st_mtim.tv_sec * 1'000'000'000 + about.st_mtim.tv_nsec != times[static_cast<size_t>(i)])
            broken(where_, "a file of another time");
        Bytes found = content(path(i));
        Bytes wanted(static_cast<size_t>(kvc_page_file_bytes(files_.page_bytes)), 0);
        std::memcpy(wanted.data(), heads.data() + i * kHead, kHead);
        std::memcpy(wanted.data() + kUnit, from.page(i), static_cast<size_t>(files_.page_bytes));
        uint8_t sum[16];
        call(kvc_checksum(wanted.data(), static_cast<int64_t>(wanted.size()), sum));
        std::memcpy(wanted.data() + kHead, sum, 16);
        if (found != wanted) broken(where_, "file %d holds other bytes", static_cast<int>(i));
    }

    // What reading it is to say.
    int32_t damage(const std::string& file) {
        Bytes bytes = content(file);
        const auto at = static_cast<size_t>(random_.below(static_cast<int64_t>(bytes.size())));
        switch (random_.below(4)) {
            case 0:
                std::filesystem::remove(file);
                return ENOENT;
            case 1:
                bytes.resize(at);
                overwrite(file, bytes);
                return KVC_PAGE_LENGTH;
            case 2:
                bytes.push_back(0);
                overwrite(file, bytes);
                return KVC_PAGE_LENGTH;
            default:
                bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << random_.below(8));
                overwrite(file, bytes);
                return at < kHead ? KVC_PAGE_HEAD : KVC_PAGE_CHECKSUM;
        }
    }

    std::string folder_;
    Random random_;
    fuzz::Where where_;
    kvc_page_files files_{};
};

}  // namespace

int main(int argc, char** argv) {
    const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 500;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    std::string folder = (std::filesystem::temp_directory_path() / "kvcache-pages-XXXXXX").string();
    if (!mkdtemp(folder.data())) return std::perror(folder.c_str()), 1;
    for (int64_t i = 0; i < rounds; ++i) Rounds(folder, first + static_cast<uint64_t>(i)).run();
    std::filesystem::remove_all(folder);
    std::printf("%lld rounds\n", static_cast<long long>(rounds));
    return 0;
}
