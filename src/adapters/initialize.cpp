#include "adapters/initialize.h"

#include <cmath>

#include "base/rng.h"
#include "nn/fill.h"

namespace heddle::adapters {

void fill_kaiming(nn::Parameter& parameter, std::uint64_t seed) {
  const CounterRng rng(seed, parameter.name());
  const double bound = 1 / std::sqrt(static_cast<double>(parameter.global_shape().back()));
  nn::fill_owned(parameter, [&](std::uint64_t i) { return (2 * rng.uniform(i) - 1) * bound; });
}

}  // namespace heddle::adapters
