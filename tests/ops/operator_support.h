#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "ops/autograd.h"
#include "ops/registry.h"
#include "testing/device.h"
#include "testing/parameter_name.h"

/// Shared by the tests of the operators. Tests that name no device run on the one of --device.
namespace heddle::ops::testing {

using heddle::testing::device;

/// The first kernel that the device has of its own for the dtype, or the reference where it has
/// none.
inline constexpr const char* kOwn = "own";

/// A request of the operator with dimensions that suit each of its kernels.
template <class Op>
OpRequest any() {
  typename Op::Dims dims;
  if constexpr (requires { dims.head_dim; }) dims.head_dim = 64;
  if constexpr (requires { dims.rotary_dim; }) dims.rotary_dim = 16;
  if constexpr (requires { dims.num_experts; }) dims.num_experts = 11;
  if constexpr (requires { dims.top_k; }) dims.top_k = 3;
  if constexpr (requires { dims.channels; }) dims.channels = 8;
  return OpRequest::of<Op>(dims);
}

/// A table with one operator's kernel `name`.
KernelTable table_of(const OpRequest& request, const std::string& name, c10::ScalarType dtype,
                     const Target& on = target_of(device()));

/// A parameter of a suite that runs for every kernel and dtype.
struct Kernel {
  std::string name;
  c10::ScalarType dtype;
};
void PrintTo(const Kernel& kernel, std::ostream* out);

/// Normal deviates on the device; the same for the same seed.
at::Tensor randn(at::IntArrayRef sizes, c10::ScalarType dtype, std::uint64_t seed);

/// `x` in storage whose gaps between the rows of the last dimension are NaN: a kernel that reads or
/// sums outside its view shows. Shape and values are those of x, the last stride is 1.
at::Tensor with_poisoned_gaps(const at::Tensor& x, std::int64_t gap = 5);

/// The last dimension's tolerance relative to the largest magnitude of `expected`.
::testing::AssertionResult close(const at::Tensor& actual, const at::Tensor& expected,
                                 double tolerance);

/// Largest error that rounding of the dtype (and of fp32 sums) explains.
double tolerance_of(c10::ScalarType dtype);

/// Bitwise equality, NaN included.
::testing::AssertionResult identical(const at::Tensor& a, const at::Tensor& b);

/// Compares the gradients of sum(f(inputs) * fixed random weights) with central differences of
/// fp64 `inputs`.
::testing::AssertionResult gradients_match(const std::function<Tensors(const Tensors&)>& f,
                                           const Tensors& inputs, double tolerance = 1e-7);

/// The gradients of sum(f(inputs) * fixed random weights) with respect to inputs, on any device.
Tensors gradients_of(const std::function<Tensors(const Tensors&)>& f, const Tensors& inputs);

inline const std::vector<c10::ScalarType>& kernel_dtypes() {
  static const std::vector<c10::ScalarType> dtypes = {
      c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Double};
  return dtypes;
}

}  // namespace heddle::ops::testing
