// Every operator without a kernel of its own: computed by libtorch on views of the same memory as
// tensors of the CPU. No copy; what comes out is turned into device tensors in place.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_set>

#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::device::sim {
namespace {

/// Operators whose result's shape or value the host must know: the real device is waited for.
bool waits_for_shape(const std::string& name) {
  static const std::unordered_set<std::string> kNames = {
      "aten::equal",    "aten::nonzero",  "aten::masked_select",      "aten::_unique",
      "aten::_unique2", "aten::bincount", "aten::unique_consecutive", "aten::unique_dim",
      "aten::histc"};
  return kNames.contains(name);
}

/// One call of an operator: its arguments as tensors of the host, its results as the device's.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), schema_(op.schema()) {}

  void run() {
    require_running(schema_.name().c_str());
    lower_arguments();
    note();
    Streams::Work work(current_stream());
    Capture* const capture = Capture::current();
    torch::jit::Stack lowered;
    if (capture != nullptr) lowered = stack_of_call();
    for (const Argument& argument : arguments_) {
      work.reads(argument.host);
      if (!argument.is_written) continue;
      work.about_to_write(schema_.name(), argument.host);
      if (capture != nullptr) capture->keeps(argument.host);
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(stack_);
    }
    for (const Argument& argument : arguments_) {
      if (argument.is_written) work.writes(argument.host);
    }
    if (capture != nullptr) record(*capture, std::move(lowered));
    for (const Argument& argument : arguments_) {
      if (argument.is_written) follow(argument.device, argument.host);
    }
    const std::size_t first = stack_.size() - schema_.returns().size();
    for (std::size_t i = first; i < stack_.size(); ++i) raise(stack_[i], work);
  }

 private:
  using Tensors = std::vector<at::Tensor>;
  struct Argument {
    at::Tensor device, host;
    bool is_written;
  };

  void lower_arguments() {
    const auto& declared = schema_.arguments();
    const std::size_t first = stack_.size() - declared.size();
    for (std::size_t i = 0; i < declared.size(); ++i) {
      const auto* alias = declared[i].alias_info();
      // Not every schema of op-plugin says what it writes.
      const bool writes_all = schema_.name().starts_with("npu::");
      lower(stack_[first + i], declared[i], writes_all || (alias != nullptr && alias->isWrite()));
    }
    // A random operator that names no generator draws from the device's.
    for (std::size_t i = 0; i < declared.size(); ++i) {
      if (stack_[first + i].isNone() && is_generator(declared[i]))
        stack_[first + i] = host_generator(index_);
    }
  }

  static bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  void lower(c10::IValue& value, const c10::Argument& declared, bool is_written) {
    if (value.isTensor()) {
      value = lower(value.toTensor(), declared.name(), is_written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> lowered;
      for (const at::Tensor& tensor : value.toTensorVector())
        lowered.push_back(lower(tensor, declared.name(), is_written));
      value = lowered;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> lowered;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        lowered.push_back(tensor ? std::optional(lower(*tensor, declared.name(), is_written))
                                 : std::nullopt);
      }
      value = lowered;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    }
  }

  at::Tensor lower(const at::Tensor& tensor, const std::string& argument, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      // A number that waits in host memory travels with the launch, as on every accelerator.
      if (tensor.dim() > 0) {
        refuse(Rule::kMixedDevices, "{}: argument '{}' is a tensor of {} with {} elements",
               schema_.name(), argument, tensor.device().str(), tensor.numel());
      }
      return tensor;
    }
    index_ = tensor.device().index();
    arguments_.push_back({tensor, host_view(tensor), is_written});
    return arguments_.back().host;
  }

  void note() const {
    Driver& d = driver();
    const bool counts_rows =  // whose number the caller may know
        schema_.name() == "aten::repeat_interleave" && stack_.back().isNone();
    if (counts_rows || waits_for_shape(schema_.name())) wait(schema_.name());
    if (!d.is_recording) return;
    std::vector<at::Tensor> tensors;
    for (const Argument& argument : arguments_) tensors.push_back(argument.host);
    record_call(schema_.name(), tensors);
  }

  torch::jit::Stack stack_of_call() const {
    return {stack_.end() - static_cast<std::ptrdiff_t>(schema_.arguments().size()), stack_.end()};
  }

  /// The results on top of a stack, as tensors of the host.
  static Tensors results_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    Tensors results;
    for (std::size_t i = stack.size() - schema.returns().size(); i < stack.size(); ++i) {
      if (stack[i].isTensor() && stack[i].toTensor().defined())
        results.push_back(stack[i].toTensor());
      if (stack[i].isTensorList()) {
        for (const at::Tensor& tensor : stack[i].toTensorVector()) results.push_back(tensor);
      }
    }
    return results;
  }

  bool is_argument(const at::Tensor& host) const {
    for (const Argument& argument : arguments_) {
      if (argument.host.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return true;
    }
    return false;
  }

  /// The operator has run: its replay computes the same from the same memory into the same memory.
  void record(Capture& capture, torch::jit::Stack lowered) const {
    Tensors written, read, made = results_of(schema_, stack_);
    for (const Argument& argument : arguments_)
      (argument.is_written ? written : read).push_back(alias_of(argument.host));
    // A view, or what was written in place, is the memory of an argument.
    for (at::Tensor& result : made) {
      if (is_argument(result)) {
        result = at::Tensor();
      } else {
        result = alias_of(result);  // which stays a tensor of the host
        capture.makes(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            result.storage().unsafeGetStorageImpl()));
      }
    }
    capture.adds([op = op_, lowered = std::move(lowered), written, read, made] {
      Streams::Work work(current_stream());
      for (const at::Tensor& host : read) work.reads(host);
      for (const at::Tensor& host : written) work.about_to_write(op.schema().name(), host);
      torch::jit::Stack stack = lowered;
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.callBoxed(stack);
      const Tensors results = results_of(op.schema(), stack);
      for (std::size_t i = 0; i < made.size(); ++i) {
        if (!made[i].defined()) continue;
        made[i].copy_(results[i]);
        work.writes(made[i]);
      }
      for (const at::Tensor& host : written) work.writes(host);
    });
  }

  static at::Tensor alias_of(const at::Tensor& host) {
    return at::Tensor(host.unsafeGetTensorImpl()->shallow_copy_and_detach(
        c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
  }

  void raise(c10::IValue& value, Streams::Work& work) const {
    if (value.isTensor()) {
      value = raise(value.toTensor(), work);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> raised;
      for (const at::Tensor& tensor : value.toTensorVector()) raised.push_back(raise(tensor, work));
      value = raised;
    }
  }

  at::Tensor raise(const at::Tensor& result, Streams::Work& work) const {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const Argument& argument : arguments_) {
      if (result.is_same(argument.host)) return argument.device;
    }
    require_dtype(result.scalar_type());
    const c10::StorageImpl* const memory = result.storage().unsafeGetStorageImpl();
    c10::Storage storage;
    for (const Argument& argument : arguments_) {
      if (argument.host.storage().unsafeGetStorageImpl() == memory)
        storage = argument.device.storage();
    }
    if (!storage) {
      work.writes(result);
      storage = wrap(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                         result.storage().unsafeGetStorageImpl()),
                     index_);
    }
    c10::TensorImpl* const impl = result.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->_change_backend_component_keys(c10::Device(kType, index_));
    return result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  c10::SmallVector<Argument, 8> arguments_;
  c10::DeviceIndex index_ = current_device();
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  BoxedCall(op, *stack).run();
}

}  // namespace

void install_fallback() {
  static torch::Library every(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__,
                              __LINE__);
  every.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // A structured operator has a kernel for any back end that works out shapes by itself and asks
  // for addresses on the way: these come here directly too.
  static torch::Library structured(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                   __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("aten::")) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      structured.impl((name.name.substr(6) + overload).c_str(),
                      torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace heddle::device::sim
