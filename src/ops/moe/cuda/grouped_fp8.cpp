// Frozen experts in 8-bit floats: "cuda.fp8" of frozen_experts. Values e4m3, a scale for each
// expert's matrix, so that one copy serves both passes, and one for each row of what it is
// multiplied with; sums in fp32. Tokens are converted before they are sent to their experts, and
// what lies between two products by the kernel that makes it.
#include "ops/moe/cuda/grouped_fp8.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "ops/cuda/eight_bit.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/fp8_tensors.h"
#include "ops/moe/cuda/expert_row_tensors.h"
#include "ops/moe/cuda/expert_rows_fp8.h"
#include "ops/moe/cuda/grouped_product.h"
#include "ops/moe/frozen_experts.h"

namespace heddle::ops::moe_experts_fp8 {
namespace {

using cuda::EightBitRows;
using namespace moe_cuda;

EightBitRows empty_rows(const at::Tensor& like, std::int64_t count, std::int64_t width) {
  return {at::empty({count, width}, like.options().dtype(at::kFloat8_e4m3fn)),
          at::empty({count, 1}, like.options().dtype(at::kFloat))};
}

/// Sends rows of 8 bits as rows of half as many elements.
at::Tensor send_values(const EightBitRows& x, const at::Tensor& source, const at::Tensor& place,
                       std::int64_t k) {
  return send(x.values.view(at::kBFloat16), source, place, k).view(at::kFloat8_e4m3fn);
}

struct Scales {
  const at::Tensor& rows;
  const at::Tensor* source = nullptr;  ///< Set: the scales are those of tokens, k rows each.
  std::int64_t k = 1;
};

at::Tensor product(const at::Tensor& x, const Scales& scales, const EightBitExperts& weight,
                   const at::Tensor& ends, bool depth_first) {
  const cuda::OnDevice on(x);
  const std::int64_t width = weight.values.size(depth_first ? 2 : 1);
  at::Tensor y = at::empty({x.size(0), width}, x.options().dtype(at::kBFloat16));
  const cuda::EightBitProduct eight_bit{
      scales.rows.const_data_ptr<float>(),
      scales.source == nullptr ? nullptr : indices(*scales.source), scales.k,
      weight.scales.const_data_ptr<float>()};
  cuda::grouped_product({x.const_data_ptr(), weight.values.const_data_ptr(), y.mutable_data_ptr(),
                         ends.const_data_ptr<std::int32_t>(), x.size(0), x.size(1), width,
                         weight.values.size(0), depth_first, eight_bit},
                        on.stream());
  return y;
}

const EightBitExperts& experts_of(const at::Tensor& weight) {
  const EightBitExperts* const found = experts_beside(weight);
  TORCH_CHECK(found != nullptr, "cuda.fp8: of gate_up and down one alone is in 8 bits");
  return *found;
}

}  // namespace

MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  const cuda::OnDevice on(in.x);
  TORCH_CHECK(in.changes.empty(),
              "kernels.frozen_experts: cuda.fp8 takes no adapters on the routed experts");
  const EightBitExperts &first = experts_of(in.gate_up), &second = experts_of(in.down);
  const std::int64_t k = in.experts.size(1), width = second.values.size(2);
  const DeviceMoeOrder order = order_of(in.experts, first.values.size(0));
  const std::int64_t n = in.assignments.value_or(in.experts.numel());
  const at::Tensor source = order.source.narrow(0, 0, n);
  // The shared expert reads the same input later.
  const std::optional<EightBitRows> made = cuda::look_beside(in.x);
  const EightBitRows x = made ? *made : linear_fp8::rows_of(in.x.contiguous());
  at::Tensor gate_up = product(send_values(x, source, order.place, k), {x.scales, &source, k},
                               first, order.ends, /*depth_first=*/false);
  const at::Tensor weights = in.weights.contiguous();
  const EightBitRows hidden = empty_rows(in.x, n, width);
  cuda::weighted_swiglu_forward_fp8(n, width, gate_up.const_data_ptr(), weights.const_data_ptr(),
                                    indices(source), cuda::places_in(hidden), on.stream());
  MoeExperts::Forward result;
  result.y = sum(product(hidden.values, {hidden.scales}, second, order.ends, /*depth_first=*/false),
                 order.place, k);
  if (keep) result.saved = {gate_up, source, order.place, order.ends};
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, const at::Tensor& grad_branch) {
  const cuda::OnDevice on(in.x);
  const at::Tensor &gate_up = saved.saved[0], &source = saved.saved[1], &place = saved.saved[2],
                   &ends = saved.saved[3];
  const EightBitExperts &first = experts_of(in.gate_up), &second = experts_of(in.down);
  const std::int64_t k = in.experts.size(1), n = source.size(0), width = gate_up.size(1) / 2;
  const EightBitRows dy = linear_fp8::rows_of(grad_y.contiguous());
  const at::Tensor d_hidden =
      product(send_values(dy, source, place, k), {dy.scales, &source, k}, second, ends,
              /*depth_first=*/true);
  const at::Tensor weights = in.weights.contiguous();
  MoeExperts::Gradients result;
  result.weights = n == weights.numel() ? at::empty(weights.sizes(), weights.options())
                                        : at::zeros(weights.sizes(), weights.options());
  const EightBitRows d_gate_up = empty_rows(in.x, n, 2 * width);
  cuda::weighted_swiglu_backward_fp8(
      n, width, gate_up.const_data_ptr(), d_hidden.const_data_ptr(), weights.const_data_ptr(),
      indices(source), cuda::places_in(d_gate_up), result.weights.mutable_data_ptr(), on.stream());
  result.x = sum_onto(
      grad_branch, product(d_gate_up.values, {d_gate_up.scales}, first, ends, /*depth_first=*/true),
      place, k);
  return result;
}

namespace {

void lay(const at::Tensor& weight) {
  const cuda::OnDevice on(weight);
  const at::Tensor from = weight.contiguous();
  const std::int64_t experts = from.size(0);
  EightBitExperts made{at::empty(from.sizes(), from.options().dtype(at::kFloat8_e4m3fn)),
                       at::empty({experts}, from.options().dtype(at::kFloat))};
  cuda::fp8_matrices(experts, from.size(1) * from.size(2), from.const_data_ptr(),
                     made.values.mutable_data_ptr(), made.scales.mutable_data_ptr<float>(),
                     on.stream());
  lay_experts_beside(weight, std::move(made));
}

std::optional<std::string> refuse_device(const Target&) {
  if (cuda::grouped_product_available()) return std::nullopt;
  return "the products of experts by wgmma need sm_90a (H100, H200)";
}

std::optional<std::string> refuse(const FrozenExperts::Dims& dims) {
  for (const auto& [name, size] : {std::pair{"hidden_size", dims.hidden_size},
                                   std::pair{"intermediate_size", dims.intermediate_size}}) {
    if (size % 128 != 0) return fmt::format("{} {} is no multiple of 128", name, size);
  }
  if (dims.intermediate_size > cuda::kLongestExpertRow)
    return fmt::format("intermediate_size {}, and it takes {} at most", dims.intermediate_size,
                       cuda::kLongestExpertRow);
  if (dims.num_experts <= cuda::kMostExperts) return std::nullopt;
  return fmt::format("{} experts, and it takes {} at most", dims.num_experts, cuda::kMostExperts);
}

}  // namespace

}  // namespace heddle::ops::moe_experts_fp8

namespace heddle::ops::cuda {

void add_frozen_experts(Registry& registry) {
  KernelInfo info = KernelInfo::cuda("cuda.fp8", {c10::ScalarType::BFloat16});
  info.only_by_name = true;
  info.refuse_device = moe_experts_fp8::refuse_device;
  registry.add<FrozenExperts>(info, {moe_experts_fp8::lay}, {.refuse = moe_experts_fp8::refuse});
}

}  // namespace heddle::ops::cuda
