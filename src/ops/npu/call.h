#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

/// Operators of torch_npu, called through libtorch's dispatcher by their schema: no header of the
/// vendor, and the simulated device runs the same source.
namespace heddle::ops::npu {

/// A value of a schema's argument: Tensor, Tensor[], int or bool, float, str, int[]. An undefined
/// tensor is None.
using Argument = std::variant<at::Tensor, std::vector<at::Tensor>, std::int64_t, bool, double,
                              std::string, std::vector<std::int64_t>>;
using Named = std::vector<std::pair<std::string, Argument>>;

/// Dtypes of the kernels that call these operators. float64 never reaches an NPU, whose tensors
/// cannot have it; the simulated device's tests of equality lift that rule.
inline std::vector<c10::ScalarType> dtypes() {
  return {c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Double};
}

/// Calls `npu::<name>` with arguments by their names in the schema; others take its defaults, so
/// that a version of torch_npu with more of them is called the same. Returns the tensors of the
/// result in order, those of a list one after the other, undefined where the result is not a
/// tensor. Nothing is recorded by autograd. Throws DeviceError that names the operator: it is
/// missing (libtorch_npu is not loaded, or too old), has no such argument, or failed.
std::vector<at::Tensor> call(const std::string& name, const Named& arguments,
                             const std::string& overload = "");

}  // namespace heddle::ops::npu
