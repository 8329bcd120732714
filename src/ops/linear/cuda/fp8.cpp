// Products of 8-bit floats: "cuda.fp8_rowwise_or_bf16". Values e4m3 with a scale for each row of
// both factors along the dimension they share, sums in fp32, results bf16. The gradients of weights
// and the low-rank terms stay bf16.
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/fp8_rows.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_fp8 {
namespace {

/// Below these the conversion costs more than the product gains.
constexpr std::int64_t kFewestRows = 512, kNarrowest = 256;

/// In both widths alike, as the backward exchanges them.
bool is_narrow(std::int64_t out, std::int64_t in) {
  return std::min(out, in) >= kNarrowest && out % 16 == 0 && in % 16 == 0;
}

bool fits(const at::Tensor& a, std::int64_t columns, std::int64_t depth) {
  return a.scalar_type() == at::kBFloat16 && a.size(0) >= kFewestRows &&
         is_narrow(columns, depth) && a.stride(1) == 1 && a.stride(0) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(a.const_data_ptr()) % 16 == 0;
}

struct Fp8 {
  at::Tensor values;  ///< [n,k] e4m3
  at::Tensor scales;  ///< [n,1]
};

Fp8 fp8(const at::Tensor& x) {
  const cuda::OnDevice on(x);
  Fp8 result{at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn)),
             at::empty({x.size(0), 1}, x.options().dtype(at::kFloat))};
  cuda::fp8_rows(x.const_data_ptr(), x.size(0), x.size(1), x.stride(0),
                 result.values.mutable_data_ptr(), result.scales.mutable_data_ptr<float>(),
                 on.stream());
  return result;
}

/// a b^T.
at::Tensor product(const Fp8& a, const Fp8& b) {
  return at::_scaled_mm(a.values, b.values.t(), a.scales, b.scales.t(), /*bias=*/{},
                        /*scale_result=*/{}, at::kBFloat16, /*use_fast_accum=*/true);
}

Tensors forward(const std::vector<Products>& sums) {
  Tensors results;
  using Rows = std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t>;
  std::map<Rows, Fp8> inputs;  // layers share them
  for (const Products& terms : sums) {
    const auto& [a, b] = terms[0];
    if (!fits(a, b.size(0), b.size(1))) {
      results.push_back(linear_cuda::forward({terms})[0]);
      continue;
    }
    auto& input = inputs[{a.const_data_ptr(), a.size(0), a.size(1), a.stride(0)}];
    if (!input.values.defined()) input = fp8(a);
    at::Tensor y = product(input, fp8(b));
    for (std::size_t i = 1; i < terms.size(); ++i) y.addmm_(terms[i].a, terms[i].b.t());
    results.push_back(std::move(y));
  }
  return results;
}

at::Tensor backward(const Products& terms) {
  Products narrow;
  at::Tensor dx;
  for (const auto& [a, b] : terms) {
    if (!fits(a, b.size(1), b.size(0))) {
      narrow.push_back({a, b});
      continue;
    }
    const at::Tensor part = product(fp8(a), fp8(b.t().contiguous()));
    dx = dx.defined() ? dx.add_(part) : part;
  }
  if (!dx.defined()) return linear_cuda::backward(narrow);
  for (const auto& [a, b] : narrow) dx.addmm_(a, b);
  return dx;
}

// Layers that are too narrow for 8 bits take our own products.
std::optional<std::string> refuse_device(const Target&) {
  if (cuda::has_sm90a()) return std::nullopt;
  return "needs a device of compute capability 9.0 and a build with code for sm_90a";
}

/// Names the layers that are computed in the model's type although others are in 8 bits.
std::vector<std::string> warnings(const Linear::Dims& dims) {
  std::vector<std::string> result = linear_cuda::rank_warnings(dims);
  if (dims.layers.empty()) return result;
  std::set<std::string> wide;
  for (const auto& [name, out, in] : dims.layers) {
    if (!is_narrow(out, in)) wide.insert(fmt::format("{} [{}, {}]", name, out, in));
  }
  result.push_back(fmt::format(
      "in the model's type stay the gradients of weights, the products of adapters, the "
      "language-model head, micro-batches below {} tokens, and {}",
      kFewestRows,
      wide.empty() ? "no layer" : fmt::format("the layers {}", fmt::join(wide, ", "))));
  return result;
}

}  // namespace

}  // namespace heddle::ops::linear_fp8

namespace heddle::ops::cuda {

void add_fp8_linear(Registry& registry) {
  KernelInfo info = KernelInfo::cuda("cuda.fp8_rowwise_or_bf16", {c10::ScalarType::BFloat16});
  info.only_by_name = true;
  info.refuse_device = linear_fp8::refuse_device;
  info.falls_back = fmt::format(
      "the bf16 products of the default kernel for layers narrower than {} or not a multiple of "
      "16, and for fewer than {} rows",
      linear_fp8::kNarrowest, linear_fp8::kFewestRows);
  registry.add<Linear>(info,
                       {.forward = linear_fp8::forward,
                        .forward_onto = linear_reference::forward_onto<linear_fp8::forward>,
                        .backward = linear_fp8::backward,
                        .low_rank_backward = linear_cuda::low_rank_backward,
                        .dropped_low = linear_cuda::dropped_low,
                        .dropped_gradient = linear_cuda::dropped_gradient,
                        .add_dropped = linear_cuda::add_dropped},
                       {.warnings = linear_fp8::warnings});
}

}  // namespace heddle::ops::cuda
