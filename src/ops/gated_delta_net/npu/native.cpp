// npu_chunk_gated_delta_rule of CANN, for generation alone: documented as inference only, its state
// is bf16 [S,Nv,Dv,Dk]. "npu.chunk64" is the chunked form of reference.cpp, which is what trains.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "base/errors.h"
#include "device/npu_chip.h"
#include "device/upload.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/kernels.h"
#include "ops/npu/call.h"
#include "ops/npu/kernels.h"

namespace heddle::ops::gated_delta_rule_npu {
namespace {

constexpr double kNormEps = 1e-6;

at::Tensor lengths_on(const Sequences& sequences, c10::Device device) {
  const auto& cu = sequences.cu_seqlens_host;
  at::Tensor lengths = at::zeros({sequences.count()}, at::kInt);
  for (std::int64_t s = 0; s < sequences.count(); ++s)
    lengths.mutable_data_ptr<std::int32_t>()[s] = cu[s + 1] - cu[s];
  return device::upload(lengths, device);
}

at::Tensor unit_rows(const at::Tensor& x, bool normalize) {
  if (!normalize) return x.contiguous();
  const at::Tensor wide = x.to(at::kFloat);
  return (wide * at::rsqrt(at::sum(wide * wide, {-1}, true) + kNormEps)).to(x.scalar_type());
}

GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& in, bool keep) {
  TORCH_CHECK(!keep,
              "npu.native: npu_chunk_gated_delta_rule is for generation only, gradients are "
              "asked for");
  const std::int64_t S = in.sequences.count(), Hv = in.v.size(1), K = in.q.size(2),
                     V = in.v.size(2);
  const auto half = in.v.options();
  GatedDeltaRuleForward result;
  if (in.v.size(0) == 0) return gated_delta_rule_reference::forward(in, keep);
  // The operator writes the final states over the initial ones: never over the caller's.
  const at::Tensor state = in.initial_state.defined()
                               ? in.initial_state.transpose(-1, -2).to(half.dtype()).contiguous()
                               : at::zeros({S, Hv, V, K}, half);
  const double scale =
      in.options.scale != 0 ? in.options.scale : 1 / std::sqrt(static_cast<double>(K));
  const auto out = npu::call("npu_chunk_gated_delta_rule",
                             {{"query", unit_rows(in.q, in.options.normalize_qk)},
                              {"key", unit_rows(in.k, in.options.normalize_qk)},
                              {"value", in.v.contiguous()},
                              {"beta", in.beta.to(half.dtype())},
                              {"initial_state", state},
                              {"actual_seq_lengths", lengths_on(in.sequences, in.v.device())},
                              {"scale", scale},
                              {"g", in.g.contiguous()}});
  result.o = out[0];
  if (in.options.want_final_state) result.final_state = out[1].transpose(-1, -2).to(at::kFloat);
  return result;
}

GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs&, const GatedDeltaRuleForward&,
                                 const at::Tensor&, const at::Tensor&) {
  throw_error<InternalError>("npu.native has no backward");
}

std::optional<std::string> refuse_chip(const Target& target) {
  const auto chip = device::npu_chip(target.chip);
  if (chip && chip->has_native_gdn) return std::nullopt;
  return fmt::format("CANN offers npu_chunk_gated_delta_rule on A2 and A3 only, this is {}",
                     target.chip);
}

std::optional<std::string> refuse_heads(const GatedDeltaRule::Dims& dims) {
  if (dims.head_k_dim == 128 && dims.head_v_dim == 128 && dims.num_k_heads <= 64 &&
      dims.num_v_heads <= 64)
    return std::nullopt;
  return fmt::format(
      "npu_chunk_gated_delta_rule takes heads of 128, at most 64 of them; these are {} of {} and "
      "{} "
      "of {}",
      dims.num_k_heads, dims.head_k_dim, dims.num_v_heads, dims.head_v_dim);
}

}  // namespace

}  // namespace heddle::ops::gated_delta_rule_npu

namespace heddle::ops::npu {

void add_gated_delta_rule(Registry& registry) {
  using namespace gated_delta_rule_npu;
  KernelInfo native = KernelInfo::ascend("npu.native", {c10::ScalarType::BFloat16});
  native.only_for = Use::kGeneration;
  native.refuse_device = refuse_chip;
  registry.add<GatedDeltaRule>(native, {forward, backward}, {.refuse = refuse_heads});
  registry.add<GatedDeltaRule>(
      KernelInfo::ascend("npu.chunk64", reference_dtypes()),
      {gated_delta_rule_reference::forward, gated_delta_rule_reference::backward});
}

}  // namespace heddle::ops::npu
