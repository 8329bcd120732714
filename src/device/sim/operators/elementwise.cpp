// Norms, rotation, SwiGLU, cross-entropy and AdamW.
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros_like.h>

#include <array>

#include "device/sim/driver.h"
#include "device/sim/operators/operators.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {
namespace {

/// y = x rstd (offset + gamma) over gamma's dimensions, and rstd with those as 1.
Results norm(const Arguments& in, double offset) {
  const at::Tensor x = in.tensor("input"), gamma = in.tensor("gamma");
  TORCH_CHECK(x.numel() > 0 && x.is_contiguous(), in.op(), ": input ", x.sizes(),
              " is empty or not contiguous");
  TORCH_CHECK(gamma.scalar_type() == x.scalar_type(), in.op(), ": gamma of ", gamma.scalar_type(),
              " with input of ", x.scalar_type(), "; they have one dtype");
  TORCH_CHECK(gamma.sizes() == x.sizes().slice(x.dim() - gamma.dim()), in.op(), ": gamma ",
              gamma.sizes(), ", input ", x.sizes());
  std::vector<std::int64_t> axes;
  for (std::int64_t d = x.dim() - gamma.dim(); d < x.dim(); ++d) axes.push_back(d);
  const at::Tensor wide = x.to(wide_type(x));
  const at::Tensor rstd = at::rsqrt((wide * wide).mean(axes, true) + in.number("epsilon"));
  const at::Tensor y = wide * rstd * (gamma.to(wide.scalar_type()) + offset);
  return {y.to(x.scalar_type()), rstd};
}
Results rms_norm(const Arguments& in) { return norm(in, 0); }
Results gemma_rms_norm(const Arguments& in) { return norm(in, 1); }

Results rms_norm_backward(const Arguments& in) {
  const at::Tensor x = in.tensor("input"), gamma = in.tensor("gamma");
  const auto type = wide_type(x);
  const at::Tensor rstd = in.tensor("rstd").to(type), normalized = x.to(type) * rstd,
                   dy = in.tensor("dy").to(type), g = dy * gamma.to(type);
  std::vector<std::int64_t> axes;
  for (std::int64_t d = x.dim() - gamma.dim(); d < x.dim(); ++d) axes.push_back(d);
  const at::Tensor dx = (g - normalized * (g * normalized).mean(axes, true)) * rstd;
  return {dx.to(x.scalar_type()), (dy * normalized).sum_to_size(gamma.sizes())};
}

/// (-x2, x1) of the halves (x1, x2).
at::Tensor rotate_half(const at::Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  return at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
}

void check_rotary(const Arguments& in, const at::Tensor& x) {
  TORCH_CHECK(in.text("rotary_mode") == "half", in.op(), ": the simulation knows mode half");
  TORCH_CHECK(x.dim() == 4 && x.size(-1) % 2 == 0 && x.size(-1) < 896, in.op(), ": input ",
              x.sizes(), ", expected four dimensions, the last even and below 896");
}

Results rotary_mul(const Arguments& in) {
  const at::Tensor x = in.tensor("input");
  check_rotary(in, x);
  const auto type = wide_type(x);
  const at::Tensor wide = x.to(type);
  const at::Tensor y =
      wide * in.tensor("r1").to(type) + rotate_half(wide) * in.tensor("r2").to(type);
  return {y.to(x.scalar_type())};
}

Results rotary_mul_backward(const Arguments& in) {
  const at::Tensor x = in.tensor("input"), r1 = in.tensor("r1"), r2 = in.tensor("r2");
  check_rotary(in, x);
  const auto type = wide_type(x);
  const at::Tensor g = in.tensor("grad").to(type), wide = x.to(type);
  const at::Tensor dx = g * r1.to(type) - rotate_half(g * r2.to(type));
  return {dx.to(x.scalar_type()), (g * wide).sum_to_size(r1.sizes()).to(r1.scalar_type()),
          (g * rotate_half(wide)).sum_to_size(r2.sizes()).to(r2.scalar_type())};
}

Results swiglu(const Arguments& in) {
  const at::Tensor x = in.tensor("input");
  const auto halves = x.to(wide_type(x)).chunk(2, in.integer("dim"));
  return {(halves[0] * at::sigmoid(halves[0]) * halves[1]).to(x.scalar_type())};
}

Results swiglu_backward(const Arguments& in) {
  const at::Tensor x = in.tensor("input");
  const auto type = wide_type(x);
  const auto halves = x.to(type).chunk(2, in.integer("dim"));
  const at::Tensor g = in.tensor("grad_output").to(type), s = at::sigmoid(halves[0]);
  const at::Tensor d_gate = g * halves[1] * s * (halves[0] * (1 - s) + 1);
  return {at::cat({d_gate, g * halves[0] * s}, in.integer("dim")).to(x.scalar_type())};
}

struct Reduction {
  at::Tensor is_kept, label;
  std::string name;
};

Reduction reduction_of(const Arguments& in) {
  TORCH_CHECK(!in.tensor("weight").defined() && in.number("label_smoothing") == 0, in.op(),
              ": the simulation has no class weights and no smoothing");
  const at::Tensor target = in.tensor("target");
  TORCH_CHECK(target.scalar_type() == at::kLong && target.dim() == 1, in.op(),
              ": target is int64 [N]");
  const at::Tensor is_kept = target != in.integer("ignore_index");
  return {is_kept, target.masked_fill(is_kept.logical_not(), 0).unsqueeze(1), in.text("reduction")};
}

Results cross_entropy(const Arguments& in) {
  const at::Tensor x = in.tensor("input");
  const Reduction r = reduction_of(in);
  const auto type = wide_type(x);
  const at::Tensor log_prob = at::log_softmax(x, -1, type);
  at::Tensor loss = -at::gather(log_prob, 1, r.label).squeeze(1) * r.is_kept;
  if (r.name != "none") loss = loss.sum().view({1});
  if (r.name == "mean") loss = loss / r.is_kept.sum();
  const at::Tensor none = at::empty({0}, x.options());
  return {loss.to(x.scalar_type()), log_prob.to(x.scalar_type()), none, none};
}

Results cross_entropy_backward(const Arguments& in) {
  const at::Tensor log_prob = in.tensor("log_prob");
  const Reduction r = reduction_of(in);
  const auto type = wide_type(log_prob);
  at::Tensor scale = in.tensor("grad_loss").to(type) * r.is_kept;
  if (r.name == "mean") scale = scale / r.is_kept.sum();
  at::Tensor d = at::exp(log_prob.to(type));
  d.scatter_add_(1, r.label, -at::ones_like(r.label, d.options()));
  return {(d * scale.unsqueeze(1)).to(log_prob.scalar_type())};
}

Results adam_w(const Arguments& in) {
  const auto out = in.tensors("out");
  TORCH_CHECK(out.size() == 3, in.op(), ": out holds var, m and v");
  const at::Tensor &var = out[0], &m = out[1], &v = out[2];
  const at::Tensor given = in.tensor("grad");
  for (const at::Tensor& t : {m, v, given}) {
    TORCH_CHECK(t.scalar_type() == var.scalar_type() && t.sizes() == var.sizes(), in.op(),
                ": var, m, v and grad have one dtype and shape");
  }
  TORCH_CHECK(!in.flag("amsgrad"), in.op(), ": the simulation has no amsgrad");
  const auto type = wide_type(var);
  const double beta1 = in.number("beta1"), beta2 = in.number("beta2"), lr = in.number("lr");
  const at::Tensor g = in.flag("maximize") ? -given.to(type) : given.to(type);
  // The powers are those of the step before.
  const double unbias1 = 1 - in.number("beta1_power") * beta1,
               unbias2 = 1 - in.number("beta2_power") * beta2;
  const at::Tensor m1 = m.to(type) * beta1 + g * (1 - beta1),
                   v1 = v.to(type) * beta2 + g * g * (1 - beta2), p = var.to(type);
  const at::Tensor update = m1 / unbias1 / (at::sqrt(v1 / unbias2) + in.number("epsilon"));
  m.copy_(m1);
  v.copy_(v1);
  var.copy_(p - update * lr - p * (lr * in.number("weight_decay")));
  return {var, m, v};
}

}  // namespace

std::span<const FusedOperator> elementwise_operators() {
  static constexpr std::array<FusedOperator, 10> kOperators = {
      {{"npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        rms_norm},
       {"npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, "
        "Tensor rstd) -> (Tensor, Tensor)",
        rms_norm_backward},
       {"npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, "
        "Tensor)",
        gemma_rms_norm},
       {"npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
        "Tensor? rotate=None) -> Tensor",
        rotary_mul},
       {"npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
        "str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
        rotary_mul_backward},
       {"npu_swiglu(Tensor input, int dim=-1) -> Tensor", swiglu},
       {"npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
        swiglu_backward},
       {"npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, "
        "str reduction='mean', int ignore_index=-100, float label_smoothing=0.0, "
        "float lse_square_scale_for_zloss=0.0, bool return_zloss=False) -> (Tensor, Tensor, "
        "Tensor, Tensor)",
        cross_entropy},
       {"npu_cross_entropy_loss_backward(Tensor grad_loss, Tensor log_prob, Tensor target, "
        "Tensor? weight=None, Tensor? grad_zloss=None, Tensor? lse_for_zloss=None, "
        "str reduction='mean', int ignore_index=-100, float label_smoothing=0.0, "
        "float lse_square_scale_for_zloss=0.0) -> Tensor",
        cross_entropy_backward},
       {"npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, "
        "Scalar weight_decay, Scalar beta1, Scalar beta2, Scalar epsilon, Tensor grad, "
        "Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, Tensor[] out) -> (Tensor, "
        "Tensor, Tensor)",
        adam_w}}};
  return kOperators;
}

}  // namespace heddle::device::sim
