#include "train/expert_load.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/stack.h>

namespace heddle::train {

at::Tensor expert_load(const std::vector<at::Tensor>& experts, std::int64_t num_experts,
                       std::int64_t real_tokens) {
  std::vector<at::Tensor> layers;
  for (const at::Tensor& chosen : experts) {
    if (chosen.defined())
      layers.push_back(
          at::bincount(chosen.narrow(0, 0, real_tokens).reshape({-1}), {}, num_experts));
  }
  return layers.empty() ? at::Tensor() : at::stack(layers);
}

LoadBalance load_max_over_mean(const at::Tensor& load) {
  const at::Tensor wide = load.to(at::kDouble);
  const at::Tensor ratio = at::amax(wide, {1}) / wide.mean(1);
  return {ratio.max().item<double>(), ratio.mean().item<double>()};
}

}  // namespace heddle::train
