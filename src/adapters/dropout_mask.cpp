#include "adapters/dropout_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/hash.h"
#include "ops/optimizer_step/rounding.h"

namespace heddle::adapters {
namespace {

constexpr std::int64_t kAtATime = 1 << 22;  // elements

std::int64_t number(std::uint64_t x) { return static_cast<std::int64_t>(x); }

/// x >> bits of a 64-bit pattern, zeros moving in.
at::Tensor shifted(const at::Tensor& x, int bits) {
  return x.bitwise_right_shift(bits).bitwise_and_((std::int64_t{1} << (64 - bits)) - 1);
}

}  // namespace

std::uint64_t dropout_key(std::uint64_t seed, const std::string& module, std::uint64_t step) {
  return hash::of(module + "/dropout", seed) + step * 0xd1342543de82ef95u;
}

at::Tensor dropout_mask(std::uint64_t key, const at::Tensor& tokens, const at::Tensor& features,
                        double probability, c10::ScalarType dtype) {
  const std::int64_t rows = tokens.numel(), columns = features.numel();
  const at::Tensor mask = at::empty({rows, columns}, tokens.options().dtype(dtype));
  // 32 bits decide: exact to 2^-32.
  const auto threshold = static_cast<std::int64_t>(probability * 0x1p32);
  const double kept = 1 / (1 - probability);
  // SplitMix64, as in ops/optimizer_step/rounding.h.
  const at::Tensor by_token = tokens.mul(number(ops::kRoundingMix2)).add_(number(key)).unsqueeze(1);
  const at::Tensor by_feature = features.add(1).mul_(number(ops::kRoundingStride));
  const std::int64_t step =
      std::max<std::int64_t>(1, kAtATime / std::max<std::int64_t>(1, columns));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    at::Tensor x = by_token.narrow(0, first, count) + by_feature;
    x = x.bitwise_xor_(shifted(x, 30)).mul_(number(ops::kRoundingMix1));
    x = x.bitwise_xor_(shifted(x, 27)).mul_(number(ops::kRoundingMix2));
    x = shifted(x.bitwise_xor_(shifted(x, 31)), 32);
    mask.narrow(0, first, count).copy_(x.ge(threshold)).mul_(kept);
  }
  return mask;
}

}  // namespace heddle::adapters
