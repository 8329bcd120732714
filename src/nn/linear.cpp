#include "nn/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "ops/autograd.h"
#include "ops/linear/few_rows.h"

namespace heddle::nn {

void accumulate_product(Parameter& weight, const at::Tensor& dy, const at::Tensor& x) {
  if (!weight.accumulates_in_place() && x.is_cuda()) {
    // cuBLAS sums half precision in fp32: keep those sums, add to them in the product.
    if (weight.gradient().defined()) {
      at::Tensor& sum = weight.gradient_buffer();
      at::addmm_out(sum, sum, dy.t(), x, sum.scalar_type());
    } else {
      weight.add_gradient(at::mm(dy.t(), x, at::kFloat));
    }
  } else if (weight.accumulates_in_place() && weight.gradient().defined()) {
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

std::vector<at::Tensor> linears(const LinearInput& input, const std::vector<Parameter*>& weights) {
  const at::Tensor& x = input.value;
  const ops::Tensors outputs = ops::run_without_gradient([&] {
    ops::Tensors products;
    for (const Parameter* weight : weights) products.push_back(product(x, weight->value()));
    return products;
  });
  // A frozen weight needs no input kept; an input without gradient needs no product.
  const bool any_trained = std::any_of(weights.begin(), weights.end(),
                                       [](const Parameter* weight) { return weight->trainable(); });
  const auto again = any_trained ? input.again : std::function<at::Tensor()>();
  const at::Tensor saved = any_trained && !again ? ops::detached(x) : at::Tensor();
  const bool want_input = x.requires_grad();
  ops::Tensors inputs = {x};
  for (const Parameter* weight : weights) inputs.push_back(weight->anchor());
  return ops::with_gradient(
      "linear", inputs, outputs,
      [saved, again, want_input, weights](const ops::Tensors& grads) -> ops::Tensors {
        ops::Tensors result(weights.size() + 1);
        const at::Tensor x = again ? again() : saved;
        for (std::size_t i = 0; i < weights.size(); ++i) {
          const at::Tensor& dy = grads[i];
          if (!dy.defined()) continue;
          if (weights[i]->trainable()) accumulate_product(*weights[i], dy, x);
          if (!want_input) continue;
          // The products add into one gradient, so that no pass over it does.
          at::Tensor& dx = result[0];
          if (dx.defined()) {
            dx.addmm_(dy, weights[i]->data());
          } else {
            dx = at::mm(dy, weights[i]->data());
          }
        }
        return result;
      });
}

at::Tensor linear(const LinearInput& x, Parameter& weight) { return linears(x, {&weight})[0]; }

std::vector<at::Tensor> forward_all(const LinearInput& x, const std::vector<Linear*>& layers) {
  const auto adapted = std::count_if(layers.begin(), layers.end(), [](const Linear* layer) {
    return layer->adapter() != nullptr;
  });
  if (adapted == 0) {
    std::vector<Parameter*> weights;
    for (Linear* layer : layers) weights.push_back(&layer->weight());
    return linears(x, weights);
  }
  if (adapted == static_cast<std::ptrdiff_t>(layers.size()))
    return layers[0]->adapter()->forward(x, layers);
  std::vector<at::Tensor> outputs;
  for (Linear* layer : layers) outputs.push_back(layer->forward(x));
  return outputs;
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
