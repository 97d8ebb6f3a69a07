// What a geometry must be for the block manager.
#pragma once

#include "kvcache_core.h"

namespace kvc {

// KVC_OK, or the first thing that is wrong, with its message.
int32_t check_config(const kvc_config& config, const kvc_group* groups);

}  // namespace kvc
