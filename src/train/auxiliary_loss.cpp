#include "train/auxiliary_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/autograd.h"

namespace heddle::train {

std::int64_t sparse_layers(const models::Config& model) {
  const std::vector<bool> sparse = model.sparse_layers();
  return std::count(sparse.begin(), sparse.end(), true);
}

at::Tensor PooledBalance::sums(const parallel::BlockRunner::Tape& tape, std::int64_t tokens,
                               const at::Tensor& before, at::TensorOptions options) const {
  const ops::NoGradient guard;
  at::Tensor sums = before.defined() ? before.clone() : at::zeros({sums_size()}, options);
  if (!tape.expert_assignments.defined()) return sums;
  sums.narrow(0, 0, experts_).add_(tape.expert_assignments);
  sums.narrow(0, experts_, experts_).add_(tape.auxiliary_loss);
  const auto layers = std::count_if(tape.experts.begin(), tape.experts.end(),
                                    [](const at::Tensor& chosen) { return chosen.defined(); });
  sums.narrow(0, 2 * experts_, 1).add_(static_cast<double>(layers * tokens));
  return sums;
}

PooledBalance::Closed PooledBalance::close(const at::Tensor& sums) const {
  const ops::NoGradient guard;
  at::Tensor of_all = at::cat({sums.narrow(0, 0, experts_), sums.narrow(0, 2 * experts_, 1)});
  peers_.all_reduce_sum(of_all);
  const at::Tensor rows = of_all.narrow(0, experts_, 1).clamp_min(1);
  // Linear in the probabilities, as the choice of experts has no gradient.
  const at::Tensor gradient =
      of_all.narrow(0, 0, experts_) * (static_cast<double>(experts_) / rows);
  return {gradient, at::sum(gradient * sums.narrow(0, experts_, experts_))};
}

}  // namespace heddle::train
