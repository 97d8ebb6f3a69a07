// Memory that gets large: asked to lie in huge pages, so that random access to it misses the TLB less.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvc {

inline constexpr size_t kHugePage = size_t{1} << 21;

template <typename T>
struct LargeAllocator {
    using value_type = T;

    LargeAllocator() = default;
    template <typename U>
    LargeAllocator(const LargeAllocator<U>&) {}

    T* allocate(size_t n) {
        const size_t bytes = n * sizeof(T);
        void* memory = ::operator new(bytes, alignment(bytes));
        // A wish: failure is no harm.
        if (bytes >= 2 * kHugePage) ::madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t n) { ::operator delete(memory, alignment(n * sizeof(T))); }

    static std::align_val_t alignment(size_t bytes) {
        return std::align_val_t{bytes >= 2 * kHugePage                   ? kHugePage
                                : alignof(T) > alignof(std::max_align_t) ? alignof(T)
                                                                         : alignof(std::max_align_t)};
    }
    bool operator==(const LargeAllocator&) const { return true; }
};

// Has the system give memory to what was reserved, before it is written for the first time; a wish too.
inline void populate([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_WRITE
    if (bytes >= 2 * kHugePage) ::madvise(memory, bytes, MADV_POPULATE_WRITE);
#endif
}

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

// An array of a fixed size, all zero at first. What was never written takes no memory once it is large.
template <typename T>
class ZeroedArray {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    ZeroedArray() = default;
    explicit ZeroedArray(size_t n) : size_(n) {
        const size_t bytes = n * sizeof(T);
        mapped_ = bytes >= kHugePage ? (bytes + kHugePage - 1) / kHugePage * kHugePage : 0;
        if (!mapped_) {
            data_ = static_cast<T*>(std::memset(::operator new(bytes, kAlignment), 0, bytes));
            return;
        }
        void* memory = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        ::madvise(memory, mapped_, MADV_HUGEPAGE);
        data_ = static_cast<T*>(memory);
    }
    ZeroedArray(ZeroedArray&& other) noexcept { swap(other); }
    ZeroedArray& operator=(ZeroedArray&& other) noexcept {
        swap(other);
        return *this;
    }
    ~ZeroedArray() {
        if (mapped_) ::munmap(data_, mapped_);
        else ::operator delete(data_, kAlignment);
    }

    void swap(ZeroedArray& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(mapped_, other.mapped_);
    }
    size_t size() const { return size_; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    T* begin() { return data_; }
    T* end() { return data_ + size_; }
    const T* begin() const { return data_; }
    const T* end() const { return data_ + size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    static constexpr std::align_val_t kAlignment{alignof(T)};

    T* data_ = nullptr;
    size_t size_ = 0;
    size_t mapped_ = 0;  // bytes of the mapping; 0: from the heap
};

}  // namespace kvc
