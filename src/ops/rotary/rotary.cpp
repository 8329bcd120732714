#include "ops/rotary/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sin.h>

#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/rotary/kernels.h"

namespace heddle::ops {
namespace {

/// The row (temporal, height, width) that gives the position of each frequency: the axes are
/// interleaved, so every axis sees high and low frequencies ("Qwen3-VL", interleaved mrope).
at::Tensor axis_of_frequency(std::int64_t half, const std::vector<std::int64_t>& section) {
  at::Tensor axis = at::empty({half}, at::kLong);
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int64_t a = i % 3;
    axis.mutable_data_ptr<std::int64_t>()[i] =
        a != 0 && i < 3 * section[static_cast<std::size_t>(a)] ? a : 0;
  }
  return axis;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> rotary_tables(const at::Tensor& position_ids,
                                                std::int64_t rotary_dim, double theta,
                                                const std::vector<std::int64_t>& mrope_section,
                                                c10::ScalarType dtype) {
  const bool multimodal = position_ids.dim() == 2;
  TORCH_CHECK(position_ids.dim() == 1 || (multimodal && position_ids.size(0) == 3),
              "rotary_tables: position_ids must be [T] or [3,T], not ", position_ids.sizes());
  TORCH_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0, "rotary_tables: rotary_dim ", rotary_dim,
              " must be even and positive");
  const std::int64_t half = rotary_dim / 2;
  const c10::ScalarType type = compute_type(dtype);
  const NoGradient guard;
  const auto options = position_ids.options();
  const at::Tensor exponent =
      at::arange(0, rotary_dim, 2, options.dtype(at::kLong)).to(type) / rotary_dim;
  const at::Tensor inv_freq = at::pow(theta, exponent).reciprocal();
  at::Tensor positions;  // [T,1] or [T,half]
  if (multimodal) {
    TORCH_CHECK(
        mrope_section.size() == 3 && mrope_section[0] + mrope_section[1] + mrope_section[2] == half,
        "rotary_tables: mrope_section must be three counts with sum ", half, " for [3,T]");
    const at::Tensor axis =
        device::upload(axis_of_frequency(half, mrope_section), position_ids.device());
    positions = position_ids.to(type).index_select(0, axis).t();
  } else {
    positions = position_ids.to(type).unsqueeze(1);
  }
  const at::Tensor angles = positions * inv_freq;
  return {at::cos(angles).to(dtype).to(type).contiguous(),
          at::sin(angles).to(dtype).to(type).contiguous()};
}

at::Tensor qk_norm_rope(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                        const at::Tensor& cos, const at::Tensor& sin, double eps,
                        const std::shared_ptr<GradientHalves>& halves) {
  TORCH_CHECK(x.dim() == 3 && weight.value.dim() == 1 && weight.value.size(0) == x.size(2),
              "qk_norm_rope: x ", x.sizes(), " must be [T,n,D] and weight ", weight.value.sizes(),
              " [D]");
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == x.size(0) &&
                  2 * cos.size(1) <= x.size(2),
              "qk_norm_rope: cos ", cos.sizes(), " and sin ", sin.sizes(),
              " must be [T,rot/2] with rot <= D for x ", x.sizes());
  const QkNormRope::Functions functions = kernels.get<QkNormRope>();
  auto [y, rstd] =
      run_without_gradient([&] { return functions.forward(x, weight, cos, sin, eps); });
  if (!needs_gradient({x, weight.value})) return y;
  return with_gradient(
      "qk_norm_rope", {x, weight.value}, {y},
      [functions, x = detached(x), weight = NormWeight(detached(weight.value), weight.offset), cos,
       sin, rstd = rstd, halves,
       wants_weight = weight.value.requires_grad()](const Tensors& grads) -> Tensors {
        if (!grads[0].defined()) return {{}, {}};
        if (halves && functions.backward_into != nullptr) {
          const at::Tensor dx = halves->half(0, x);
          return {dx,
                  functions.backward_into(x, weight, cos, sin, rstd, grads[0], wants_weight, dx)};
        }
        auto [dx, dw] = functions.backward(x, weight, cos, sin, rstd, grads[0], wants_weight);
        return {dx, dw};
      })[0];
}

void register_rotary(Registry& registry) {
  registry.add<QkNormRope>(KernelInfo::cpu("cpu"),
                           {qk_norm_rope_cpu::forward, qk_norm_rope_cpu::backward});
  registry.add<QkNormRope>(KernelInfo::reference(),
                           {qk_norm_rope_reference::forward, qk_norm_rope_reference::backward});
}

}  // namespace heddle::ops
