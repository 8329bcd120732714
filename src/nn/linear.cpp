#include "nn/linear.h"

#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/mm.h>

#include "ops/autograd.h"
#include "ops/linear/few_rows.h"

namespace heddle::nn {

void accumulate_product(Parameter& weight, const at::Tensor& dy, const at::Tensor& x) {
  if (weight.accumulates_in_place() && weight.gradient().defined()) {
    weight.gradient_buffer().addmm_(dy.t(), x);
  } else {
    weight.add_gradient(at::mm(dy.t(), x));
  }
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight) {
  if (ops::few_rows_fits(x, weight)) {
    return ops::few_rows_product(ops::detached(x), ops::detached(weight));
  }
  return at::mm(x, weight.t());
}

at::Tensor linear(const at::Tensor& x, Parameter& weight) {
  at::Tensor y = ops::run_without_gradient([&] { return product(x, weight.value()); });
  // A frozen weight needs no input kept; an input without gradient needs no product.
  const at::Tensor saved = weight.trainable() ? ops::detached(x) : at::Tensor();
  const bool want_input = x.requires_grad();
  return ops::with_gradient(
      "linear", {x, weight.anchor()}, {y},
      [saved, want_input, &weight](const ops::Tensors& grads) -> ops::Tensors {
        const at::Tensor& dy = grads[0];
        if (!dy.defined()) return {{}, {}};
        if (saved.defined()) accumulate_product(weight, dy, saved);
        return {want_input ? at::mm(dy, weight.value()) : at::Tensor(), {}};
      })[0];
}

at::Tensor embedding(const at::Tensor& tokens, Parameter& table) {
  at::Tensor y = ops::run_without_gradient([&] { return table.value().index_select(0, tokens); });
  return ops::with_gradient("embedding", {table.anchor()}, {y},
                            [tokens, &table](const ops::Tensors& grads) -> ops::Tensors {
                              const at::Tensor& dy = grads[0];
                              if (!dy.defined()) return {{}};
                              if (table.accumulates_in_place() && tokens.is_cpu()) {
                                table.gradient_buffer().index_add_(0, tokens, dy);
                              } else {
                                table.add_gradient(at::embedding_dense_backward(
                                    dy, tokens, table.value().size(0), -1, false));
                              }
                              return {{}};
                            })[0];
}

}  // namespace heddle::nn
