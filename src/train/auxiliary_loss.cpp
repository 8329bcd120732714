#include "train/auxiliary_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
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

at::Tensor pool_auxiliary_loss(parallel::BlockRunner::Pass& pass, double rows,
                               const comm::Group& group) {
  const ops::NoGradient guard;
  const std::int64_t experts = pass.expert_assignments.size(0);
  at::Tensor sums =
      at::cat({pass.expert_assignments, at::full({1}, rows, pass.expert_assignments.options())});
  group.all_reduce_sum(sums);
  const at::Tensor all_rows = sums.narrow(0, experts, 1).clamp_min(1);
  // Linear in the probabilities, as the choice of experts has no gradient.
  pass.auxiliary_gradient = sums.narrow(0, 0, experts) * (static_cast<double>(experts) / all_rows);
  return at::sum(pass.auxiliary_gradient * pass.auxiliary_loss);
}

}  // namespace heddle::train
