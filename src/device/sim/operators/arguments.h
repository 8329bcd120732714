#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace heddle::device::sim {

/// The arguments of one call of a fused operator, by the names of its schema; tensors are of the
/// host already (fallback.cpp).
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack)
      : op_(op), stack_(stack) {}

  const char* op() const;
  /// Undefined if None was given.
  at::Tensor tensor(const char* name) const;
  std::vector<at::Tensor> tensors(const char* name) const;
  std::int64_t integer(const char* name) const;
  double number(const char* name) const;
  bool flag(const char* name) const;
  std::string text(const char* name) const;
  std::optional<std::vector<std::int64_t>> integers(const char* name) const;

 private:
  const c10::IValue& at(const char* name) const;

  const c10::OperatorHandle& op_;
  const std::vector<c10::IValue>& stack_;
};

using Results = std::vector<c10::IValue>;

/// An operator of op-plugin: its schema as torch_npu 2.11.0.post3 registers it, and what it
/// computes.
struct FusedOperator {
  const char* schema;
  Results (*run)(const Arguments&);
};

/// At least fp32: what the fused operators compute in.
c10::ScalarType wide_type(const at::Tensor& x);

}  // namespace heddle::device::sim
