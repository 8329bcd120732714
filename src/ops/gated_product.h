#pragma once

#include <tuple>
#include <utility>

#include "ops/autograd.h"
#include "ops/output_again.h"

namespace heddle::ops {

/// y = f(gate) x of swiglu and output_gate, with its gradient hung on it. `a` and `b` in the order
/// of Functions' arguments: `forward(a, b)`, `backward(a, b, grad_y)` and, or null,
/// `backward_again` (the gradients and y once more, in one pass).
template <class Functions>
at::Tensor gated_product(const char* name, const Functions& functions, const at::Tensor& a,
                         const at::Tensor& b, OutputAgain again) {
  at::Tensor y = run_without_gradient([&] { return functions.forward(a, b); });
  return with_gradient(name, {a, b}, {y},
                       [functions, a = detached(a), b = detached(b),
                        again = std::move(again)](const Tensors& grads) -> Tensors {
                         const at::Tensor& dy = grads[0];
                         if (!dy.defined()) return {{}, {}};
                         if (again && functions.backward_again != nullptr) {
                           auto [da, db, y] = functions.backward_again(a, b, dy);
                           again(y);
                           return {da, db};
                         }
                         auto [da, db] = functions.backward(a, b, dy);
                         if (again) again(functions.forward(a, b));
                         return {da, db};
                       })[0];
}

}  // namespace heddle::ops
