#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

/// The one place where our kernels meet libtorch's autograd. An operator computes its outputs
/// without recording, then hangs a closure on them:
///
///     at::Tensor scale(const at::Tensor& x, double s) {
///       at::Tensor y = run_without_gradient([&] { return x * s; });
///       return with_gradient("scale", {x}, {y}, [s](const Tensors& dy) { return Tensors{dy[0] *
///       s}; })[0];
///     }
///
/// The closure must capture inputs detached (detached(x)): a captured output or undetached input
/// would be a cycle.
namespace heddle::ops {

using Tensors = std::vector<at::Tensor>;

/// Takes the gradients of the outputs (undefined where nothing flowed back) and returns those of
/// the inputs, in order (undefined where there is none). Runs with gradient recording off, at most
/// once.
using Backward = std::function<Tensors(const Tensors& grad_outputs)>;

/// True if gradients are being recorded and one of the inputs (undefined ones are ignored) asks for
/// them: save what the backward needs only then.
bool needs_gradient(const Tensors& inputs);

/// `outputs` with `backward` attached as their gradient function if needs_gradient(inputs); they
/// must be fresh tensors of a floating dtype or undefined. `name` appears in profiles and errors.
Tensors with_gradient(const char* name, const Tensors& inputs, Tensors outputs, Backward backward);

/// A tensor on the storage of `tensor` without history; undefined stays undefined.
at::Tensor detached(const at::Tensor& tensor);

/// Turns gradient recording off for its life.
class NoGradient {
 public:
  NoGradient();
  ~NoGradient();
  NoGradient(const NoGradient&) = delete;
  NoGradient& operator=(const NoGradient&) = delete;

 private:
  bool previous_;
};

template <class F>
auto run_without_gradient(F&& f) {
  const NoGradient guard;
  return f();
}

/// Runs the backward of the graph below `outputs` on this thread, accumulating into the leaves.
/// Once per graph.
void run_backward(const Tensors& outputs, const Tensors& grad_outputs);

}  // namespace heddle::ops
