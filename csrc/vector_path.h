// Which vector instructions may run: those of the CPU, or fewer where KVCACHE_COPY_PATH asks for fewer.
#pragma once

#include <cstdint>

namespace kvc {

enum class VectorPath : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// Chosen at the first call, for good.
VectorPath vector_path();

}  // namespace kvc
