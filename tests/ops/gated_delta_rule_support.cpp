#include "ops/gated_delta_rule_support.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/builtin.h"

namespace heddle::ops::testing {

Problem make(const Case& c, c10::ScalarType dtype) {
  std::vector<std::int32_t> cu{0};
  for (const std::int32_t n : c.lengths) cu.push_back(cu.back() + n);
  const std::int64_t T = cu.back(), S = static_cast<std::int64_t>(c.lengths.size());
  const std::int64_t Hv = c.Hk * c.group;
  // Everything is rounded to `dtype` first: all kernels see the same numbers.
  const auto rounded = [&](const at::Tensor& x) { return x.to(dtype); };
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor k = randn({T, c.Hk, c.K}, at::kDouble, 2);
  const at::Tensor common = randn({1, c.Hk, c.K}, at::kDouble, 20);
  if (c.keys == Keys::kCorrelated) k = 0.5 * k + common;
  if (c.keys == Keys::kIdentical || c.keys == Keys::kAlternating) k = common.expand_as(k).clone();
  if (c.keys == Keys::kAlternating) {
    for (std::int64_t t = 1; t < T; t += 2) k.select(0, t).neg_();
  }
  const at::Tensor noise = randn({T, Hv}, at::kDouble, 4);
  at::Tensor g = at::log_sigmoid(noise) / 16;
  if (c.gate == Gate::kInitialisation) g = -10 + 3 * noise.clamp(-3, 3);
  if (c.gate == Gate::kZero) g = at::zeros_like(noise);
  if (c.gate == Gate::kMixed) {
    for (std::int64_t h = 0; h < Hv; h += 4) g.select(1, h).zero_();
  }
  at::Tensor beta = at::sigmoid(randn({T, Hv}, at::kDouble, 5) + c.beta_shift);
  if (c.beta_edges) {
    constexpr std::array<double, 6> kEdges = {0, 1e-30, 1e-6, 1e-3, 0.999, 1};
    for (std::int64_t t = 0; t < T; ++t) beta.select(0, t).fill_(kEdges[t % kEdges.size()]);
  }
  Problem p;
  p.inputs = {rounded(randn({T, c.Hk, c.K}, at::kDouble, 1)), rounded(k),
              rounded(randn({T, Hv, c.V}, at::kDouble, 3)), g.to(wide), beta.to(wide)};
  p.inputs.push_back(c.initial ? randn({S, Hv, c.K, c.V}, wide, 6) : at::Tensor());
  p.sequences = Sequences::from_host(cu, device());
  p.options.want_final_state = true;
  p.options.normalize_qk = c.normalize;
  p.options.scale = c.scale;
  return p;
}

Problem in_double(Problem p) {
  for (at::Tensor& x : p.inputs) {
    if (x.defined()) x = x.to(at::kDouble);
  }
  return p;
}

Problem on_device(Problem p, c10::Device device) {
  for (at::Tensor& x : p.inputs) {
    if (x.defined()) x = x.to(device);
  }
  p.sequences = Sequences::from_host(p.sequences.cu_seqlens_host, device);
  return p;
}

Tensors call(const Problem& p, const KernelTable& kernels, const Tensors& x) {
  const GatedDeltaRuleResult out = gated_delta_rule(
      kernels,
      {x[0], x[1], x[2], x[3], x[4], x.size() > 5 ? x[5] : at::Tensor(), p.sequences, p.options});
  return {out.o, out.final_state};
}

const std::vector<std::string>& names() {
  static const std::vector<std::string> names = {"o",  "final_state", "dq",    "dk",
                                                 "dv", "dg",          "dbeta", "dinitial_state"};
  return names;
}

Tensors run(const Problem& p, const KernelTable& kernels) {
  Tensors inputs = p.inputs;
  if (!inputs.back().defined()) inputs.pop_back();
  Tensors result;
  const Tensors gradients = gradients_of(
      [&](const Tensors& x) {
        const Tensors outputs = call(p, kernels, x);
        result = {outputs[0].detach(), outputs[1].detach()};
        return outputs;
      },
      inputs);
  result.insert(result.end(), gradients.begin(), gradients.end());
  return result;
}

Tensors run_exactly(const Problem& p) {
  return run(on_device(in_double(p), at::kCPU),
             table_of(any<GatedDeltaRule>(), "cpu.sequential", at::kDouble, Target{}));
}

double rms_error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor f = found.cpu().to(at::kDouble), e = expected.cpu().to(at::kDouble);
  const double scale = std::sqrt((e * e).sum().item().toDouble());
  return std::sqrt(((f - e) * (f - e)).sum().item().toDouble()) / std::max(scale, 1e-2);
}

}  // namespace heddle::ops::testing
