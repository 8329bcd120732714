#include "tenants/adapter_trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "assembly/from_config.h"
#include "assembly/put_on.h"
#include "assembly/same_weights.h"
#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "comm/agreement.h"
#include "config/config.h"
#include "config/objective.h"
#include "device/device.h"
#include "objective/language_model.h"
#include "tenants/joint_passes.h"
#include "tenants/trained_set.h"
#include "train/loader_options.h"
#include "train/schedule.h"
#include "train/setup.h"
#include "train/sources.h"
#include "train/step_profile.h"
#include "train/vocabulary.h"

namespace heddle::tenants {
namespace {

/// Throws ConfigError for what a run of several adapters does not do, besides what the
/// configuration refuses by key.
void check_built(const config::RunConfig& config) {
  const auto refuse = [&](bool is_asked, const char* key, const char* instead) {
    if (!is_asked) return;
    throw_error<ConfigError>("{}: is not built for several adapters in one run (adapters:); {}",
                             config::where(config, key), instead);
  };
  refuse(config::objective_of(config) != config::Objective::kLanguageModel, "train.objective",
         "leave it at language_model");
  refuse(!config.adapter.modules_to_save.empty(), "adapter.path",
         "the adapter has modules_to_save, which belong to the base model that all share");
  refuse(!config.train.recompute, "train.recompute", "name off, elementwise, selective or full");
}

assembly::ModelOnRanks place_base(const config::RunConfig& config, const data::Tokenizer& tokenizer,
                                  std::shared_ptr<comm::World> world) {
  const runtime::Context context = assembly::make_context(config, std::move(world));
  const auto source =
      std::make_shared<const ckpt::ModelDirectory>(ckpt::ModelDirectory::open(config.model.path));
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, assembly::read_config(*source), source);
  if (recipe.auxiliary_loss) {
    throw_error<ConfigError>(
        "{}: the load-balancing loss is not built for several adapters in one run (adapters:); set "
        "it to 0",
        config::where(config, "train.router_aux_loss_coef"));
  }
  recipe.purpose = assembly::Purpose::kTenants;
  recipe.adapters = std::monostate();
  train::check_added_tokens_trained(config, recipe.config);
  recipe.config.vocab_size = train::vocabulary_rows(config, tokenizer, recipe.config.vocab_size);
  return assembly::place(recipe, context);
}

}  // namespace

AdapterTrainer::AdapterTrainer(std::vector<config::AdapterRun> runs,
                               std::vector<train::Observer*> observers,
                               const std::atomic<bool>& stop, std::shared_ptr<comm::World> world)
    : stop_(stop) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    check_built(runs[i].config);
    adapters_.push_back({.run = std::move(runs[i]), .observer = observers[i]});
  }
  if (!world || world->rank() == 0)
    lock_ = std::make_unique<train::RunLock>(shared().train.output_dir);
  train::RunTokenizer tokenizer = train::load_tokenizer(shared());
  tokenizer_ = tokenizer.tokenizer;
  tokenizer_source_ = std::move(tokenizer.source);
  base_ = place_base(shared(), *tokenizer_, std::move(world));
  sources_ = train::contents_of(*base_.source, tokenizer_source_);
  for (Adapter& adapter : adapters_) open(adapter);
  ckpt::CheckpointStoreOptions store;
  store.keep_last = static_cast<int>(shared().ckpt.keep_last);
  store.keep_best = 0;
  store.world = base_.context.mesh.world();
  files::make_chosen_directory(shared().train.output_dir, "train.output_dir");
  checkpoints_ = std::make_unique<ckpt::CheckpointStore>(
      std::filesystem::path(shared().train.output_dir) / "checkpoints", store);
  resume();
}

void AdapterTrainer::open(Adapter& adapter) {
  const config::RunConfig& config = adapter.run.config;
  const comm::Mesh& mesh = base_.context.mesh;
  const auto open_part = [&](train::DataPart part) {
    return data::Dataset::open(train::dataset_options(config, part), *tokenizer_,
                               [&](const data::TokenizeProgress& p) {
                                 adapter.observer->on_tokenize(p.file, p.fraction, p.rows);
                               });
  };
  adapter.rows = open_part(train::DataPart::kTrain);
  if (!config.data.eval.empty()) adapter.eval = open_part(train::DataPart::kEval);
  if (mesh.world()) {
    std::vector<comm::Fact> facts = {comm::content_fact("data of adapter " + adapter.run.name,
                                                        adapter.rows->key(), "the adapter's data")};
    if (adapter.eval) {
      facts.push_back(comm::content_fact("data.eval of adapter " + adapter.run.name,
                                         adapter.eval->key(), "the adapter's held-out data"));
    }
    comm::require_agreement(*mesh.world(), "data", facts);
  }
  const assembly::NewAdapters adapters = assembly::adapters_of(config.adapter);
  if (adapters.start) {
    const std::vector<comm::Fact> facts = assembly::facts_of(*adapters.start);
    if (mesh.world()) comm::require_agreement(*mesh.world(), "adapter", facts);
    for (const comm::Fact& fact : facts)
      sources_["trained"][adapter.run.name + ": " + fact.name] = fact.value;
  }
  adapter.factors = assembly::put_on(adapters, base_);
  std::vector<nn::Parameter*> parameters;
  adapter.factors->visit_parameters([&](nn::Parameter& factor) {
    if (factor.is_held()) parameters.push_back(&factor);
  });
  train::require_groups(config.optim, parameters);
  adapter.optimizer = std::make_unique<train::Optimizer>(
      std::move(parameters), config.optim, config.train.seed, train::Optimizer::Ranks::of(mesh),
      train::learning_rates(config.optim, config.adapter));
  adapter.loader = train::make_loader(adapter.rows, config, mesh);
  adapter.paced = train::paced(config, adapter.loader->info());
  train::check_schedule(adapter.paced, adapter.loader->info().total_steps);
  adapter.loop.cursor = adapter.loader->cursor();
}

void AdapterTrainer::end(Adapter& adapter) {
  adapter.is_done = true;
  adapter.factors->visit_parameters([](nn::Parameter& factor) { factor.set_trainable(false); });
}

train::Evaluation AdapterTrainer::evaluate(const Adapter& adapter) {
  const comm::Mesh& mesh = base_.context.mesh;
  data::EvaluationLoader::Options options;
  options.micro_batch_tokens = adapter.paced.train.micro_batch_tokens;
  options.rank = static_cast<int>(mesh.data_rank());
  options.world = static_cast<int>(mesh.data_size());
  data::EvaluationLoader loader(adapter.eval, options);
  double loss = 0, weight = 0;
  while (std::optional<data::Batch> batch = loader.next()) {
    weight += batch->loss_weight_sum;
    const std::vector<std::vector<Piece>> pass = {
        {{.set = adapter.factors.get(),
          .batch = std::move(*batch),
          .head = objective::language_model_head(*base_.model, 1, /*want_gradients=*/false)}}};
    loss += run_joint_passes(base_, pass, {.wants_gradients = false})[0][0].loss;
  }
  return {loss / mesh.loss_group().all_reduce_sum(weight), {}};
}

void AdapterTrainer::evaluate_on_start() {
  for (const Adapter& adapter : adapters_) {
    if (adapter.eval && adapter.paced.train.eval_on_start && adapter.loop.step == 0)
      adapter.observer->on_evaluation(0, evaluate(adapter), /*best=*/false);
  }
}

void AdapterTrainer::evaluate_if_due(Adapter& adapter, train::StepInfo& info) {
  const std::int64_t total = adapter.loader->info().total_steps;
  if (!train::pause_behind(adapter.paced, adapter.eval != nullptr, info.step, total).evaluates)
    return;
  const train::Evaluation evaluation = evaluate(adapter);
  train::LoopState& loop = adapter.loop;
  const bool improved = !loop.best_eval || evaluation.loss < *loop.best_eval;
  if (improved) loop.best_eval = evaluation.loss;
  loop.evaluations_without_gain = improved ? 0 : loop.evaluations_without_gain + 1;
  info.add(evaluation);
  adapter.observer->on_evaluation(info.step, evaluation, improved);
}

std::vector<AdapterTrainer::Begun> AdapterTrainer::next_steps() {
  std::vector<Begun> steps;
  for (Adapter& adapter : adapters_) {
    if (adapter.is_done) continue;
    const std::int64_t patience = adapter.paced.train.early_stop_patience;
    if (patience > 0 && adapter.loop.evaluations_without_gain >= patience) {
      end(adapter);
      continue;
    }
    std::optional<data::Step> step = adapter.loader->next();
    if (step) {
      if (step->loss_weight_sum <= 0) {
        throw_error<DataError>("adapter {}: optimizer step {} has no token with a loss weight",
                               adapter.run.name, step->step + 1);
      }
      steps.push_back({&adapter, std::move(*step)});
      continue;
    }
    end(adapter);
  }
  return steps;
}

void AdapterTrainer::round(std::vector<Begun> steps) {
  const auto start = std::chrono::steady_clock::now();
  // Pass m has micro-batch m of every adapter that has one.
  std::vector<std::vector<Piece>> passes;
  std::vector<std::vector<std::size_t>> owners;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const data::Step& step = steps[i].step;
    for (std::size_t m = 0; m < step.micro_batches.size(); ++m) {
      if (m == passes.size()) passes.emplace_back(), owners.emplace_back();
      passes[m].push_back(
          {.set = steps[i].adapter->factors.get(),
           .batch = step.micro_batches[m],
           .head = objective::language_model_head(*base_.model, 1 / step.loss_weight_sum),
           .dropout_step = static_cast<std::uint64_t>(step.step) + 1});
      owners[m].push_back(i);
    }
  }
  const auto sums = run_joint_passes(base_, passes, {.metrics = 1});
  std::vector<double> losses(steps.size()), entropies(steps.size());
  for (std::size_t m = 0; m < passes.size(); ++m) {
    for (std::size_t k = 0; k < owners[m].size(); ++k) {
      losses[owners[m][k]] += sums[m][k].loss;
      entropies[owners[m][k]] += sums[m][k].metrics[0];
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::vector<SetStep> updates;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Adapter& adapter = *steps[i].adapter;
    const config::OptimSection& optim = adapter.paced.optim;
    updates.push_back(
        {.optimizer = adapter.optimizer.get(),
         .lr = train::learning_rate(optim, steps[i].step.step, adapter.loader->info().total_steps),
         .clip_norm = optim.clip_norm,
         .loss = losses[i]});
  }
  const std::vector<StepResult> results = tenants::step(base_, updates);
  if (base_.sharding) base_.sharding->publish();
  device::synchronize(base_.context.device);
  for (std::size_t i = 0; i < steps.size(); ++i)
    finish_step(steps[i], updates[i], results[i], entropies[i], seconds);
}

void AdapterTrainer::finish_step(const Begun& begun, const SetStep& update,
                                 const StepResult& result, double entropy, double seconds) {
  Adapter& adapter = *begun.adapter;
  const data::Step& step = begun.step;
  train::StepInfo info;
  info.step = step.step + 1;
  info.lr = update.lr;
  info.loss = update.loss / step.loss_weight_sum;
  info.metrics.set(metric::kEntropy, entropy / step.loss_weight_sum);
  info.grad_norm = result.grad_norm;
  if (!result.updated) {
    adapter.failure = fmt::format(
        "step {}: the loss is {} and the gradient norm {}; nothing was updated. Lower optim.lr, or "
        "check the data of this step",
        info.step, info.loss, info.grad_norm);
    log::error("adapter {}: {}", adapter.run.name, adapter.failure);
    end(adapter);
    return;
  }
  warn(adapter, adapter.untrained.after_step(*adapter.optimizer, info.lr, info.grad_norm));
  info.seconds = seconds;
  info.tokens = step.tokens;
  info.loss_tokens = step.loss_rows;
  info.tokens_per_s = static_cast<double>(step.tokens) / seconds;
  const std::int64_t per_epoch = std::max<std::int64_t>(1, adapter.loader->info().steps_per_epoch);
  info.epoch = static_cast<double>(info.step) / static_cast<double>(per_epoch);
  info.memory_bytes = device::memory(base_.context.device).peak_bytes;
  if (adapter.loop.step == 0) adapter.loop.first_loss = info.loss;
  adapter.loop.last_loss = info.loss;
  adapter.loop.step = info.step;
  adapter.loop.cursor = adapter.loader->cursor();
  evaluate_if_due(adapter, info);
  adapter.observer->on_step(info);
}

void AdapterTrainer::warn(const Adapter& adapter, const std::string& message) const {
  if (message.empty()) return;
  if (base_.context.mesh.rank() == 0) log::warning("adapter {}: {}", adapter.run.name, message);
  adapter.observer->on_warning(message);
}

AdaptersSummary AdapterTrainer::run() {
  const comm::Group everybody = base_.context.mesh.world_group();
  const auto start = std::chrono::steady_clock::now();
  AdaptersSummary result;
  evaluate_on_start();
  while (!(result.stopped = everybody.any(stop_))) {
    std::vector<Begun> steps = next_steps();
    if (steps.empty()) break;
    std::optional<train::StepProfile> profile;
    if (rounds_ + 1 == shared().log.profile_step && everybody.rank() == 0)
      profile.emplace(base_.context.device);
    round(std::move(steps));
    if (profile) profile->finish(shared().train.output_dir);
    ++rounds_;
    const std::int64_t every = shared().ckpt.every;
    if (every > 0 && rounds_ % every == 0) save();
  }
  for (Adapter& adapter : adapters_) {
    if (adapter.failure.empty()) warn(adapter, adapter.untrained.at_end(*adapter.optimizer));
  }
  if (saved_rounds_ != rounds_) save();
  checkpoints_->wait();
  if (!result.stopped) export_all();
  result.rounds = rounds_;
  for (const Adapter& adapter : adapters_) {
    train::Summary summary;
    summary.steps = adapter.loop.step;
    summary.first_loss = adapter.loop.first_loss;
    summary.last_loss = adapter.loop.last_loss;
    summary.has_eval = adapter.loop.best_eval.has_value();
    summary.best_eval = adapter.loop.best_eval.value_or(0);
    summary.stopped = result.stopped;
    summary.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!result.stopped && adapter.failure.empty())
      summary.output =
          std::filesystem::path(shared().train.output_dir) / "final" / adapter.run.name;
    adapter.observer->on_finish(summary);
    result.adapters.push_back({adapter.run.name, summary, adapter.failure});
  }
  return result;
}

}  // namespace heddle::tenants
