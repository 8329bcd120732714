#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "ops/compute_type.h"
#include "ops/gated_delta_net/kernels.h"
#include "ops/gates.h"

namespace heddle::ops {
namespace gdn_gates_reference {

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& a, const at::Tensor& b,
                                          const at::Tensor& a_log, const at::Tensor& dt_bias) {
  const c10::ScalarType type = compute_type(a);
  const at::Tensor step = ops::softplus(a.to(type) + dt_bias.to(type));
  return {-at::exp(a_log.to(type)) * step, ops::sigmoid(b.to(type))};
}

std::vector<at::Tensor> backward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_log,
                                 const at::Tensor& dt_bias, const at::Tensor& g,
                                 const at::Tensor& beta, const at::Tensor& grad_g,
                                 const at::Tensor& grad_beta, bool wants_parameters) {
  const c10::ScalarType type = compute_type(a);
  std::vector<at::Tensor> grads(4);
  if (grad_g.defined()) {
    const at::Tensor da =
        -at::exp(a_log.to(type)) * ops::sigmoid(a.to(type) + dt_bias.to(type)) * grad_g;
    grads[0] = da.to(a.scalar_type());
    if (wants_parameters) {
      grads[2] = at::sum(grad_g * g, {0}).to(a_log.scalar_type());
      grads[3] = at::sum(da, {0}).to(dt_bias.scalar_type());
    }
  }
  if (grad_beta.defined()) grads[1] = (grad_beta * beta * (1 - beta)).to(b.scalar_type());
  return grads;
}

}  // namespace gdn_gates_reference

namespace gated_rms_norm_reference {

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& z,
                                          const at::Tensor& weight, double eps) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor wide = x.to(type), gate = z.to(type);
  const at::Tensor rstd = at::rsqrt(at::mean(wide * wide, {-1}, /*keepdim=*/true) + eps);
  const at::Tensor y = weight.to(type) * (wide * rstd) * (gate * at::sigmoid(gate));
  return {y.to(x.scalar_type()), rstd.squeeze(-1)};
}

GatedRmsNorm::Gradients backward(const GatedRmsNorm::Backward& in) {
  const auto& [x, z, weight, rstd, grad_y, wants_weight, wants_y] = in;
  const c10::ScalarType type = compute_type(x);
  const at::Tensor gate = z.to(type), dy = grad_y.to(type), w = weight.to(type);
  const at::Tensor sigmoid = at::sigmoid(gate), scale = rstd.unsqueeze(-1);
  const at::Tensor normalized = x.to(type) * scale;
  const at::Tensor dsilu = sigmoid * (1 + gate * (1 - sigmoid));
  const at::Tensor gated = dy * (gate * sigmoid);
  const at::Tensor dn = gated * w;
  const at::Tensor dx = scale * (dn - normalized * at::mean(dn * normalized, {-1}, true));
  return {dx.to(x.scalar_type()),
          (dy * w * normalized * dsilu).to(z.scalar_type()),
          wants_weight ? at::sum(gated * normalized, at::IntArrayRef{0, 1}).to(weight.scalar_type())
                       : at::Tensor(),
          {}};
}

}  // namespace gated_rms_norm_reference
}  // namespace heddle::ops
