#include "ops/npu/call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>

#include "base/errors.h"
#include "device/npu_error.h"
#include "ops/autograd.h"

namespace heddle::ops::npu {
namespace {

c10::IValue to_ivalue(const Argument& argument) {
  if (const auto* tensor = std::get_if<at::Tensor>(&argument))
    return tensor->defined() ? c10::IValue(*tensor) : c10::IValue();
  return std::visit([](const auto& value) { return c10::IValue(value); }, argument);
}

/// The arguments in the order of the schema.
std::vector<c10::IValue> bind(const c10::FunctionSchema& schema, const Named& arguments) {
  std::vector<c10::IValue> stack;
  for (const c10::Argument& argument : schema.arguments()) {
    const auto given = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const auto& a) { return a.first == argument.name(); });
    if (given != arguments.end()) {
      stack.push_back(to_ivalue(given->second));
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      stack.emplace_back();
    } else {
      throw_error<DeviceError>("{}: argument '{}' is missing", schema.name(), argument.name());
    }
  }
  for (const auto& [name, value] : arguments) {
    if (!schema.argumentIndexWithName(name)) {
      throw_error<DeviceError>("{} has no argument '{}'; its schema is {}", schema.name(), name,
                               c10::str(schema));
    }
  }
  return stack;
}

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& results) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& result : results) {
    if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) tensors.push_back(tensor);
    } else {
      tensors.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
    }
  }
  return tensors;
}

}  // namespace

std::vector<at::Tensor> call(const std::string& name, const Named& arguments,
                             const std::string& overload) {
  const std::string full = "npu::" + name;
  const auto operation = c10::Dispatcher::singleton().findSchema(c10::OperatorName(full, overload));
  if (!operation) {
    throw_error<DeviceError>(
        "operator {}{}{} is not registered: is libtorch_npu loaded, and of the version in "
        "docs/ascend.md?",
        full, overload.empty() ? "" : ".", overload);
  }
  std::vector<c10::IValue> stack = bind(operation->schema(), arguments);
  const NoGradient guard;
  try {
    operation->callBoxed(stack);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string message = error.what();
    throw_error<DeviceError>(
        "operator {}: {}", full,
        device::explain_npu_error(message).value_or(message.substr(0, message.find('\n'))));
  }
  return tensors_of(stack);
}

}  // namespace heddle::ops::npu
