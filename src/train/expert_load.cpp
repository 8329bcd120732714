#include "train/expert_load.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/moe/occurrences.h"

namespace heddle::train {

at::Tensor expert_load(const std::vector<at::Tensor>& experts, std::int64_t first_layer,
                       const std::vector<bool>& sparse, std::int64_t num_experts,
                       std::int64_t real_tokens, c10::Device device) {
  const auto rows = std::count(sparse.begin(), sparse.end(), true);
  if (rows == 0) return {};
  const at::Tensor load =
      at::zeros({rows, num_experts}, at::TensorOptions().dtype(at::kLong).device(device));
  std::int64_t row = std::count(sparse.begin(), sparse.begin() + first_layer, true);
  for (const at::Tensor& chosen : experts) {
    if (!chosen.defined()) continue;
    load[row++].copy_(ops::occurrences(chosen.narrow(0, 0, real_tokens), num_experts));
  }
  return load;
}

LoadBalance load_max_over_mean(const at::Tensor& load) {
  const at::Tensor wide = load.cpu().to(at::kDouble);
  const at::Tensor ratio = at::amax(wide, {1}) / wide.mean(1);
  return {ratio.max().item<double>(), ratio.mean().item<double>()};
}

}  // namespace heddle::train
