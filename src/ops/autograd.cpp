#include "ops/autograd.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <utility>

namespace heddle::ops {
namespace {

class ClosureNode : public torch::autograd::Node {
 public:
  ClosureNode(const char* name, Backward backward) : name_(name), backward_(std::move(backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grad_outputs) override {
    TORCH_CHECK(backward_, name_, ": its backward ran already");
    const NoGradient guard;
    Tensors grads = backward_(grad_outputs);
    TORCH_CHECK(grads.size() == num_outputs(), name_, ": backward returned ", grads.size(),
                " gradients for ", num_outputs(), " inputs");
    return grads;
  }
  void release_variables() override { backward_ = nullptr; }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  Backward backward_;
};

}  // namespace

bool needs_gradient(const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) return true;
  }
  return false;
}

Tensors with_gradient(const char* name, const Tensors& inputs, Tensors outputs, Backward backward) {
  if (!needs_gradient(inputs)) return outputs;
  std::shared_ptr<ClosureNode> node(new ClosureNode(name, std::move(backward)),
                                    torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor& output : outputs) {
    if (output.defined()) {
      torch::autograd::set_history(output, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
  return outputs;
}

at::Tensor detached(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach() : tensor;
}

NoGradient::NoGradient() : previous_(at::GradMode::is_enabled()) {
  at::GradMode::set_enabled(false);
}
NoGradient::~NoGradient() { at::GradMode::set_enabled(previous_); }

void run_backward(const Tensors& outputs, const Tensors& grad_outputs) {
  // Without device threads the closures run here: this thread owns the device and the
  // communicators.
  c10::AutogradState& state = c10::AutogradState::get_tls_state();
  const bool multithreading = state.get_multithreading_enabled();
  state.set_multithreading_enabled(false);
  try {
    torch::autograd::backward(outputs, grad_outputs);
  } catch (...) {
    state.set_multithreading_enabled(multithreading);
    throw;
  }
  state.set_multithreading_enabled(multithreading);
}

}  // namespace heddle::ops
