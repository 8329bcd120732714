#include "adapters/dropout_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/hash.h"
#include "ops/splitmix.h"

namespace heddle::adapters {

using ops::splitmix::number;

namespace {

constexpr std::int64_t kAtATime = 1 << 22;  // elements

}  // namespace

std::uint64_t dropout_key(std::uint64_t seed, const std::string& module, std::uint64_t step) {
  return hash::of(module + "/dropout", seed) + step * splitmix::kSequence;
}

at::Tensor dropout_mask(std::uint64_t key, const at::Tensor& tokens, const at::Tensor& features,
                        double probability, c10::ScalarType dtype) {
  const std::int64_t rows = tokens.numel(), columns = features.numel();
  const at::Tensor mask = at::empty({rows, columns}, tokens.options().dtype(dtype));
  // 32 bits decide: exact to 2^-32.
  const auto threshold = static_cast<std::int64_t>(probability * 0x1p32);
  const double kept = 1 / (1 - probability);
  const at::Tensor by_token = tokens.mul(number(splitmix::kMix2)).add_(number(key)).unsqueeze(1);
  const at::Tensor by_feature = features.add(1).mul_(number(splitmix::kStride));
  const std::int64_t step =
      std::max<std::int64_t>(1, kAtATime / std::max<std::int64_t>(1, columns));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    at::Tensor x = ops::splitmix::mixed(by_token.narrow(0, first, count) + by_feature);
    x = ops::splitmix::shifted(x, 32);
    mask.narrow(0, first, count).copy_(x.ge(threshold)).mul_(kept);
  }
  return mask;
}

}  // namespace heddle::adapters
