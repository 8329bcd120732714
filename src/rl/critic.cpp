#include "rl/critic.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/log.h"
#include "train/schedule.h"

namespace heddle::rl {
namespace {

constexpr const char* kState = "critic/";

config::RunConfig config_of_critic(config::RunConfig config) {
  const config::RlCritic& critic = config.rl.critic;
  config.model.head = models::Head::kClassify;
  config.model.num_labels = 1;
  config.optim.lr = critic.lr;
  config.optim.lr_head = config.optim.lr_embeddings = 0;
  config.optim.schedule = critic.schedule;
  config.optim.warmup_steps = critic.lr_warmup_steps;
  config.optim.clip_norm = critic.clip_norm;
  // It has no language-model head, and is measured by values alone.
  config.adapter.modules_to_save.clear();
  // Its adapter is to learn values: what the policy's has learned is no start of it.
  config.adapter.path.clear();
  config.train.freeze.clear();
  config.train.router_aux_loss_coef = 0;
  config.train.router_record.clear();
  config.train.router_replay.clear();
  config.train.spike = config::Spike::kOff;
  config.train.grad_cosine = false;
  if (!config.train.recompute) config.train.recompute = parallel::Recompute::kFull;
  return config;
}

assembly::ModelOnRanks place(const config::RunConfig& config, const train::Setup& setup) {
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, setup.placed.model->config(), setup.placed.source);
  recipe.generates = false;
  // Needed of models that are written as a classifier of transformers, which no critic is.
  recipe.config.weights.classification_class = "critic";
  return assembly::place(recipe, setup.placed.context);
}

}  // namespace

Critic::Critic(const config::RunConfig& config, const train::Setup& setup, std::int64_t steps)
    : config_(config_of_critic(config)),
      steps_(steps),
      placed_(place(config_, setup)),
      objective_(placed_, config.rl.critic.clip),
      learner_(config_, placed_, objective_,
               std::max(config.train.micro_batch_tokens, config.data.max_length)) {}

void Critic::evaluate(const data::Step& step, Experience& experience) const {
  const std::vector<std::vector<std::int32_t>>& rows = experience.tokens();
  std::vector<std::int64_t> begin = {0};
  for (const std::vector<std::int32_t>& row : rows) begin.push_back(begin.back() + std::ssize(row));
  // Each value is known to one rank: the sum fills the others in.
  at::Tensor table = at::zeros({begin.back()}, at::kDouble);
  auto* const all = table.mutable_data_ptr<double>();
  for (const data::Batch& batch : step.micro_batches) {
    const at::Tensor found = objective_.values(batch);
    const auto* const values = found.const_data_ptr<double>();
    for (std::size_t s = 0; s < batch.row_ids.size(); ++s) {
      std::copy(values + batch.cu_seqlens_host[s], values + batch.cu_seqlens_host[s + 1],
                all + begin[static_cast<std::size_t>(batch.row_ids[s])]);
    }
  }
  placed_.context.mesh.world_group().all_reduce_sum(table);
  std::vector<std::vector<double>> values;
  for (std::size_t i = 0; i < rows.size(); ++i)
    values.emplace_back(all + begin[i], all + begin[i + 1]);
  experience.set_values(std::move(values));
}

void Critic::learn(const data::Step& step, const Experience& experience) {
  objective_.set_rows(experience.value_rows());
  std::vector<data::Batch> batches = step.micro_batches;
  // The experts that generation chose are the policy's; the critic's routers choose for themselves.
  for (data::Batch& batch : batches) batch.experts = at::Tensor();
  const double divisor = objective_.divisor(step);
  last_ = {};
  if (divisor == 0) return;
  const double lr = train::learning_rate(config_.optim, step.step, steps_);
  for (std::int64_t update = 0; update < config_.rl.critic.updates; ++update) {
    const train::Learner::Outcome outcome =
        learner_.step(batches, {.step = step.step + 1, .loss_scale = 1 / divisor, .lr = lr});
    const double loss = outcome.sums.loss_sum.item<double>() / divisor;
    if (!std::isfinite(loss) || !std::isfinite(outcome.grad_norm)) {
      throw_error<Error>(
          "step {}: the critic's loss is {} and its gradient norm {}; it was not updated. Lower "
          "rl.critic.lr, or resume from the last checkpoint",
          step.step + 1, loss, outcome.grad_norm);
    }
    const std::string warning = untrained_.after_step(learner_.optimizer(), lr, outcome.grad_norm);
    if (!warning.empty() && placed_.context.mesh.rank() == 0)
      log::warning("the critic: {}", warning);
    // Values are those that advantages were made of in the first update, and the furthest from them
    // in the last one.
    if (update == 0) {
      last_.set(metric::kValueLoss, loss);
      last_.set(metric::kCriticGradNorm, outcome.grad_norm);
    }
    last_.set(metric::kValueClipped, outcome.sums.metric_sums.at(0).item<double>() / divisor);
  }
  last_.set(metric::kExplainedVariance, experience.explained_variance());
}

void Critic::report(train::StepInfo& info) const {
  for (const Metrics::Entry& entry : last_) info.metrics.set(*entry.metric, entry.value);
}

std::vector<ckpt::TensorPart> Critic::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts = learner_.optimizer().state(with_copies);
  for (ckpt::TensorPart& part : parts) part.name.insert(0, kState);
  return parts;
}

void Critic::restored(std::int64_t updates) {
  learner_.optimizer().set_steps(updates);
  if (placed_.sharding) placed_.sharding->publish(/*with_frozen=*/true);
}

}  // namespace heddle::rl
