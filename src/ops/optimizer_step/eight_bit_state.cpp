#include "ops/optimizer_step/eight_bit_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <vector>

#include "ops/optimizer_step/eight_bit.h"

namespace heddle::ops::eight_bit {
namespace {

constexpr int kSign = 1 << kMomentBits;

int bits_of(Kind kind) { return kind == Kind::kMoment ? kMomentBits : kRootBits; }

/// [256] value of every code.
at::Tensor table_of(Kind kind, c10::Device device) {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const bool is_negative = kind == Kind::kMoment && code >= kSign;
    const float magnitude = decoded(is_negative ? code - kSign : code, bits_of(kind));
    values[code] = is_negative ? -magnitude : magnitude;
  }
  return at::from_blob(values.data(), {256}, at::kFloat).to(device, at::kFloat, false, true);
}

/// [blocks, kBlock]
at::Tensor by_block(const at::Tensor& x) { return x.reshape({-1, kBlock}); }

}  // namespace

at::Tensor zero_codes(const at::Tensor& like) {
  return at::zeros(like.sizes(), like.options().dtype(at::kByte));
}

at::Tensor zero_scales(const at::Tensor& like) {
  std::vector<std::int64_t> sizes = like.sizes().vec();
  sizes.back() /= kBlock;
  return at::zeros(sizes, like.options().dtype(at::kFloat));
}

at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, Kind kind) {
  const at::Tensor values =
      table_of(kind, codes.device()).index_select(0, codes.reshape({-1}).to(at::kLong));
  return by_block(values).mul(scales.reshape({-1, 1})).view(codes.sizes());
}

void encode(const at::Tensor& values, const at::Tensor& random, Kind kind, at::Tensor codes,
            at::Tensor scales) {
  const int bits = bits_of(kind);
  const at::Tensor magnitude = by_block(values.abs());
  const at::Tensor largest = magnitude.amax({-1}, /*keepdim=*/true);
  scales.copy_(largest.view(scales.sizes()));
  const at::Tensor x = magnitude.div(at::where(largest.gt(0), largest, at::ones_like(largest)));
  at::Tensor code = at::zeros(x.sizes(), x.options().dtype(at::kInt));
  for (int range = 0; range < bits; ++range) {
    const int most = 1 << range;
    at::Tensor steps = x * power_of_8(bits - 1 - range);
    if (range > 0) steps.sub_(0.125).mul_(static_cast<float>(most) / 0.875F);
    at::Tensor k = steps.add_(by_block(random)).floor_().clamp_max_(most);
    if (range == 0 && kind == Kind::kRoot) k = x.gt(0).to(at::kFloat);
    const at::Tensor here = range == 0 ? x.ge(0) : x.ge(power_of_8(range - bits));
    code = at::where(here, k.to(at::kInt).add_(most - 1), code);
  }
  if (kind == Kind::kMoment) code = code.add(by_block(values).lt(0).to(at::kInt).mul_(kSign));
  codes.copy_(code.view(codes.sizes()));
}

}  // namespace heddle::ops::eight_bit
