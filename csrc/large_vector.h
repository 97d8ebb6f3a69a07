// A vector whose memory is asked to lie in huge pages once it is large: random access to it misses the TLB less.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace kvc {

template <typename T>
struct LargeAllocator {
    using value_type = T;
    static constexpr size_t kHuge = size_t{1} << 21;

    LargeAllocator() = default;
    template <typename U>
    LargeAllocator(const LargeAllocator<U>&) {}

    T* allocate(size_t n) {
        const size_t bytes = n * sizeof(T);
        void* memory = ::operator new(bytes, alignment(bytes));
        if (bytes >= 2 * kHuge) ::madvise(memory, bytes / kHuge * kHuge, MADV_HUGEPAGE);  // a wish: failure is no harm
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t n) { ::operator delete(memory, alignment(n * sizeof(T))); }

    static std::align_val_t alignment(size_t bytes) {
        return std::align_val_t{bytes >= 2 * kHuge                       ? kHuge
                                : alignof(T) > alignof(std::max_align_t) ? alignof(T)
                                                                         : alignof(std::max_align_t)};
    }
    bool operator==(const LargeAllocator&) const { return true; }
};

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

}  // namespace kvc
