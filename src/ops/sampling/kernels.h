#pragma once

#include <cstdint>

#include "ops/sampling/sampling.h"

namespace heddle::ops {

/// The random stream of all draws: CounterRng's name, hashed.
std::uint64_t sampling_stream();

}  // namespace heddle::ops
