#include "device/sim/operators/arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "base/errors.h"

namespace heddle::device::sim {

const char* Arguments::op() const { return op_.schema().name().c_str(); }

const c10::IValue& Arguments::at(const char* name) const {
  const auto index = op_.schema().argumentIndexWithName(name);
  if (!index) throw_error<InternalError>("{} has no argument '{}'", op(), name);
  return stack_[stack_.size() - op_.schema().arguments().size() + static_cast<std::size_t>(*index)];
}

at::Tensor Arguments::tensor(const char* name) const {
  const c10::IValue& value = at(name);
  return value.isNone() ? at::Tensor() : value.toTensor();
}
std::vector<at::Tensor> Arguments::tensors(const char* name) const {
  return at(name).toTensorVector();
}
std::int64_t Arguments::integer(const char* name) const {
  const c10::IValue& value = at(name);
  return value.isNone() ? 0 : value.toInt();
}
double Arguments::number(const char* name) const { return at(name).toScalar().toDouble(); }
bool Arguments::flag(const char* name) const {
  const c10::IValue& value = at(name);
  return !value.isNone() && value.toBool();
}
std::string Arguments::text(const char* name) const { return at(name).toStringRef(); }
std::optional<std::vector<std::int64_t>> Arguments::integers(const char* name) const {
  const c10::IValue& value = at(name);
  if (value.isNone()) return std::nullopt;
  return value.toIntVector();
}

c10::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace heddle::device::sim
