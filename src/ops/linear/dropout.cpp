#include "ops/linear/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/linear/kernels.h"
#include "ops/splitmix.h"

namespace heddle::ops {
namespace {

using splitmix::number;

constexpr std::int64_t kAtATime = 1 << 22;  // elements

}  // namespace

at::Tensor dropout_factors(const DropoutMask& mask, c10::ScalarType dtype) {
  const std::int64_t rows = mask.tokens.numel(), columns = mask.features.numel();
  const at::Tensor factors = at::empty({rows, columns}, mask.tokens.options().dtype(dtype));
  const at::Tensor by_token =
      mask.tokens.mul(number(heddle::splitmix::kMix2)).add_(number(mask.key)).unsqueeze(1);
  const at::Tensor by_feature = mask.features.add(1).mul_(number(heddle::splitmix::kStride));
  const std::int64_t step =
      std::max<std::int64_t>(1, kAtATime / std::max<std::int64_t>(1, columns));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    at::Tensor x = splitmix::mixed(by_token.narrow(0, first, count) + by_feature);
    x = splitmix::shifted(x, 32);
    factors.narrow(0, first, count).copy_(x.ge(mask.threshold())).mul_(mask.kept());
  }
  return factors;
}

namespace linear_reference {

at::Tensor dropout(const at::Tensor& x, const DropoutMask& mask) {
  return x * dropout_factors(mask, x.scalar_type());
}

void add_dropout(at::Tensor& sum, const at::Tensor& x, const DropoutMask& mask) {
  sum.add_(dropout(x, mask));
}

}  // namespace linear_reference
}  // namespace heddle::ops
