// operator new of the test programs: fails when `allocations_left` of the thread has run down to 0.
//
// All forms, so that a sanitizer's own ones are not mixed with these.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "fuzz.h"

namespace fuzz {
thread_local int64_t allocations_left = -1;
thread_local int64_t failed_allocations = 0;
}  // namespace fuzz

namespace {

using Bytes = std::size_t;
using Alignment = std::align_val_t;

void* try_allocate(Bytes bytes, Bytes alignment) noexcept {
    if (fuzz::allocations_left == 0) {
        ++fuzz::failed_allocations;
        return nullptr;
    }
    if (fuzz::allocations_left > 0) --fuzz::allocations_left;
    bytes = std::max<Bytes>(bytes, 1);
    if (alignment <= alignof(max_align_t)) return std::malloc(bytes);
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);  // it wants a multiple
}

void* allocate(Bytes bytes, Bytes alignment) {
    void* const memory = try_allocate(bytes, alignment);
    return memory ? memory : throw std::bad_alloc();
}

}  // namespace

void* operator new(Bytes bytes) { return allocate(bytes, 1); }
void* operator new[](Bytes bytes) { return allocate(bytes, 1); }
void* operator new(Bytes bytes, Alignment alignment) { return allocate(bytes, static_cast<Bytes>(alignment)); }
void* operator new[](Bytes bytes, Alignment alignment) { return allocate(bytes, static_cast<Bytes>(alignment)); }
void* operator new(Bytes bytes, const std::nothrow_t&) noexcept { return try_allocate(bytes, 1); }
void* operator new[](Bytes bytes, const std::nothrow_t&) noexcept { return try_allocate(bytes, 1); }

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, Bytes) noexcept { std::free(memory); }
void operator delete[](void* memory, Bytes) noexcept { std::free(memory); }
void operator delete(void* memory, Alignment) noexcept { std::free(memory); }
void operator delete[](void* memory, Alignment) noexcept { std::free(memory); }
void operator delete(void* memory, Bytes, Alignment) noexcept { std::free(memory); }
void operator delete[](void* memory, Bytes, Alignment) noexcept { std::free(memory); }
