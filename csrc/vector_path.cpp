// The choice of `vector_path.h`.
#include "vector_path.h"

#include <cstdlib>
#include <string_view>

namespace kvc {

namespace {

// KVCACHE_COPY_PATH=avx2 or memcpy asks for less than the CPU can do: for tests and for comparison.
VectorPath choose() {
#if defined(__x86_64__)
    const char* setting = std::getenv("KVCACHE_COPY_PATH");
    const std::string_view wanted = setting ? setting : "";
    if (wanted == "memcpy") return VectorPath::kPortable;
    if (__builtin_cpu_supports("avx512f") && wanted != "avx2") return VectorPath::kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return VectorPath::kAvx2;
#endif
    return VectorPath::kPortable;
}

}  // namespace

VectorPath vector_path() {
    static const VectorPath chosen = choose();
    return chosen;
}

}  // namespace kvc
