#include "adapters/initialize.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "base/rng.h"
#include "ops/autograd.h"

namespace heddle::adapters {

void fill_kaiming(nn::Parameter& parameter, std::uint64_t seed) {
  const ops::NoGradient guard;
  const CounterRng rng(seed, parameter.name());
  at::Tensor host = at::empty(parameter.global_shape(), at::kDouble);
  double* out = host.mutable_data_ptr<double>();
  const double bound = 1 / std::sqrt(static_cast<double>(parameter.global_shape().back()));
  for (std::int64_t i = 0; i < host.numel(); ++i) out[i] = (2 * rng.uniform(i) - 1) * bound;
  parameter.write_owned(host);
}

}  // namespace heddle::adapters
