#include "ops/optimizer_step/muon.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/autograd.h"

namespace heddle::ops {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315, kEps = 1e-7;
constexpr int kSteps = 5;
constexpr std::array<std::int64_t, 2> kMatrix = {1, 2};  ///< Dimensions of one in a stack.
/// Elements of a stack that are orthogonalised together: each takes four copies of them.
constexpr std::int64_t kAtATime = std::int64_t{1} << 26;

c10::ScalarType product_type(const at::Tensor& x) {
  if (x.scalar_type() == at::kDouble) return at::kDouble;
  return x.is_cpu() ? at::kFloat : at::kBFloat16;
}

/// x [n,out,in].
at::Tensor orthogonalized_stack(const at::Tensor& stack) {
  const bool is_tall = stack.size(1) > stack.size(2);
  at::Tensor x = stack.to(product_type(stack));
  if (is_tall) x = x.transpose(1, 2);
  x = x / at::linalg_vector_norm(x, 2, at::IntArrayRef(kMatrix), /*keepdim=*/true).clamp_min(kEps);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor gram = at::bmm(x, x.transpose(1, 2));
    const at::Tensor change = at::baddbmm(gram, gram, gram, kB, kC);
    x = at::baddbmm(x, change, x, kA);
  }
  return is_tall ? x.transpose(1, 2) : x;
}

}  // namespace

at::Tensor muon_direction(const MuonTensor& tensor, double momentum, double gradient_multiplier) {
  const NoGradient guard;
  at::Tensor buffer = tensor.momentum_buffer;
  TORCH_CHECK(tensor.gradient.sizes() == buffer.sizes(), "muon_direction: gradient ",
              tensor.gradient.sizes(), " and momentum buffer ", buffer.sizes(), " must be alike");
  const at::Tensor g = tensor.gradient.to(buffer.scalar_type()) * gradient_multiplier;
  buffer.lerp_(g, 1 - momentum);
  return at::lerp(g, buffer, momentum);
}

at::Tensor orthogonalized(const at::Tensor& x) {
  const NoGradient guard;
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "orthogonalized: expected [out,in] or [n,out,in], got ",
              x.sizes());
  const at::Tensor stack = x.dim() == 2 ? x.unsqueeze(0) : x;
  at::Tensor result = at::empty_like(stack, at::MemoryFormat::Contiguous);
  const std::int64_t each = std::max<std::int64_t>(1, stack.size(1) * stack.size(2)),
                     at_a_time = std::max<std::int64_t>(1, kAtATime / each);
  for (std::int64_t first = 0; first < stack.size(0); first += at_a_time) {
    const std::int64_t count = std::min(at_a_time, stack.size(0) - first);
    result.narrow(0, first, count).copy_(orthogonalized_stack(stack.narrow(0, first, count)));
  }
  return result.view(x.sizes());
}

double muon_scale(std::int64_t out, std::int64_t in) {
  return 0.2 * std::sqrt(static_cast<double>(std::max(out, in)));
}

void muon_apply(const MuonTensor& tensor, const at::Tensor& update, double lr, double scale) {
  const NoGradient guard;
  at::Tensor p = tensor.master.defined() ? tensor.master : tensor.parameter;
  TORCH_CHECK(update.sizes() == p.sizes(), "muon_apply: update ", update.sizes(),
              " must have the parameter's shape ", p.sizes());
  p.mul_(1 - lr * tensor.weight_decay);
  p.add_(update, -lr * scale);
  if (tensor.master.defined()) {
    at::Tensor rounded = tensor.parameter;
    rounded.copy_(p);
  }
}

}  // namespace heddle::ops
