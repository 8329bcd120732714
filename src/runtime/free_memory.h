#pragma once

#include <cstdint>

#include "runtime/context.h"

namespace heddle::runtime {

/// Bytes that tensors of this rank may take besides what they hold (device::free_bytes); on
/// processors its share, because the ranks of a host have one memory.
std::int64_t free_bytes(const Context& context);

}  // namespace heddle::runtime
