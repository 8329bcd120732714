#include "train/auxiliary_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "ops/autograd.h"

namespace heddle::train {

double auxiliary_coefficient(const config::RunConfig& config,
                             const models::qwen3_5::Config& model) {
  if (!model.is_moe()) return 0;
  if (config.train.router_aux_loss_coef >= 0) return config.train.router_aux_loss_coef;
  return model.output_router_logits ? model.router_aux_loss_coef : 0;
}

std::int64_t sparse_layers(const models::qwen3_5::Config& model) {
  return std::count(model.sparse_mlp.begin(), model.sparse_mlp.end(), true);
}

at::Tensor pool_auxiliary_loss(parallel::BlockRunner::Pass& pass, double rows) {
  const ops::NoGradient guard;
  const auto experts = static_cast<double>(pass.expert_assignments.size(0));
  // Linear in the probabilities, as the choice of experts has no gradient.
  pass.auxiliary_gradient = pass.expert_assignments * (experts / rows);
  return at::sum(pass.auxiliary_gradient * pass.auxiliary_loss);
}

}  // namespace heddle::train
