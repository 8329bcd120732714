// Joins the CUDA kernels of gated_delta_rule_decode with ATen.
#include "ops/gated_delta_net/cuda/decode.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cmath>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops::gated_delta_rule_cuda {
namespace {

/// Heads one after another.
at::Tensor with_whole_rows(const at::Tensor& x) {
  const bool fits = x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)) &&
                    x.stride(0) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : x.contiguous();
}

at::Tensor decode(const GatedDeltaRuleDecode::Inputs& in, const CacheRows& rows) {
  const cuda::OnDevice on(in.q);
  const at::Tensor q = with_whole_rows(in.q), k = with_whole_rows(in.k), v = with_whole_rows(in.v);
  const at::Tensor g = in.g.contiguous(), beta = in.beta.contiguous();
  at::Tensor o = at::empty(in.v.sizes(), in.v.options());
  const cuda::GdnDecodeShape shape{static_cast<int>(q.size(0)), static_cast<int>(q.size(1)),
                                   static_cast<int>(v.size(1)), static_cast<int>(q.size(2)),
                                   cuda::element_of(in.states)};
  cuda::GdnDecodeInputs inputs;
  inputs.q = cuda::input_rows(q);
  inputs.k = cuda::input_rows(k);
  inputs.v = cuda::input_rows(v);
  inputs.g = g.const_data_ptr<float>();
  inputs.beta = beta.const_data_ptr<float>();
  inputs.slots = rows.slots.const_data_ptr<std::int64_t>();
  inputs.states = in.states.mutable_data_ptr();
  inputs.scale = static_cast<float>(in.scale);
  inputs.normalize_qk = in.normalize_qk;
  cuda::gated_delta_rule_decode(shape, inputs, o.mutable_data_ptr(), on.stream());
  return o;
}

at::Tensor net(const GatedDeltaNetDecode& in, const CacheRows& rows) {
  const cuda::OnDevice on(in.qkv);
  const auto whole = [](const at::Tensor& x) {
    return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
  };
  const at::Tensor qkv = whole(in.qkv), a = whole(in.a), b = whole(in.b), z = with_whole_rows(in.z);
  const at::Tensor taps = in.conv_weight.contiguous(), norm = in.norm_weight.contiguous();
  const at::Tensor a_log = in.a_log.contiguous(), dt_bias = in.dt_bias.contiguous();
  const std::int64_t B = qkv.size(0), Hv = z.size(1), D = z.size(2);
  at::Tensor y = at::empty({B, Hv * D}, qkv.options());
  const cuda::GdnDecodeShape shape{static_cast<int>(B), static_cast<int>(in.num_key_heads),
                                   static_cast<int>(Hv), static_cast<int>(D),
                                   cuda::element_of(in.states)};
  cuda::GdnMixerInputs inputs{};
  inputs.qkv = cuda::input_rows(qkv);
  inputs.a = cuda::input_rows(a);
  inputs.b = cuda::input_rows(b);
  inputs.z = cuda::input_rows(z);
  inputs.conv_weight = taps.const_data_ptr();
  inputs.a_log = a_log.const_data_ptr();
  inputs.dt_bias = dt_bias.const_data_ptr();
  inputs.norm_weight = norm.const_data_ptr();
  inputs.conv_weight_type = cuda::element_of(taps);
  inputs.a_log_type = cuda::element_of(a_log);
  inputs.dt_bias_type = cuda::element_of(dt_bias);
  inputs.norm_weight_type = cuda::element_of(norm);
  inputs.width = static_cast<int>(taps.size(1));
  inputs.conv_states = in.conv_states.mutable_data_ptr();
  inputs.states = in.states.mutable_data_ptr();
  inputs.slots = rows.slots.const_data_ptr<std::int64_t>();
  inputs.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
  inputs.eps = static_cast<float>(in.norm_eps);
  cuda::gated_delta_net_decode(shape, inputs, y.mutable_data_ptr(), on.stream());
  return y;
}

bool takes_net(const GatedDeltaNetDecode& in) {
  const std::int64_t D = in.z.size(2);
  return in.states.size(2) == D && (D == 64 || D == 128);
}

std::optional<std::string> refuse(const GatedDeltaRuleDecode::Dims& dims) {
  const std::int64_t k = dims.head_k_dim, v = dims.head_v_dim;
  if (k == v && (k == 64 || k == 128 || k == 256)) return std::nullopt;
  return fmt::format(
      "head_k_dim and head_v_dim must both be 64, both 128 or both 256, they are {} and {}", k, v);
}

}  // namespace

}  // namespace heddle::ops::gated_delta_rule_cuda

namespace heddle::ops::cuda {

void add_gated_delta_rule_decode(Registry& registry) {
  using namespace gated_delta_rule_cuda;
  registry.add<GatedDeltaRuleDecode>(KernelInfo::cuda("cuda.fused", {c10::ScalarType::BFloat16}),
                                     {decode, takes_net, net}, {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
