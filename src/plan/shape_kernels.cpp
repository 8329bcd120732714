#include "plan/shape_kernels.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <torch/library.h>

namespace heddle::plan {
namespace {

at::Tensor index_select(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  if (!shape.empty())
    shape[static_cast<std::size_t>(dim < 0 ? dim + x.dim() : dim)] = index.numel();
  return at::empty(shape, x.options());
}

/// Repeats into a number of rows that the caller knows.
at::Tensor repeat_interleave(const at::Tensor& repeats, std::optional<std::int64_t> output_size) {
  TORCH_CHECK(output_size.has_value(), "repeat_interleave on shapes needs its output_size");
  return at::empty({*output_size}, repeats.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& a, const at::Tensor& b) {
  const auto shape = at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes()));
  return at::empty(shape, a.options().dtype(at::result_type(a, b)));
}

at::Tensor truth_of_two(const at::Tensor& a, const at::Tensor& b) {
  return at::empty(at::infer_size(a.sizes(), b.sizes()), a.options().dtype(at::kBool));
}

at::Tensor truth(const at::Tensor& x) { return at::empty_like(x, x.options().dtype(at::kBool)); }

at::Tensor same(const at::Tensor& x) { return at::empty_like(x); }

at::Tensor flip(const at::Tensor& x, at::IntArrayRef) { return at::empty_like(x); }

at::Tensor mse_loss_backward(const at::Tensor&, const at::Tensor& x, const at::Tensor&,
                             std::int64_t) {
  return at::empty_like(x);
}

at::Tensor solve_triangular(const at::Tensor&, const at::Tensor& b, bool, bool, bool) {
  return at::empty_like(b);
}

}  // namespace

ShapeKernels::ShapeKernels()
    : library_(std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                                c10::DispatchKey::Meta, __FILE__, __LINE__)) {
  library_->impl("index_select", index_select);
  library_->impl("repeat_interleave.Tensor", repeat_interleave);
  library_->impl("where.self", where);
  library_->impl("logical_and", truth_of_two);
  library_->impl("logical_or", truth_of_two);
  library_->impl("logical_not", truth);
  library_->impl("abs", same);
  library_->impl("flip", flip);
  library_->impl("mse_loss_backward", mse_loss_backward);
  library_->impl("linalg_solve_triangular", solve_triangular);
}

ShapeKernels::~ShapeKernels() = default;

}  // namespace heddle::plan
