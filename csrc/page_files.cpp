// Pages in files, one each: written under another name and renamed, read and verified. Several at a time.
//
//     0        head | checksum | zeros                4096     the head says what the page is of: the caller's affair
//     4096     page | zeros                           a multiple of 4096
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "copy_stream.h"
#include "error.h"
#include "workers.h"
#include "xxh3.h"

namespace {

using kvc::CopyStream;
using kvc::fail;
using kvc::vector_path;
using kvc::Xxh3;
using Longs = long long;

constexpr int64_t kUnit = 4096;  // what direct reads and writes are aligned to
constexpr int64_t kMostHead = kUnit - static_cast<int64_t>(Xxh3::kDigest);
constexpr int64_t kMostPage = int64_t{1} << 42;

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory aligned(int64_t bytes) {
    Memory memory(static_cast<uint8_t*>(std::aligned_alloc(kUnit, static_cast<size_t>(bytes))));
    if (!memory) throw std::bad_alloc();
    return memory;
}

class Descriptor {
  public:
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return fd_; }
    // Of one that holds nothing yet.
    int reset(int fd) { return fd_ = fd; }
    // An errno or 0. Some file systems say only now that a write has failed.
    int close() { return ::close(std::exchange(fd_, -1)) ? errno : 0; }

  private:
    int fd_;
};

template <typename Call>
auto retried(Call&& call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// Where a name leads: the folder it is in, and what it is there. Links are not followed.
class Place {
  public:
    Place(int root, const char* name) : folder_(-1), at_(root), leaf_(name) {
        const char* const slash = std::strchr(name, '/');
        if (!slash) return;
        const std::string folder(name, slash);
        const auto open = [&] { return ::openat(root, folder.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); };
        at_ = folder_.reset(retried(open));
        error_ = at_ < 0 ? errno : 0;
        leaf_ = slash + 1;
    }
    int error() const { return error_; }  // an errno or 0; where it is not 0, folder() is none
    int folder() const { return at_; }
    const char* leaf() const { return leaf_; }
    // An errno or 0.
    int unlink() const { return error_ ? error_ : ::unlinkat(at_, leaf_, 0) ? errno : 0; }

  private:
    Descriptor folder_;
    int at_, error_ = 0;
    const char* leaf_;
};

int64_t body_bytes(const kvc_page_files& files) { return (files.page_bytes + kUnit - 1) / kUnit * kUnit; }

int32_t check(const kvc_page_files* files, const char* names, int64_t n, const int32_t* outcomes) {
    if (!files) return fail(KVC_E_ARGUMENT, "files is NULL");
    if (n < 0 || (n && !(names && outcomes)))
        return fail(KVC_E_ARGUMENT, "%lld files: names and outcomes must not be NULL", static_cast<Longs>(n));
    if (!kvc_page_file_bytes(files->page_bytes) || files->head_bytes < 1 || files->head_bytes > kMostHead ||
        files->name_bytes < 2 || files->name_bytes > kUnit || files->threads < 1 || files->threads > kvc::kMostThreads)
        return fail(
            KVC_E_ARGUMENT,
            "pages of %lld bytes, heads of %lld, names of %lld, %d threads: from 1 to %lld, %lld, %lld (names: from"
            " 2) and %d",
            static_cast<Longs>(files->page_bytes), static_cast<Longs>(files->head_bytes),
            static_cast<Longs>(files->name_bytes), files->threads, static_cast<Longs>(kMostPage),
            static_cast<Longs>(kMostHead), static_cast<Longs>(kUnit), kvc::kMostThreads);
    for (int64_t i = 0; i < n; ++i)
        if (names[i * files->name_bytes] == 0 || names[(i + 1) * files->name_bytes - 1] != 0)
            return fail(KVC_E_ARGUMENT, "name %lld is empty or has no zero byte at its end", static_cast<Longs>(i));
    return KVC_OK;
}

int32_t check_pages(const uint8_t* heads, const uint64_t* pages, const int64_t* times, int64_t n) {
    if (n && !(heads && pages && times))
        return fail(KVC_E_ARGUMENT, "%lld files: heads, pages and times must not be NULL", static_cast<Longs>(n));
    for (int64_t i = 0; i < n; ++i)
        if (!pages[i] || times[i] < 0)
            return fail(KVC_E_ARGUMENT, "page %lld is NULL, or of a time before 1970", static_cast<Longs>(i));
    return KVC_OK;
}

// ---- one file -------------------------------------------------------------------------------------------------------

// What one thread works with. Pages that fill whole units, and lie as direct access wants them, are moved in place;
// the others go through `body`.
class Worker {
  public:
    explicit Worker(const kvc_page_files& files)
        : files_(files), head_(aligned(kUnit)), direct_(files.direct ? O_DIRECT : 0) {}

    int32_t write(const char* temporary, const char* name, const uint8_t* head, uint64_t page, int64_t time) {
        if (const int error = write_temporary(temporary, head, page, time)) return abandoned(temporary, error);
        if (const int error = publish(temporary, name)) return abandoned(temporary, error);
        return 0;
    }

    int32_t read(const char* name, const uint8_t* head, uint64_t page, int64_t time) {
        const Place place(files_.folder, name);
        if (place.error()) return place.error();
        const int32_t outcome = verified(place, head, page, time);
        if (outcome < 0) place.unlink();
        return outcome;
    }

  private:
    // In a folder of another user's the file stays as old as it is.
    static void set_time(int file, int64_t time) {
        constexpr int64_t second = 1'000'000'000;
        const timespec times[2] = {{0, UTIME_OMIT}, {time / second, time % second}};
        ::futimens(file, times);
    }

    int open(int folder, const char* name, int flags) {
        return retried([&] { return ::openat(folder, name, flags | direct_ | O_CLOEXEC | O_NOFOLLOW, 0600); });
    }

    bool in_place(uint64_t page) const { return files_.page_bytes % kUnit == 0 && (!direct_ || page % kUnit == 0); }

    // Where the body of a file is read from or written to.
    uint8_t* body(uint64_t page) {
        if (in_place(page)) return std::bit_cast<uint8_t*>(page);
        if (!body_) {
            body_ = aligned(body_bytes(files_));
            std::memset(body_.get() + files_.page_bytes, 0,
                        static_cast<size_t>(body_bytes(files_) - files_.page_bytes));
        }
        return body_.get();
    }

    // Copies as it goes where `from` is another place, so that each byte is read from memory once.
    void sum(const uint8_t* from, uint8_t* at, uint8_t* digest) {
        constexpr size_t block = Xxh3::kBlock;
        Xxh3 hash;
        hash.blocks(head_.get(), kUnit / block);
        const auto page = static_cast<size_t>(files_.page_bytes), all = static_cast<size_t>(body_bytes(files_));
        if (from == at) return hash.finish(at, all, digest);
        const size_t whole = (page - 1) / block * block;
        for (size_t done = 0; done < whole;) {
            const size_t part = std::min(whole - done, 16 * block);  // stays in the first cache
            std::memcpy(at + done, from + done, part);
            hash.blocks(at + done, part / block);
            done += part;
        }
        std::memcpy(at + whole, from + whole, page - whole);
        hash.finish(at + whole, all - whole, digest);
    }

    void fill_head(const uint8_t* head) {
        const auto bytes = static_cast<size_t>(files_.head_bytes);
        std::memset(head_.get(), 0, kUnit);
        std::memcpy(head_.get(), head, bytes);
    }

    // All of head and body. 0, an errno, or -1 where the file ends before.
    template <typename Move>
    int move_all(uint8_t* at, Move&& move) {
        iovec parts[2] = {{head_.get(), kUnit}, {at, static_cast<size_t>(body_bytes(files_))}};
        off_t done = 0;
        for (iovec* part = parts; part < parts + 2;) {
            const ssize_t n = retried([&] { return move(part, static_cast<int>(parts + 2 - part), done); });
            if (n < 0) return errno;
            if (n == 0) return -1;
            done += n;
            auto left = static_cast<size_t>(n);
            while (part < parts + 2 && left >= part->iov_len) left -= part++->iov_len;
            if (part < parts + 2) {
                part->iov_base = static_cast<uint8_t*>(part->iov_base) + left;
                part->iov_len -= left;
            }
        }
        return 0;
    }

    int write_temporary(const char* temporary, const uint8_t* head, uint64_t page, int64_t time) {
        uint8_t* const at = body(page);
        Descriptor file(open(files_.folder, temporary, O_WRONLY | O_CREAT | O_TRUNC));
        if (file.get() < 0) return errno;
        fill_head(head);
        sum(std::bit_cast<const uint8_t*>(page), at, head_.get() + files_.head_bytes);
        const int error =
            move_all(at, [&](iovec* part, int n, off_t offset) { return ::pwritev(file.get(), part, n, offset); });
        if (error) return error < 0 ? EIO : error;
        set_time(file.get(), time);
        if (files_.durable && retried([&] { return ::fdatasync(file.get()); })) return errno;
        return file.close();
    }

    int publish(const char* temporary, const char* name) {
        for (bool again = true;; again = false) {
            const Place place(files_.folder, name);
            int error = place.error();
            if (!error && ::renameat(files_.folder, temporary, place.folder(), place.leaf())) error = errno;
            if (!again || (error != ENOENT && error != ENOTDIR)) return error;
            const std::string folder(name, std::strcspn(name, "/"));             // the first of its folder?
            if (error == ENOTDIR) ::unlinkat(files_.folder, folder.c_str(), 0);  // a file or a link in its place
            if (::mkdirat(files_.folder, folder.c_str(), 0700) && errno != EEXIST) return errno;
        }
    }

    int abandoned(const char* temporary, int error) {
        ::unlinkat(files_.folder, temporary, 0);
        return error;
    }

    int32_t verified(const Place& place, const uint8_t* head, uint64_t page, int64_t time) {
        // A pipe in a file's place would be waited for.
        Descriptor file(open(place.folder(), place.leaf(), O_RDONLY | O_NONBLOCK));
        if (file.get() < 0) return errno;
        struct stat about{};
        if (::fstat(file.get(), &about)) return errno;
        if (!S_ISREG(about.st_mode) || about.st_size != kvc_page_file_bytes(files_.page_bytes)) return KVC_PAGE_LENGTH;
        uint8_t* const at = body(page);
        const int error =
            move_all(at, [&](iovec* part, int n, off_t offset) { return ::preadv(file.get(), part, n, offset); });
        if (error) return error < 0 ? KVC_PAGE_LENGTH : error;
        const auto bytes = static_cast<size_t>(files_.head_bytes);
        if (std::memcmp(head_.get(), head, bytes) != 0) return KVC_PAGE_HEAD;
        uint8_t found[Xxh3::kDigest], stored[Xxh3::kDigest];
        std::memcpy(stored, head_.get() + bytes, sizeof stored);
        std::memset(head_.get() + bytes, 0, sizeof stored);
        sum(at, at, found);
        if (std::memcmp(found, stored, sizeof stored) != 0) return KVC_PAGE_CHECKSUM;
        const auto to = std::bit_cast<uint8_t*>(page);
        if (at != to) CopyStream(vector_path()).move(to, at, static_cast<uint64_t>(files_.page_bytes));
        set_time(file.get(), time);
        return 0;
    }

    const kvc_page_files& files_;
    Memory head_, body_;
    int direct_;
};

// ---- many -----------------------------------------------------------------------------------------------------------

// outcomes[i] = body(worker, i) for each i < n, by as many threads as there are. Where memory runs out, what is not done
// by then has ENOMEM.
template <typename Body>
void for_each(const kvc_page_files& files, int64_t n, int32_t* outcomes, Body&& body) noexcept {
    std::fill_n(outcomes, n, ENOMEM);
    std::atomic<int64_t> next = 0;
    const auto run = [&] {
        try {
            Worker worker(files);
            for (int64_t i = next++; i < n; i = next++) outcomes[i] = body(worker, i);
        } catch (const std::bad_alloc&) {
        }
    };
    kvc::work_together(std::min<int64_t>(files.threads, n), run);
}

// The folders that new names are in. A file whose name may not outlive a loss of power is none.
void sync_folders(const kvc_page_files& files, const char* names, int64_t n, int32_t* outcomes) {
    const auto sync = [&](const char* folder) -> int32_t {
        const Descriptor fd(::openat(files.folder, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        return fd.get() < 0 || ::fsync(fd.get()) ? errno : 0;
    };
    const int32_t root = sync(".");  // new folders
    std::map<std::string_view, int32_t> synced;
    for (int64_t i = 0; i < n; ++i) {
        if (outcomes[i]) continue;
        const char* const name = names + i * files.name_bytes;
        const char* const slash = std::strchr(name, '/');
        const auto [found, first] = synced.try_emplace(slash ? std::string_view(name, slash) : ".", root);
        if (first && !root) found->second = sync(std::string(found->first).c_str());
        outcomes[i] = found->second;
        if (outcomes[i]) Place(files.folder, name).unlink();
    }
}

}  // namespace

extern "C" {

int64_t kvc_page_head_bytes(void) { return kMostHead; }

int64_t kvc_page_file_bytes(int64_t page_bytes) {
    if (page_bytes < 1 || page_bytes > kMostPage) return 0;
    return kUnit + (page_bytes + kUnit - 1) / kUnit * kUnit;
}

int32_t kvc_page_files_write(const kvc_page_files* files, const char* temporary, const char* names,
                             const uint8_t* heads, const uint64_t* pages, const int64_t* times, int64_t n,
                             int32_t* outcomes) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = check(files, names, n, outcomes)) return status;
        if (const auto status = check_pages(heads, pages, times, n)) return status;
        if (!temporary || !*temporary) return fail(KVC_E_ARGUMENT, "temporary is NULL or empty");
        std::atomic<int> full = 0;
        for_each(*files, n, outcomes, [&](Worker& worker, int64_t i) -> int32_t {
            if (full) return full;
            const std::string own = temporary + std::to_string(i);
            const int32_t outcome = worker.write(own.c_str(), names + i * files->name_bytes,
                                                 heads + i * files->head_bytes, pages[i], times[i]);
            if (outcome == ENOSPC || outcome == EDQUOT) full = outcome;
            return outcome;
        });
        if (files->durable) sync_folders(*files, names, n, outcomes);
        return KVC_OK;
    });
}

int32_t kvc_page_files_read(const kvc_page_files* files, const char* names, const uint8_t* heads, const uint64_t* pages,
                            const int64_t* times, int64_t n, int32_t* outcomes) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = check(files, names, n, outcomes)) return status;
        if (const auto status = check_pages(heads, pages, times, n)) return status;
        for_each(*files, n, outcomes, [&](Worker& worker, int64_t i) {
            return worker.read(names + i * files->name_bytes, heads + i * files->head_bytes, pages[i], times[i]);
        });
        return KVC_OK;
    });
}

int32_t kvc_page_files_remove(const kvc_page_files* files, const char* names, int64_t n, int32_t* outcomes) {
    return kvc::guarded([&]() -> int32_t {
        if (const auto status = check(files, names, n, outcomes)) return status;
        for (int64_t i = 0; i < n; ++i) {
            const int error = Place(files->folder, names + i * files->name_bytes).unlink();
            outcomes[i] = error == ENOENT ? 0 : error;
        }
        return KVC_OK;
    });
}
}
