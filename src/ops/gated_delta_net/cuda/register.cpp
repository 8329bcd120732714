// Joins the CUDA kernels of the gated delta rule to tensors and adds them to the registry.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>

#include "ops/cuda/element.h"
#include "ops/cuda/kernels.h"
#include "ops/gated_delta_net/cuda/gated_delta_net.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops::gated_delta_rule_cuda {
namespace {

using cuda::GatedDeltaNetKernel;
using cuda::GatedDeltaNetShape;
using cuda::GatedDeltaNetTensor;

constexpr std::int64_t kMaxGroup = 8;

/// A [T,H,D] tensor as the kernels want it: rows of whole heads that start on 16 bytes.
at::Tensor with_disjoint_rows(const at::Tensor& x) {
  const bool fits = x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)) &&
                    x.stride(0) % 8 == 0 && x.stride(0) >= x.size(1) * x.size(2) &&
                    reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : x.contiguous();
}

GatedDeltaNetTensor view_of(const at::Tensor& x) { return {x.data_ptr(), x.stride(0)}; }

const float* data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; }
float* mutable_data(const at::Tensor& x) {
  return x.defined() ? x.mutable_data_ptr<float>() : nullptr;
}

/// One call: the tensors the pointers belong to, and the arguments both directions share.
struct Call {
  at::Tensor q, k, v, g, beta, initial;
  GatedDeltaNetShape shape;
  cuda::GatedDeltaNetOptions options;
  cuda::GatedDeltaNetInputs inputs;
  c10::DeviceGuard guard;
  cudaStream_t stream;

  Call(const GatedDeltaRule::Inputs& in, GatedDeltaNetKernel kernel)
      : q(with_disjoint_rows(in.q)),
        k(with_disjoint_rows(in.k)),
        v(with_disjoint_rows(in.v)),
        g(in.g.contiguous()),
        beta(in.beta.contiguous()),
        initial(in.initial_state.defined() ? in.initial_state.contiguous() : at::Tensor()),
        guard(in.q.device()),
        stream(c10::cuda::getCurrentCUDAStream(in.q.device().index()).stream()) {
    TORCH_CHECK(in.q.is_cuda(), "gated_delta_rule (cuda): q is on ", in.q.device());
    shape.tokens = static_cast<int>(q.size(0));
    shape.sequences = static_cast<int>(in.sequences.count());
    shape.k_heads = static_cast<int>(q.size(1));
    shape.v_heads = static_cast<int>(v.size(1));
    shape.head_dim = static_cast<int>(q.size(2));
    shape.longest = static_cast<int>(in.sequences.max_seqlen);
    TORCH_CHECK(v.size(2) == q.size(2), "gated_delta_rule (cuda): V ", v.size(2), " must equal K ",
                q.size(2));
    options.scale = static_cast<float>(
        in.options.scale != 0 ? in.options.scale : 1 / std::sqrt(static_cast<double>(q.size(2))));
    options.normalize_qk = in.options.normalize_qk;
    options.kernel = kernel;
    inputs.q = view_of(q);
    inputs.k = view_of(k);
    inputs.v = view_of(v);
    inputs.g = data(g);
    inputs.beta = data(beta);
    inputs.cu_seqlens = in.sequences.cu_seqlens.const_data_ptr<int>();
    inputs.initial_state = data(initial);
  }
  at::TensorOptions wide() const { return g.options(); }
  at::Tensor bytes(std::size_t count) const {
    return at::empty({static_cast<std::int64_t>(count)}, g.options().dtype(at::kByte));
  }
};

template <GatedDeltaNetKernel kKernel>
GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& in, bool keep) {
  const Call call(in, kKernel);
  GatedDeltaRuleForward out;
  out.o = at::empty(in.v.sizes(), in.v.options());
  if (in.options.want_final_state) {
    out.final_state =
        at::empty({in.sequences.count(), in.v.size(1), in.q.size(2), in.v.size(2)}, call.wide());
  }
  if (in.sequences.count() == 0) return out;
  const at::Tensor saved = call.bytes(cuda::gated_delta_net_saved_bytes(call.shape, keep));
  cuda::GatedDeltaNetForward result;
  result.o = view_of(out.o);
  result.final_state = mutable_data(out.final_state);
  result.saved = saved.mutable_data_ptr();
  result.for_backward = keep;
  cuda::gated_delta_net_forward(call.shape, call.options, call.inputs, result, call.stream);
  if (keep) out.saved = {saved};
  return out;
}

template <GatedDeltaNetKernel kKernel>
GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& in,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state) {
  const Call call(in, kKernel);
  const at::Tensor d_o =
      grad_o.defined() ? with_disjoint_rows(grad_o) : at::zeros(in.v.sizes(), in.v.options());
  const at::Tensor d_final =
      grad_final_state.defined() ? grad_final_state.contiguous() : at::Tensor();
  // Columns of one tensor, as those of the projection that q, k and v usually come from.
  const std::int64_t k_columns = in.q.size(1) * in.q.size(2),
                     v_columns = in.v.size(1) * in.v.size(2);
  const at::Tensor joined = at::empty({in.q.size(0), 2 * k_columns + v_columns}, in.q.options());
  GatedDeltaRuleGradients d;
  d.q = joined.narrow(1, 0, k_columns).unflatten(1, {in.q.size(1), in.q.size(2)});
  d.k = joined.narrow(1, k_columns, k_columns).unflatten(1, {in.q.size(1), in.q.size(2)});
  d.v = joined.narrow(1, 2 * k_columns, v_columns).unflatten(1, {in.v.size(1), in.v.size(2)});
  d.g = at::empty(in.g.sizes(), call.wide());
  d.beta = at::empty(in.beta.sizes(), call.wide());
  if (in.initial_state.defined()) d.initial_state = at::empty(call.initial.sizes(), call.wide());
  if (in.sequences.count() == 0) return d;
  const at::Tensor workspace = call.bytes(cuda::gated_delta_net_workspace_bytes(call.shape));
  cuda::GatedDeltaNetBackward result;
  result.d_o = view_of(d_o);
  result.d_final_state = data(d_final);
  result.saved = forward.saved.at(0).const_data_ptr();
  result.workspace = workspace.mutable_data_ptr();
  result.dq = view_of(d.q);
  result.dk = view_of(d.k);
  result.dv = view_of(d.v);
  result.dg = mutable_data(d.g);
  result.dbeta = mutable_data(d.beta);
  result.d_initial_state = mutable_data(d.initial_state);
  cuda::gated_delta_net_backward(call.shape, call.options, call.inputs, result, call.stream);
  return d;
}

template <GatedDeltaNetKernel kKernel>
std::optional<std::string> refuse(const GatedDeltaRule::Dims& dims) {
  const auto& [k_heads, v_heads, k_dim, v_dim] = dims;
  constexpr bool kHas256 = kKernel == GatedDeltaNetKernel::kPortable;
  if (k_dim != v_dim || (k_dim != 64 && k_dim != 128 && !(kHas256 && k_dim == 256))) {
    return fmt::format("head_k_dim and head_v_dim must both be {}, they are {} and {}",
                       kHas256 ? "64, both 128 or both 256" : "64 or both 128", k_dim, v_dim);
  }
  if (k_heads < 1 || v_heads % k_heads != 0 || v_heads / k_heads > kMaxGroup) {
    return fmt::format("num_v_heads {} must be 1 to {} times num_k_heads {}", v_heads, kMaxGroup,
                       k_heads);
  }
  return std::nullopt;
}

template <GatedDeltaNetKernel kKernel>
std::optional<std::string> refuse_device(const Target&) {
  if constexpr (kKernel == GatedDeltaNetKernel::kHopper) {
    if (cuda::gated_delta_net_kernel_for_device() != kKernel) {
      return fmt::format(
          "needs a device of compute capability 9.0 and a build for sm_90a; the device has sm_{}",
          cuda::compute_capability());
    }
  } else if (cuda::compute_capability() < 80) {
    return fmt::format("needs compute capability 8.0, the device has sm_{}",
                       cuda::compute_capability());
  }
  return std::nullopt;
}

template <GatedDeltaNetKernel kKernel>
std::int64_t on_chip_bytes(const GatedDeltaRule::Dims& dims) {
  return static_cast<std::int64_t>(
      cuda::gated_delta_net_shared_bytes(static_cast<int>(dims.head_k_dim), kKernel));
}

template <GatedDeltaNetKernel kKernel>
void add_kernel(Registry& registry, const char* name) {
  KernelInfo info = KernelInfo::cuda(name, {c10::ScalarType::BFloat16});
  info.refuse_device = refuse_device<kKernel>;
  registry.add<GatedDeltaRule>(
      info, {forward<kKernel>, backward<kKernel>},
      {.refuse = refuse<kKernel>, .on_chip_bytes = on_chip_bytes<kKernel>});
}

}  // namespace

}  // namespace heddle::ops::gated_delta_rule_cuda

namespace heddle::ops::cuda {

void add_gated_delta_rule(Registry& registry) {
  using namespace gated_delta_rule_cuda;
  add_kernel<GatedDeltaNetKernel::kHopper>(registry, "cuda.sm90.chunk64");
  add_kernel<GatedDeltaNetKernel::kPortable>(registry, "cuda.mma.chunk64");
}

}  // namespace heddle::ops::cuda
