#include "bench/step_benchmark.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/rng.h"
#include "comm/group.h"
#include "device/device.h"
#include "models/flops.h"
#include "models/registry.h"
#include "objective/language_model.h"
#include "ops/autograd.h"
#include "train/learner.h"
#include "train/step_profile.h"

namespace heddle::bench {
namespace {

using models::Model;

/// Sequences of random tokens, all but the last position of each in the loss.
data::Batch random_batch(const std::vector<std::int32_t>& cu_seqlens, std::int64_t vocabulary,
                         std::uint64_t number) {
  const CounterRng rng(number, "bench/tokens");
  std::vector<std::int32_t> tokens, labels;
  std::vector<float> weights(static_cast<std::size_t>(cu_seqlens.back()), 1);
  for (std::uint64_t t = 0; t < weights.size(); ++t)
    tokens.push_back(
        static_cast<std::int32_t>(rng.below(t, static_cast<std::uint64_t>(vocabulary))));
  labels.assign(tokens.begin() + 1, tokens.end());
  labels.push_back(0);
  std::vector<data::SequenceView> views;
  for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    const auto first = static_cast<std::size_t>(cu_seqlens[i]),
               end = static_cast<std::size_t>(cu_seqlens[i + 1]), size = end - first;
    labels[end - 1] = static_cast<std::int32_t>(data::kIgnoredLabel);
    weights[end - 1] = 0;
    views.push_back({{tokens.data() + first, size},
                     {labels.data() + first, size},
                     {weights.data() + first, size},
                     static_cast<std::int64_t>(i),
                     0});
  }
  return data::Batch::from_sequences(views);
}

/// The preset, or its first layers. Throws ConfigError if it has fewer.
models::Config shape_of(const Benchmark& benchmark) {
  models::Json json = models::preset_json(benchmark.preset);
  if (benchmark.layers > 0) {
    auto& count = json.at("num_hidden_layers");
    if (benchmark.layers > count.get<std::int64_t>()) {
      throw_error<ConfigError>("bench step: --layers {}: {} has {}", benchmark.layers,
                               benchmark.preset, count.get<std::int64_t>());
    }
    count = benchmark.layers;
    if (const auto types = json.find("layer_types"); types != json.end())
      types->erase(types->begin() + benchmark.layers, types->end());
  }
  return models::parse_config(json, benchmark.preset);
}

/// A model with its optimizer, as a run has them.
class Bench {
 public:
  Bench(const Benchmark& benchmark, const config::RunConfig& config,
        const std::shared_ptr<comm::World>& world)
      : benchmark_(benchmark), config_(config) {
    assembly::ModelRecipe recipe = assembly::recipe_of_run(config, shape_of(benchmark));
    // No rate depends on their values.
    recipe.weights = assembly::Weights::kRandomOnDevice;
    placed_ = assembly::place(recipe, assembly::make_context(config, world));
    objective_.emplace(placed_);
    learner_.emplace(config, placed_, *objective_, benchmark.tokens.total());
  }

  Model& model() { return *placed_.model; }
  const comm::Mesh& mesh() const { return placed_.context.mesh; }
  c10::Device device() const { return placed_.context.device; }
  bool has_adapters() const { return placed_.adapters != nullptr; }
  std::int64_t tokens() const {
    return mesh().data_size() * benchmark_.micro_batches * benchmark_.tokens.total();
  }

  /// This data rank's micro-batches of a step.
  std::vector<data::Batch> batches(std::int64_t step) {
    std::vector<data::Batch> made;
    for (std::int64_t i = 0; i < benchmark_.micro_batches; ++i) {
      const std::int64_t number =
          (step * mesh().data_size() + mesh().data_rank()) * benchmark_.micro_batches + i;
      const auto draw = static_cast<std::uint64_t>(number);
      made.push_back(
          random_batch(benchmark_.tokens.boundaries(draw), model().config().vocab_size, draw));
    }
    return made;
  }

  /// Whether the device can be given a step while it is at the one before.
  bool queues() const { return learner_->queues_ahead(); }
  train::QueuedSteps::Queued queue(const std::vector<data::Batch>& batches) {
    return learner_->queue(batches, next_step(batches));
  }
  /// The mean loss of a step that was queued.
  double wait(train::QueuedSteps::Queued& queued, const std::vector<data::Batch>& batches) const {
    return loss_of(queued.wait(), batches);
  }

  /// One optimizer step; returns the mean loss.
  double step(const std::vector<data::Batch>& batches) {
    return loss_of(learner_->step(batches, next_step(batches)), batches);
  }

 private:
  double weights_of(const std::vector<data::Batch>& batches) const {
    double weights = 0;
    for (const data::Batch& batch : batches) weights += batch.loss_weight_sum;
    return weights * static_cast<double>(placed_.context.mesh.data_size());
  }

  double loss_of(const train::Learner::Outcome& outcome,
                 const std::vector<data::Batch>& batches) const {
    return outcome.sums.loss_sum.item<double>() / weights_of(batches);
  }
  train::Learner::StepOptions next_step(const std::vector<data::Batch>& batches) {
    return {.step = ++steps_, .loss_scale = 1 / weights_of(batches), .lr = config_.optim.lr};
  }

  const Benchmark& benchmark_;
  const config::RunConfig& config_;
  assembly::ModelOnRanks placed_;
  std::optional<objective::LanguageModel> objective_;
  std::optional<train::Learner> learner_;
  std::int64_t steps_ = 0;
};

/// The mean over tokens of the length of their sequence: what a token pays attention's FLOPs for.
double length_of_a_token(const Benchmark& benchmark) {
  if (benchmark.tokens.median == 0) return static_cast<double>(benchmark.tokens.length);
  double tokens = 0, squares = 0;
  for (std::int64_t step = benchmark.warmup; step < benchmark.warmup + benchmark.steps; ++step) {
    const auto draw = static_cast<std::uint64_t>(step * benchmark.micro_batches);
    const std::vector<std::int32_t> ends = benchmark.tokens.boundaries(draw);
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
      const double length = ends[i + 1] - ends[i];
      tokens += length;
      squares += length * length;
    }
  }
  return squares / tokens;
}

using Clock = std::chrono::steady_clock;

/// From each step's start, when all ranks have their batches, to its end.
std::vector<double> time_each_step(const Benchmark& benchmark, Bench& bench,
                                   std::vector<double>& losses) {
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < benchmark.warmup + benchmark.steps; ++i) {
    const std::vector<data::Batch> batches = bench.batches(i);
    bench.mesh().world_group().barrier();
    device::synchronize(bench.device());
    const auto start = Clock::now();
    losses.push_back(bench.step(batches));
    device::synchronize(bench.device());
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

/// From the end of one step to that of the next, which the device is given before, as in a run.
std::vector<double> time_queued_steps(const Benchmark& benchmark, Bench& bench,
                                      std::vector<double>& losses) {
  struct Taken {
    std::vector<data::Batch> batches;
    train::QueuedSteps::Queued queued;
  };
  const auto begin = [&](std::int64_t i) {
    std::vector<data::Batch> batches = bench.batches(i);
    train::QueuedSteps::Queued queued = bench.queue(batches);
    return Taken{std::move(batches), std::move(queued)};
  };
  const std::int64_t steps = benchmark.warmup + benchmark.steps;
  std::vector<double> seconds;
  auto last = Clock::now();
  std::optional<Taken> behind;
  for (std::int64_t i = 0; i < steps; ++i) {
    Taken taken = behind ? std::move(*behind) : begin(i);
    behind.reset();
    if (i + 1 < steps) behind.emplace(begin(i + 1));
    losses.push_back(bench.wait(taken.queued, taken.batches));
    const auto end = Clock::now();
    seconds.push_back(std::chrono::duration<double>(end - last).count());
    last = end;
  }
  return seconds;
}

/// The time of each step after the warm-up, in seconds and sorted.
std::vector<double> time_steps(const Benchmark& benchmark, Bench& bench, BenchmarkResult& result) {
  std::vector<double> losses,
      seconds = (bench.queues() ? time_queued_steps : time_each_step)(benchmark, bench, losses);
  result.first_loss = losses.front();
  result.last_loss = losses.back();
  seconds.erase(seconds.begin(), seconds.begin() + benchmark.warmup);
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

void profile_step(const Benchmark& benchmark, Bench& bench) {
  if (benchmark.profile.empty()) return;
  const std::vector<data::Batch> batches = bench.batches(benchmark.warmup + benchmark.steps);
  std::optional<train::StepProfile> profile;
  if (bench.mesh().rank() == 0) {
    files::make_writable_directory(benchmark.profile);
    profile.emplace(bench.device());
  }
  bench.step(batches);
  if (profile) profile->finish(benchmark.profile);
}

}  // namespace

BenchmarkResult run_benchmark(const Benchmark& benchmark, const config::RunConfig& config,
                              const std::shared_ptr<comm::World>& world) {
  Bench bench(benchmark, config, world);
  BenchmarkResult result;
  const std::vector<double> seconds = time_steps(benchmark, bench, result);
  result.peak_bytes = device::memory(bench.device()).peak_bytes;
  profile_step(benchmark, bench);
  result.layout = bench.mesh().describe();
  result.device = device::properties(bench.device()).name;
  result.kernels = bench.model().kernels().lines();
  result.tokens = bench.tokens();
  result.median_s = seconds[seconds.size() / 2];
  result.min_s = seconds.front();
  result.max_s = seconds.back();
  result.tokens_per_s = static_cast<double>(result.tokens) / result.median_s;
  result.flops_per_s =
      result.tokens_per_s * models::training_flops_per_token(bench.model().config(),
                                                             length_of_a_token(benchmark),
                                                             bench.has_adapters() ? 2.0 / 3 : 1);
  return result;
}

}  // namespace heddle::bench
