#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace {
thread_local char last_error[512] = "";
}

namespace kvc {

int32_t fail(int32_t status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

}  // namespace kvc

extern "C" {

int32_t kvc_abi_version(void) { return 1; }

const char* kvc_last_error(void) { return last_error; }
}
