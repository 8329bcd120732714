// The fused operators of op-plugin, under the schemas that torch_npu registers. They are computed
// on tensors of the host; the fallback brings the device's there.
#include "device/sim/operators/operators.h"

#include <torch/library.h>

#include <memory>
#include <utility>

#include "device/sim/driver.h"

namespace heddle::device::sim {
namespace {

class FusedKernel final : public c10::OperatorKernel {
 public:
  explicit FusedKernel(Results (*run)(const Arguments&)) : run_(run) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Results results = run_(Arguments(op, *stack));
    torch::jit::drop(*stack, op.schema().arguments().size());
    for (c10::IValue& result : results) stack->push_back(std::move(result));
  }

 private:
  Results (*run_)(const Arguments&);
};

}  // namespace

void install_operators() {
  static torch::Library library(torch::Library::DEF, "npu", std::nullopt, __FILE__, __LINE__);
  for (const auto& operators : {attention_operators(), elementwise_operators(), moe_operators(),
                                gated_delta_rule_operators()}) {
    for (const FusedOperator& op : operators) {
      library.def(op.schema);
      const std::string schema = op.schema, name = schema.substr(0, schema.find('('));
      library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU,
                                                 torch::CppFunction::makeFromBoxedFunctor(
                                                     std::make_unique<FusedKernel>(op.run))));
    }
  }
}

}  // namespace heddle::device::sim
