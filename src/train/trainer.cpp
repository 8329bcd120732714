#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "assembly/from_config.h"
#include "assembly/not_finite.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "ckpt/adapter_names.h"
#include "comm/group.h"
#include "comm/world.h"
#include "config/config.h"
#include "device/device.h"
#include "models/flops.h"
#include "ops/autograd.h"
#include "train/auxiliary_loss.h"
#include "train/best_evaluation.h"
#include "train/describe.h"
#include "train/expert_load.h"
#include "train/idle_ranks.h"
#include "train/loader_options.h"
#include "train/result.h"
#include "train/resume.h"
#include "train/step_profile.h"

namespace heddle::train {
namespace {

/// Rank 0's preparations before anything is written.
std::unique_ptr<RunLock> claim_output(const config::RunConfig& config, const comm::World* world) {
  if (world != nullptr && world->rank() > 0) return nullptr;
  check_resume(config);
  return std::make_unique<RunLock>(config.train.output_dir);
}

}  // namespace

Trainer::Trainer(const config::RunConfig& config, Observer& observer, const std::atomic<bool>& stop,
                 std::shared_ptr<comm::World> world, const MakeSubject& make_subject)
    : config_(config),
      observer_(observer),
      stop_(stop),
      lock_(claim_output(config, world.get())),
      setup_(make_setup(config, observer, std::move(world))),
      subject_(make_subject(config_, setup_)),
      objective_(*subject_.objective),
      steps_(*subject_.steps),
      learner_(config, setup_.placed, objective_,
               std::max(config.train.micro_batch_tokens, config.data.max_length)),
      paced_(paced(config, steps_.info())),
      auxiliary_coefficient_(
          assembly::auxiliary_coefficient(config, setup_.placed.model->config())) {
  check_schedule(paced_, steps_.info().total_steps);
  files::make_writable_directory(config.train.output_dir);
  ckpt::CheckpointStoreOptions store;
  store.keep_last = static_cast<int>(config.ckpt.keep_last);
  store.keep_best = config.ckpt.keep_best ? 1 : 0;
  store.metric_name = config.eval.metric;
  store.world = setup_.placed.context.mesh.world();
  checkpoints_ = std::make_unique<ckpt::CheckpointStore>(
      std::filesystem::path(config.train.output_dir) / "checkpoints", store);
  // Others report nothing, and measured beside each other ranks would share their cores.
  if (setup_.placed.context.mesh.rank() == 0) {
    const int bits = static_cast<int>(8 * c10::elementSize(setup_.placed.context.dtype));
    peak_flops_ = device::peak_flops(setup_.placed.context.device, bits) *
                  static_cast<double>(setup_.placed.context.mesh.world_size());
  }
  const std::vector<std::string>& made = setup_.placed.load_report.initialized;
  for (nn::Parameter* parameter : setup_.placed.model->parameters()) {
    const bool is_made = std::find(made.begin(), made.end(), parameter->name()) != made.end();
    if (is_made && !parameter->trainable()) keep(*parameter);
  }
  objective_.prepare({setup_.train, setup_.eval});
  resume();
  // A checkpoint may leave another number of steps than a start does.
  paced_ = paced(config_, steps_.info());
  if (std::exchange(loop_.best_metric, config_.eval.metric) != config_.eval.metric) {
    loop_.best_eval.reset();
    loop_.evaluations_without_gain = 0;
  }
  learner_.continue_after(first_step_);
}

namespace {

void require_finite(const StepInfo& info, const Setup& setup) {
  if (std::isfinite(info.loss) && std::isfinite(info.grad_norm)) return;
  if (const std::string weight = assembly::not_finite_parameter(setup.placed); !weight.empty()) {
    throw_error<Error>(
        "step {}: the loss is {}, because {} holds NaN or infinity; nothing was updated. The run "
        "needs weights that are finite: look at those of {}",
        info.step, info.loss, weight,
        setup.placed.source ? setup.placed.source->path().string() : "the start");
  }
  throw_error<Error>(
      "step {}: the loss is {} and the gradient norm {}; nothing was updated. Lower optim.lr, "
      "check the data of this step, or resume from the last checkpoint with another train.seed",
      info.step, info.loss, info.grad_norm);
}

}  // namespace

Trainer::Divisors Trainer::divisors_of(const data::Step& step) const {
  const double loss = objective_.divisor(step);
  if (loss <= 0)
    throw_error<DataError>("optimizer step {} has no token with a loss weight", step.step + 1);
  return {loss, static_cast<double>(std::max<std::int64_t>(
                    1, sparse_layers(setup_.placed.model->config()) * step.tokens))};
}

double Trainer::learning_rate_of(const data::Step& step) const {
  if (!steps_.trains(step.step)) return 0;
  return learning_rate(paced_.optim, step.step, steps_.info().total_steps);
}

Pause Trainer::pause_behind(std::int64_t done) const {
  return train::pause_behind(paced_, steps_.has_evaluation(), done, steps_.info().total_steps);
}

Learner::StepOptions Trainer::options_of(const data::Step& step) const {
  const Divisors divisors = divisors_of(step);
  return {.step = step.step + 1,
          .loss_scale = 1 / divisors.loss,
          .auxiliary_scale = auxiliary_coefficient_ / divisors.sparse_tokens,
          .lr = learning_rate_of(step)};
}

void Trainer::queue_next(const data::Step& step) {
  if (pause_behind(step.step + 1).any()) return;
  if (setup_.placed.context.mesh.world_group().any(stop_)) return;
  ahead_ = take_step();
  if (!ahead_) return;
  // One without a loss is refused when its turn comes.
  if (ahead_->step.loss_weight_sum > 0)
    ahead_->queued = learner_.queue(ahead_->step.micro_batches, options_of(ahead_->step));
}

std::optional<Trainer::TakenStep> Trainer::take_step() {
  nlohmann::json cursor;
  if (learner_.spikes().stops()) cursor = steps_.cursor();
  std::optional<data::Step> step = steps_.next();
  if (!step) return std::nullopt;
  return TakenStep{std::move(*step), std::nullopt, std::move(cursor)};
}

std::optional<Trainer::TakenStep> Trainer::next_step() {
  return ahead_ ? std::exchange(ahead_, std::nullopt) : take_step();
}

Learner::Outcome Trainer::run(TakenStep& taken) {
  const data::Step& step = taken.step;
  if (!learner_.queues_ahead()) return learner_.step(step.micro_batches, options_of(step));
  QueuedSteps::Queued queued = taken.queued ? std::move(*taken.queued)
                                            : learner_.queue(step.micro_batches, options_of(step));
  queue_next(step);
  return queued.wait();
}

void Trainer::judge_norm(const Learner::Outcome& outcome, const TakenStep& taken, StepInfo& info) {
  SpikePolicy& spikes = learner_.spikes();
  if (!spikes.is_on()) return;
  const bool is_spike = outcome.grad_norm > outcome.spike_threshold;
  if (is_spike && spikes.stops()) {
    // The device was given the next step already, which it refused like this one.
    if (ahead_ && ahead_->queued) ahead_->queued->wait();
    ahead_.reset();
    const std::int64_t done = info.step - 1;
    if (last_saved_ != done) {
      // Every step since the last checkpoint was counted once.
      learner_.optimizer().set_steps(loop_.optimizer_steps + done - loop_.step);
      save(done, taken.cursor);
    }
    checkpoints_->wait();
    throw_error<Error>(
        "step {}: the gradient norm {:.4g} is above {:.4g}, train.spike_factor {} times the median "
        "of the last {} steps; nothing was updated, and {} holds the weights before it. Look at "
        "the data of this step, lower optim.lr, or continue with train.spike=skip or a larger "
        "train.spike_factor",
        info.step, outcome.grad_norm, outcome.spike_threshold, config_.train.spike_factor,
        config_.train.spike_window, last_checkpoint_.string());
  }
  spikes.remember(outcome.grad_norm);
  loop_.recent_norms = spikes.recent();
  if (is_spike) {
    ++loop_.skipped_steps;
    log::warning(
        "step {}: skipped, as its gradient norm {:.4g} is above {:.4g}, train.spike_factor {} "
        "times the median of the last {} steps",
        info.step, outcome.grad_norm, outcome.spike_threshold, config_.train.spike_factor,
        config_.train.spike_window);
  }
  info.metrics.set(metric::kSkippedSteps, static_cast<double>(loop_.skipped_steps));
}

StepInfo Trainer::train_step(TakenStep taken) {
  // One that was queued before began when the one before it ended.
  const auto start = taken.queued ? last_end_ : std::chrono::steady_clock::now();
  const data::Step& step = taken.step;
  const assembly::Model& model = *setup_.placed.model;
  const Divisors divisors = divisors_of(step);
  StepInfo info;
  info.step = step.step + 1;
  info.lr = learning_rate_of(step);
  if (learner_.recompute() != nullptr) {
    info.metrics.set(metric::kRecomputedLayers,
                     static_cast<double>(learner_.recompute()->recomputed_layers()));
  }
  const Learner::Outcome outcome = run(taken);
  const MicroBatchLoss& sums = outcome.sums;
  info.loss = sums.loss_sum.item<double>() / divisors.loss;
  const std::vector<const Metric*> metrics = objective_.metrics();
  for (std::size_t i = 0; i < metrics.size(); ++i)
    info.metrics.set(*metrics[i], sums.metric_sums[i].item<double>() / divisors.loss);
  info.grad_norm = outcome.grad_norm;
  if (outcome.gradient_cosine) info.metrics.set(metric::kGradCosPrev, *outcome.gradient_cosine);
  require_finite(info, setup_);
  judge_norm(outcome, taken, info);
  if (outcome.grad_norm <= outcome.spike_threshold)
    warn(untrained_.after_step(learner_.optimizer(), info.lr, info.grad_norm));
  last_end_ = std::chrono::steady_clock::now();

  info.seconds = std::chrono::duration<double>(last_end_ - start).count();
  info.tokens = step.tokens;
  info.loss_tokens = step.loss_rows;
  info.tokens_per_s = static_cast<double>(step.tokens) / info.seconds;
  const std::int64_t per_epoch = std::max<std::int64_t>(1, steps_.info().steps_per_epoch);
  info.epoch = static_cast<double>(info.step) / static_cast<double>(per_epoch);
  if (peak_flops_ > 0 && step.sequences > 0) {
    const double length = static_cast<double>(step.tokens) / static_cast<double>(step.sequences);
    const double share = setup_.placed.adapters ? 2.0 / 3.0 : 1.0;
    info.mfu = models::training_flops_per_token(model.config(), length, share) * info.tokens_per_s /
               peak_flops_;
    if (info.mfu > 1) info.mfu = 0;  // the peak was measured while the machine was busy
  }
  info.memory_bytes = device::memory(setup_.placed.context.device).peak_bytes;
  if (auxiliary_coefficient_ > 0)
    info.metrics.set(metric::kAuxLoss, sums.auxiliary_sum.item<double>() / divisors.sparse_tokens);
  if (sums.expert_load.defined()) {
    const LoadBalance balance = load_max_over_mean(sums.expert_load);
    info.metrics.set(metric::kMoeLoad, balance.largest);
    info.metrics.set(metric::kMoeLoadMean, balance.mean);
  }
  if (sums.replayed.defined()) {
    const at::Tensor replayed = sums.replayed.cpu();
    const auto choices = replayed[0].item<double>(), agreed = replayed[1].item<double>();
    info.metrics.set(metric::kRouterReplayed, choices);
    if (choices > 0) info.metrics.set(metric::kRouterAgreement, agreed / choices);
  }
  steps_.on_updated(info);
  return info;
}

void Trainer::warn(const std::string& message) {
  if (message.empty()) return;
  if (setup_.placed.context.mesh.rank() == 0) log::warning("{}", message);
  observer_.on_warning(message);
}

Evaluation Trainer::evaluate() {
  learner_.release_graphs();
  return steps_.evaluate();
}

void Trainer::evaluate_on_start() {
  if (!config_.train.eval_on_start || !steps_.has_evaluation() || first_step_ > 0) return;
  observer_.on_evaluation(0, evaluate(), /*best=*/false);
}

bool Trainer::evaluate_if_due(StepInfo& info, const Pause& pause) {
  last_eval_.reset();
  improved_ = false;
  if (!pause.evaluates) return false;
  const Evaluation evaluation = evaluate();
  const std::string& metric = config_.eval.metric;
  const double value = number_of(evaluation, metric);
  last_eval_ = cost_of(metric, value);
  improved_ = !loop_.best_eval || is_better(metric, value, *loop_.best_eval);
  if (improved_) loop_.best_eval = value;
  loop_.evaluations_without_gain = improved_ ? 0 : loop_.evaluations_without_gain + 1;
  info.add(evaluation);
  observer_.on_evaluation(info.step, evaluation, improved_);
  return has_lost_patience();
}

bool Trainer::has_lost_patience() const {
  const std::int64_t patience = config_.train.early_stop_patience;
  return patience > 0 && loop_.evaluations_without_gain >= patience;
}

std::string Trainer::limit_reached() const {
  const config::TrainSection& train = config_.train;
  // Without final/ it was killed after its last step, and still has a result to write and report.
  const bool has_result =
      std::filesystem::exists(std::filesystem::path(train.output_dir) / "final");
  if (first_step_ == 0 || !has_result) return "";
  if (first_step_ >= steps_.info().total_steps) {
    const bool by_steps = train.max_steps > 0 && steps_.info().total_steps == train.max_steps;
    return by_steps ? fmt::format("train.max_steps {}", train.max_steps)
                    : fmt::format("train.epochs {}", train.epochs);
  }
  return steps_.has_evaluation() && has_lost_patience()
             ? fmt::format("train.early_stop_patience {}", train.early_stop_patience)
             : "";
}

void Trainer::fill(Summary& summary, std::int64_t steps) const {
  summary.steps = steps;
  summary.first_loss = loop_.first_loss;
  summary.last_loss = loop_.last_loss;
  summary.has_eval = loop_.best_eval.has_value();
  summary.best_eval = loop_.best_eval.value_or(0);
  summary.best_metric = loop_.best_metric;
  const assembly::ModelOnRanks& placed = setup_.placed;
  if (!placed.adapters) return;
  const models::Head head = placed.model->head();
  summary.adapted_class = ckpt::auto_class(placed.source->config(), head == models::Head::kEmbed,
                                           head == models::Head::kClassify);
}

Summary Trainer::run() {
  return comm::announcing_failure(setup_.placed.context.mesh.world().get(),
                                  [&] { return train(); });
}

Summary Trainer::train() {
  // Rank 0's disk decides.
  const std::string limit =
      setup_.placed.context.mesh.world_group().all_gather_objects(limit_reached()).front();
  if (!limit.empty()) {
    Summary summary;
    fill(summary, first_step_);
    // A run that was killed before this may have left the model of a smaller limit there.
    summary.output = export_final();
    observer_.on_already_finished(summary, limit);
    return summary;
  }
  observer_.on_start(describe());
  evaluate_on_start();
  const auto start = std::chrono::steady_clock::now();
  Summary summary;
  std::int64_t done = first_step_;
  const std::int64_t total = steps_.info().total_steps;
  bool fresh = first_step_ == 0;
  const comm::Group everybody = setup_.placed.context.mesh.world_group();
  bool is_stopping = false;
  Pause due;
  // It may have ended so without the time to write its result.
  summary.stopped_early = first_step_ > 0 && steps_.has_evaluation() && has_lost_patience();
  while (!summary.stopped_early &&
         (ahead_ || !steps_.may_pause() || !(is_stopping = everybody.any(stop_)))) {
    std::optional<TakenStep> taken = next_step();
    if (!taken) break;
    std::optional<StepProfile> profile;
    if (taken->step.step + 1 == config_.log.profile_step && everybody.rank() == 0)
      profile.emplace(setup_.placed.context.device);
    StepInfo info = train_step(std::move(*taken));
    if (profile) profile->finish(config_.train.output_dir);
    done = info.step;
    loop_.last_loss = info.loss;
    if (std::exchange(fresh, false)) loop_.first_loss = info.loss;
    due |= pause_behind(done);
    const Pause pause = steps_.may_pause() ? std::exchange(due, {}) : Pause{};
    summary.stopped_early = evaluate_if_due(info, pause);
    observer_.on_step(info);
    if (pause.saves || (improved_ && config_.ckpt.keep_best)) save(done);
    if (summary.stopped_early) break;
  }
  warn(untrained_.at_end(learner_.optimizer()));
  summary.stopped = is_stopping && done < total && !summary.stopped_early;
  if (last_saved_ != done && (done > 0 || summary.stopped)) save(done);
  checkpoints_->wait();
  if (!summary.stopped) summary.output = export_final();
  fill(summary, done);
  summary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  observer_.on_finish(summary);
  return summary;
}

double Trainer::usual_micro_batches() const {
  const double rows = static_cast<double>(rows_of_step(config_).global_batch_size) /
                      static_cast<double>(setup_.placed.context.mesh.data_size());
  return std::max(1.0, std::ceil(rows * steps_.info().mean_row_tokens /
                                 static_cast<double>(config_.train.micro_batch_tokens)));
}

RunInfo Trainer::describe() const {
  const double micro_batches = usual_micro_batches();
  RunInfo info = describe_setup(setup_, config_, learner_.optimizer(), micro_batches);
  const data::LoaderInfo& loader = steps_.info();
  info.data_summary = steps_.summary();
  info.tokens_per_epoch = loader.tokens_per_epoch;
  info.steps_per_epoch = loader.steps_per_epoch;
  info.total_steps = loader.total_steps;
  info.packing_efficiency = loader.packing_efficiency;
  info.first_step = first_step_;
  StepRows step = rows_of_step(config_);
  step.of_data = loader.rows_per_epoch;
  if (setup_.placed.stages.ranks > 1) {
    step.micro_batches = micro_batches;
    info.pipeline =
        setup_.placed.pipeline->schedule(static_cast<std::int64_t>(micro_batches)).draw();
  }
  info.idle = idle_ranks(setup_.placed.context.mesh, step);
  return info;
}

std::filesystem::path Trainer::export_final() {
  const std::filesystem::path output = std::filesystem::path(config_.train.output_dir) / "final";
  if (setup_.placed.context.mesh.rank() > 0) return output;
  write_result(config_, setup_, output,
               {.overwrite = true,
                .max_shard_bytes = static_cast<std::uint64_t>(config_.ckpt.export_.max_shard_size)},
               whole_tensors());
  return output;
}

}  // namespace heddle::train
