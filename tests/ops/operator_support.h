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

/// What the tests of the operators share. Those that name no device run on the one of --device.
namespace heddle::ops::testing {

using heddle::testing::device;

/// The first kernel that the device has of its own for the dtype, or the reference where it has
/// none.
inline constexpr const char* kOwn = "own";

/// A table with one operator's kernel `name`, from the kernels that `add` registers; without `dims`
/// with dimensions that suit each of them.
KernelTable table_of(void (*add)(Registry&), const std::string& op, const std::string& name,
                     c10::ScalarType dtype, c10::DeviceType on = device().type(),
                     const Dims& dims = {});

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
