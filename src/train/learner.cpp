#include "train/learner.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "assembly/from_config.h"
#include "base/log.h"
#include "device/device.h"

namespace heddle::train {

Learner::Learner(const config::RunConfig& config, assembly::ModelOnRanks& placed,
                 objective::Objective& objective, std::int64_t most_tokens)
    : placed_(placed),
      objective_(objective),
      clip_norm_(config.optim.clip_norm),
      neftune_(neftune_of(config.train)),
      optimizer_(placed.trainable, config.optim, config.train.seed,
                 Optimizer::Ranks::of(placed.context.mesh),
                 learning_rates(config.optim, config.adapter)),
      spikes_(config.train),
      queued_(queued_steps(config, placed, objective, *placed.pipeline, optimizer_, spikes_)),
      recompute_(auto_recompute(config.train, placed, *placed.pipeline, optimizer_,
                                placed.model->padded_tokens(most_tokens))),
      pools_auxiliary_loss_(assembly::auxiliary_coefficient(config, placed.model->config()) > 0 &&
                            config.train.router_aux_loss == config::AuxLoss::kHf),
      router_(RouterReplay::open(config.train, placed.model->config(), placed.context.device)),
      replays_experts_(placed.model->config().is_moe() &&
                       (config.rl.replays_experts() || !config.train.router_replay.empty())) {
  require_groups(config.optim, placed.model->parameters());
  if (config.train.grad_cosine)
    cosine_.emplace(placed.trainable, Optimizer::Ranks::of(placed.context.mesh).owners);
}

void Learner::continue_after(std::int64_t done) {
  if (router_) router_->continue_after(done, placed_.context.mesh.world_group());
}

void Learner::release_graphs() {
  if (queued_) queued_->release_graphs();
}

MicroBatchLoss Learner::forward_backward(std::span<const data::Batch> micro_batches,
                                         const StepOptions& options) {
  warn_of_pooling(micro_batches.size());
  const auto dropout_step = static_cast<std::uint64_t>(options.step);
  const std::vector<objective::HeadFunction> heads = objective_.heads(
      micro_batches, {.gradient_scale = options.loss_scale, .dropout_step = dropout_step});
  if (router_) router_->begin_step(options.step);
  MicroBatchLoss sums = run_micro_batches(
      *placed_.model, placed_.adapters.get(), *placed_.pipeline, placed_.trainable, micro_batches,
      heads,
      {.auxiliary_scale = options.auxiliary_scale,
       .pooled_auxiliary_loss = pools_auxiliary_loss_ && options.auxiliary_scale > 0,
       .dropout_step = dropout_step,
       .neftune = neftune_,
       .metrics = objective_.metrics().size(),
       .router = router_ ? &*router_ : nullptr,
       .replays_experts = replays_experts_,
       .sharding = placed_.sharding.get()});
  if (router_) router_->end_step();
  sum_over_ranks(placed_.context.mesh.loss_group(), options.auxiliary_scale > 0, sums);
  if (placed_.sharding) placed_.sharding->finish_reduction();
  return sums;
}

double Learner::optim_step(double lr, double loss, std::optional<double>* cosine) {
  const double norm = optimizer_.gradient_norm();
  if (!std::isfinite(norm) || !std::isfinite(loss)) {
    for (nn::Parameter* parameter : placed_.trainable) parameter->clear_gradient();
    return norm;
  }
  if (cosine_) {
    const std::optional<double> found = cosine_->next(norm);
    if (cosine != nullptr) *cosine = found;
  }
  if (norm > spikes_.threshold()) {
    optimizer_.skip_step();
    return norm;
  }
  const double multiplier = clip_norm_ > 0 ? std::min(1.0, clip_norm_ / (norm + 1e-6)) : 1;
  optimizer_.step(placed_.model->kernels(), lr, multiplier);
  if (placed_.sharding) placed_.sharding->publish();
  device::synchronize(placed_.context.device);
  return norm;
}

Learner::Outcome Learner::step(std::span<const data::Batch> micro_batches,
                               const StepOptions& options) {
  if (!recompute_) return run(micro_batches, options);
  Outcome outcome;
  recompute_->run(objective::largest_micro_batch(*placed_.model, micro_batches),
                  [&] { outcome = run(micro_batches, options); });
  return outcome;
}

Learner::Outcome Learner::run(std::span<const data::Batch> micro_batches,
                              const StepOptions& options) {
  if (queued_) return queue(micro_batches, options).wait();
  Outcome outcome{forward_backward(micro_batches, options), 0, spikes_.threshold()};
  MicroBatchLoss& sums = outcome.sums;
  // One copy for all numbers that the host waits for.
  std::vector<at::Tensor> numbers = sums.metric_sums;
  numbers.insert(numbers.begin(), sums.loss_sum);
  const at::Tensor host = at::stack(numbers).cpu();
  sums.loss_sum = host[0];
  for (std::size_t i = 0; i < sums.metric_sums.size(); ++i)
    sums.metric_sums[i] = host[static_cast<std::int64_t>(i) + 1];
  outcome.grad_norm =
      optim_step(options.lr, sums.loss_sum.item<double>(), &outcome.gradient_cosine);
  return outcome;
}

QueuedSteps::Queued Learner::queue(std::span<const data::Batch> micro_batches,
                                   const StepOptions& options) {
  warn_of_pooling(micro_batches.size());
  return queued_->queue(micro_batches, {.loss_scale = options.loss_scale,
                                        .auxiliary_scale = options.auxiliary_scale,
                                        .lr = options.lr,
                                        .dropout_step = static_cast<std::uint64_t>(options.step),
                                        .may_record = !recompute_ || recompute_->is_settled()});
}

void Learner::warn_of_pooling(std::size_t micro_batches) {
  if (!pools_auxiliary_loss_ || micro_batches < 2 || std::exchange(warned_of_pooling_, true))
    return;
  log::warning(
      "train.router_aux_loss: hf pools every micro-batch by itself, and a step has {}: the result "
      "depends on that cut",
      micro_batches);
}

}  // namespace heddle::train
