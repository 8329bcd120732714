#include "ops/linear/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>

#include "ops/linear/kernels.h"
#include "ops/linear/random_bits.h"
#include "ops/splitmix.h"

namespace heddle::ops {
namespace {

using splitmix::number;

constexpr std::int64_t kAtATime = 1 << 22;  // elements

}  // namespace

at::Tensor dropout_draws(const at::Tensor& tokens, std::uint64_t step) {
  return tokens.mul(number(heddle::splitmix::kMix1))
      .add_(number(step * heddle::splitmix::kSequence));
}

std::int64_t DropoutMask::threshold() const {
  return std::min<std::int64_t>(std::llround(probability * 65536), 65535);
}

void for_each_random_bits(
    std::uint64_t key, const at::Tensor& draws, const at::Tensor& features,
    const std::function<void(std::int64_t first, const at::Tensor& bits)>& use) {
  const at::Tensor by_token = draws.add(number(key)).unsqueeze(1);
  const at::Tensor by_feature =
      at::bitwise_right_shift(features, 2).add_(1).mul_(number(heddle::splitmix::kStride));
  const at::Tensor shift = at::bitwise_and(features, 3).mul_(16);
  const std::int64_t rows = draws.numel();
  const std::int64_t step =
      std::max<std::int64_t>(1, kAtATime / std::max<std::int64_t>(1, features.numel()));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    const at::Tensor x = splitmix::mixed(by_token.narrow(0, first, count) + by_feature);
    use(first, at::bitwise_right_shift(x, shift).bitwise_and_(0xffff));
  }
}

at::Tensor dropout_factors(const DropoutMask& mask, c10::ScalarType dtype) {
  const at::Tensor factors =
      at::empty({mask.draws.numel(), mask.features.numel()}, mask.draws.options().dtype(dtype));
  for_each_random_bits(
      mask.key, mask.draws, mask.features, [&](std::int64_t first, const at::Tensor& bits) {
        factors.narrow(0, first, bits.size(0)).copy_(bits.ge(mask.threshold())).mul_(mask.kept());
      });
  return factors;
}

namespace linear_reference {
namespace {

/// f(mask, its place and number of ranks) of each factor.
template <class F>
void each(const DroppedFactors& factors, const F& f) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < factors.ranks.size(); ++i) {
    f(factors.masks[i], first, factors.ranks[i]);
    first += factors.ranks[i];
  }
}

at::Tensor seen(const at::Tensor& x, const DropoutMask& mask) {
  return x * dropout_factors(mask, x.scalar_type());
}

}  // namespace

at::Tensor dropped_low(const at::Tensor& x, const DroppedFactors& factors) {
  at::Tensor low = at::empty({x.size(0), factors.a.size(0)}, x.options());
  each(factors, [&](const DropoutMask& mask, std::int64_t first, std::int64_t rank) {
    at::Tensor part = low.narrow(1, first, rank);
    at::mm_out(part, seen(x, mask), factors.a.narrow(0, first, rank).t());
  });
  return low;
}

at::Tensor dropped_gradient(const at::Tensor& x, const at::Tensor& d_low,
                            const DroppedFactors& factors) {
  std::vector<at::Tensor> rows;
  each(factors, [&](const DropoutMask& mask, std::int64_t first, std::int64_t rank) {
    rows.push_back(wide_product(d_low.narrow(1, first, rank), seen(x, mask)));
  });
  return at::cat(rows);
}

void add_dropped(at::Tensor& dx, const at::Tensor& d_low, const DroppedFactors& factors) {
  each(factors, [&](const DropoutMask& mask, std::int64_t first, std::int64_t rank) {
    dx.add_(seen(at::mm(d_low.narrow(1, first, rank), factors.a.narrow(0, first, rank)), mask));
  });
}

}  // namespace linear_reference
}  // namespace heddle::ops
