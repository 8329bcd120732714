#include <utility>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/gated_delta_net.h"

namespace heddle::ops {

std::pair<at::Tensor, at::Tensor> gdn_gates(const KernelTable& kernels, const at::Tensor& a,
                                            const at::Tensor& b, const at::Tensor& a_log,
                                            const at::Tensor& dt_bias) {
  TORCH_CHECK(a.dim() == 2 && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(),
              "gdn_gates: a ", a.sizes(), " ", a.scalar_type(), " and b ", b.sizes(), " ",
              b.scalar_type(), " must be [T,Hv] of one dtype");
  TORCH_CHECK(a_log.dim() == 1 && a_log.size(0) == a.size(1) && dt_bias.sizes() == a_log.sizes(),
              "gdn_gates: a_log ", a_log.sizes(), " and dt_bias ", dt_bias.sizes(),
              " must be [Hv] = [", a.size(1), "]");
  const GdnGates::Functions functions = kernels.get<GdnGates>();
  auto [g, beta] = run_without_gradient([&] { return functions.forward(a, b, a_log, dt_bias); });
  if (!needs_gradient({a, b, a_log, dt_bias})) return {g, beta};
  const Tensors out =
      with_gradient("gdn_gates", {a, b, a_log, dt_bias}, {g, beta},
                    [functions, a = detached(a), b = detached(b), a_log = detached(a_log),
                     dt_bias = detached(dt_bias), g = detached(g), beta = detached(beta),
                     wants_parameters = a_log.requires_grad() ||
                                        dt_bias.requires_grad()](const Tensors& grads) -> Tensors {
                      return functions.backward(a, b, a_log, dt_bias, g, beta, grads[0], grads[1],
                                                wants_parameters);
                    });
  return {out[0], out[1]};
}

at::Tensor gated_rms_norm(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& z,
                          const at::Tensor& weight, double eps, OutputAgain again) {
  TORCH_CHECK(x.dim() == 3 && x.sizes() == z.sizes() && x.scalar_type() == z.scalar_type(),
              "gated_rms_norm: x ", x.sizes(), " ", x.scalar_type(), " and z ", z.sizes(), " ",
              z.scalar_type(), " must be [T,Hv,V] of one dtype");
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(2), "gated_rms_norm: weight ",
              weight.sizes(), " must be [V] = [", x.size(2), "]");
  const GatedRmsNorm::Functions functions = kernels.get<GatedRmsNorm>();
  auto [y, rstd] = run_without_gradient([&] { return functions.forward(x, z, weight, eps); });
  if (!needs_gradient({x, z, weight})) return y;
  GatedRmsNorm::Backward saved{detached(x), detached(z), detached(weight), rstd, {}};
  saved.wants_weight = weight.requires_grad();
  saved.wants_y = again != nullptr && functions.gives_output_again;
  return with_gradient(
      "gated_rms_norm", {x, z, weight}, {y},
      [functions, saved = std::move(saved), eps,
       again = std::move(again)](const Tensors& grads) -> Tensors {
        if (!grads[0].defined()) return Tensors(3);
        GatedRmsNorm::Backward in = saved;
        in.grad_y = grads[0];
        const GatedRmsNorm::Gradients g = functions.backward(in);
        if (again) again(g.y.defined() ? g.y : functions.forward(in.x, in.z, in.weight, eps).first);
        return {g.x, g.z, g.weight};
      })[0];
}

}  // namespace heddle::ops
