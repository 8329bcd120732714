// Joins the CUDA kernels of the norm with ATen.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ops/cuda/eight_bit.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/rms_norm/cuda/rms_norm.h"
#include "ops/rms_norm/kernels.h"

namespace heddle::ops::rms_norm_cuda {
namespace {

using cuda::Element;

/// [rows, width] over the same memory where the strides allow it.
at::Tensor matrix(const at::Tensor& x) {
  return x.defined() ? cuda::with_unit_stride(x).reshape({-1, x.size(-1)}) : x;
}

cuda::RmsNormShape shape_of(const at::Tensor& x, const NormWeight& weight) {
  const std::int64_t width = x.size(-1);
  return {cuda::element_of(x), cuda::element_of(weight.value), width == 0 ? 0 : x.numel() / width,
          width, weight.offset};
}

/// Room for a result in 8 bits; none where rows or the weight do not begin on 16 bytes.
std::optional<cuda::EightBitRows> eight_bit_result(const at::Tensor& result,
                                                   const at::Tensor& weight,
                                                   const std::vector<at::Tensor>& read) {
  if (reinterpret_cast<std::uintptr_t>(weight.const_data_ptr()) % 16 != 0) return std::nullopt;
  for (const at::Tensor& x : read) {
    if (x.defined() && !cuda::has_rows_of_16_bytes(x)) return std::nullopt;
  }
  return cuda::eight_bit_for(result);
}

template <bool kEight>
RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps) {
  const cuda::OnDevice on(x);
  const cuda::RmsNormShape shape = shape_of(x, weight);
  const at::Tensor rows = matrix(x), added = matrix(residual), w = weight.value.contiguous();
  std::vector<std::int64_t> leading = x.sizes().vec();
  leading.pop_back();
  RmsNorm::Forward result;
  result.y = at::empty(x.sizes(), x.options());
  if (residual.defined()) result.sum = at::empty(x.sizes(), x.options());
  result.rstd = at::empty(leading, x.options().dtype(at::kFloat));
  std::optional<cuda::EightBitRows> narrow;
  if (kEight) narrow = eight_bit_result(result.y, w, {rows, added});
  cuda::rms_norm_forward(shape, cuda::input_rows(rows), cuda::input_rows(added), w.const_data_ptr(),
                         static_cast<float>(eps), result.y.mutable_data_ptr(),
                         residual.defined() ? result.sum.mutable_data_ptr() : nullptr,
                         result.rstd.mutable_data_ptr<float>(), on.stream(),
                         narrow ? cuda::places_in(*narrow) : cuda::Fp8Rows{});
  if (narrow) cuda::lay_beside(result.y, *std::move(narrow));
  return result;
}

template <bool kEight>
RmsNorm::Gradients backward(const RmsNorm::Backward& in) {
  const at::Tensor& input = in.input;
  const cuda::OnDevice on(input);
  const cuda::RmsNormShape shape = shape_of(input, in.weight);
  const at::Tensor rows = matrix(input), dy = matrix(in.grad_y), dy_2 = matrix(in.grad_y_2),
                   ds = matrix(in.grad_sum), w = in.weight.value.contiguous();
  RmsNorm::Gradients result;
  result.input = at::empty(input.sizes(), input.options());
  if (in.wants_y) result.y = at::empty(input.sizes(), input.options());
  at::Tensor workspace;
  if (in.wants_weight) {
    result.weight = at::empty(w.sizes(), w.options());
    workspace = cuda::workspace_on(input, cuda::rms_norm_backward_workspace(shape));
  }
  std::optional<cuda::EightBitRows> narrow;
  if (kEight) narrow = eight_bit_result(result.input, w, {rows, dy, dy_2, ds, result.y});
  const auto place = [](const at::Tensor& x) {
    return x.defined() ? x.mutable_data_ptr() : nullptr;
  };
  cuda::rms_norm_backward(shape, cuda::input_rows(rows), w.const_data_ptr(),
                          in.rstd.const_data_ptr<float>(),
                          {cuda::input_rows(dy), cuda::input_rows(dy_2), cuda::input_rows(ds)},
                          place(result.input), place(result.weight), place(result.y),
                          workspace.defined() ? workspace.mutable_data_ptr<float>() : nullptr,
                          on.stream(), narrow ? cuda::places_in(*narrow) : cuda::Fp8Rows{});
  if (narrow) cuda::lay_beside(result.input, *std::move(narrow));
  return result;
}

std::optional<std::string> refuse(const RmsNorm::Dims& dims) {
  const std::int64_t limit =
      dims.dim % 8 == 0 ? cuda::kRmsNormLongestRow : cuda::kRmsNormLongestOddRow;
  if (dims.dim <= limit) return std::nullopt;
  return fmt::format("rows of {} elements, at most {} fit the registers of a block", dims.dim,
                     limit);
}

}  // namespace

}  // namespace heddle::ops::rms_norm_cuda

namespace heddle::ops::cuda {

void add_rms_norm(Registry& registry) {
  using namespace rms_norm_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.fused");
  info.falls_back = "linear's cuda.sm90_or_cublas where a step of generation has up to 64 rows";
  registry.add<RmsNorm>(info, {forward<false>, backward<false>, /*does_all_in_one_pass=*/true},
                        {.refuse = refuse});
  KernelInfo fp8 = KernelInfo::cuda("cuda.fused_fp8", {c10::ScalarType::BFloat16});
  fp8.only_by_name = true;
  fp8.falls_back = fmt::format(
      "cuda.fused for fewer than {} rows, rows narrower than {}, not a multiple of 16 or not "
      "starting on 16 bytes",
      kFewestEightBitRows, kNarrowestEightBit);
  registry.add<RmsNorm>(fp8, {forward<true>, backward<true>, /*does_all_in_one_pass=*/true},
                        {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
