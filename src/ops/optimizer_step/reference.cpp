#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/kernels.h"
#include "ops/optimizer_step/rounding.h"
#include "ops/splitmix.h"

namespace heddle::ops::adamw_reference {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  const double correction1 = 1 - std::pow(options.beta1, static_cast<double>(options.step));
  const double correction2 = 1 - std::pow(options.beta2, static_cast<double>(options.step));
  for (const AdamwTensor& tensor : tensors) {
    at::Tensor p = tensor.master.defined() ? tensor.master : tensor.parameter;
    at::Tensor m = tensor.exp_avg, v = tensor.exp_avg_sq;
    const at::Tensor g = tensor.gradient.to(m.scalar_type()) * options.gradient_multiplier;
    p.mul_(1 - options.lr * tensor.weight_decay);
    m.lerp_(g, 1 - options.beta1);
    v.mul_(options.beta2).addcmul_(g, g, 1 - options.beta2);
    const at::Tensor denominator = at::sqrt(v).div_(std::sqrt(correction2)).add_(options.eps);
    p.addcdiv_(m, denominator, -options.lr / correction1);
    if (tensor.master.defined()) tensor.parameter.copy_(p);
  }
}

namespace {

/// rounding_bits(key, 0..count-1), int64.
at::Tensor bits_of(std::uint64_t key, std::int64_t count, c10::Device device) {
  at::Tensor x = at::arange(1, count + 1, at::TensorOptions().dtype(at::kLong).device(device));
  x.mul_(splitmix::number(heddle::splitmix::kStride)).add_(splitmix::number(key));
  return splitmix::mixed(x);
}

/// fp32 x as bf16: the lower half of the pattern plus 16 random bits carries into the upper half.
at::Tensor rounded(const at::Tensor& x, const at::Tensor& bits, int shift) {
  const at::Tensor noise = bits.bitwise_right_shift(shift).bitwise_and(0xffff).to(at::kInt);
  const at::Tensor pattern = (x.view(at::kInt) + noise).bitwise_and(~std::int64_t{0xffff});
  return at::where(at::isfinite(x), pattern.view(at::kFloat), x).to(at::kBFloat16);
}

/// 16 bits of each as fp32, uniform in [0, 1).
at::Tensor uniform(const at::Tensor& bits, int shift) {
  return bits.bitwise_right_shift(shift).bitwise_and(0xffff).to(at::kFloat).mul_(0x1p-16);
}

}  // namespace

void step_rounded(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  for (const AdamwTensor& tensor : tensors) {
    at::Tensor p = tensor.parameter, m = tensor.exp_avg, v = tensor.exp_avg_sq;
    const at::Tensor p32 = p.to(at::kFloat), m32 = m.to(at::kFloat), v32 = v.to(at::kFloat);
    step({{p32, tensor.gradient, m32, v32, {}, tensor.weight_decay}}, options);
    const std::uint64_t key =
        rounding_key_of_step(tensor.rounding_key, static_cast<std::uint64_t>(options.step));
    const at::Tensor bits = bits_of(key, p.numel(), p.device()).view(p.sizes());
    p.copy_(rounded(p32, bits, 0));
    m.copy_(rounded(m32, bits, 16));
    v.copy_(rounded(v32, bits, 32));
  }
}

void step_eight_bit(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  using eight_bit::Kind;
  for (const AdamwTensor& tensor : tensors) {
    at::Tensor p = tensor.parameter;
    const bool is_narrow = p.scalar_type() == at::kBFloat16;
    const at::Tensor p32 = is_narrow ? p.to(at::kFloat) : p;
    const at::Tensor m = eight_bit::decoded(tensor.exp_avg, tensor.exp_avg_scale, Kind::kMoment);
    const at::Tensor root =
        eight_bit::decoded(tensor.exp_avg_sq, tensor.exp_avg_sq_scale, Kind::kRoot);
    const at::Tensor v = root.square();
    step({{p32, tensor.gradient, m, v, {}, tensor.weight_decay}}, options);
    const std::uint64_t key =
        rounding_key_of_step(tensor.rounding_key, static_cast<std::uint64_t>(options.step));
    const at::Tensor bits = bits_of(key, p.numel(), p.device()).view(p.sizes());
    if (is_narrow) p.copy_(rounded(p32, bits, 0));
    eight_bit::encode(m, uniform(bits, 16), Kind::kMoment, tensor.exp_avg, tensor.exp_avg_scale);
    eight_bit::encode(at::sqrt(v), uniform(bits, 32), Kind::kRoot, tensor.exp_avg_sq,
                      tensor.exp_avg_sq_scale);
  }
}

}  // namespace heddle::ops::adamw_reference
