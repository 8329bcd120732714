// Choices of train.recompute: auto, which are true and change no bit.
#include "train/auto_recompute.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "assembly/tiny_model_on_ranks.h"
#include "train/micro_batch.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using parallel::Recompute;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using train::LayerPolicies;
using train::RecomputeCost;
using train::StepMemory;

// Layers as they are: what costs no product is cheap, the MLP costs less a byte than the mixer.
const RecomputeCost kMixer = {{100, 70, 50, 10}, {0, 1, 4, 12}};
const RecomputeCost kWide = {{200, 150, 60, 10}, {0, 2, 9, 15}};

/// One rank's memory: 1000 bytes, and before the backward one row's inputs of `layers`.
StepMemory memory_of(std::vector<std::int64_t> layers, double scale = 1) {
  StepMemory memory;
  memory.held_bytes = 600;
  memory.rows = 1;
  memory.scale = scale;
  std::map<std::int64_t, std::int64_t> kept;
  for (const std::int64_t layer : layers) kept[layer] = 1;
  memory.moments[kept] = {400, 100};
  memory.moments[{}] = {300, 300};
  return memory;
}

double seconds(const std::vector<RecomputeCost>& costs, const LayerPolicies& policies) {
  double sum = 0;
  for (std::size_t i = 0; i < costs.size(); ++i)
    sum += costs[i].seconds[static_cast<std::size_t>(policies[i])];
  return sum;
}

TEST(RecomputeChoice, KeepsEverythingWhereItFits) {
  const std::vector<RecomputeCost> costs(4, kMixer);
  const StepMemory memory = memory_of({0, 1, 2, 3});
  const auto choose = [&](double limit) {
    return train::choose_recompute(
        costs, [&](const LayerPolicies& p) { return memory.peak(costs, p) <= limit; });
  };
  // 1000 with everything recomputed, 90 more for each layer that keeps all.
  EXPECT_EQ(train::describe(choose(1360)), "off");
  EXPECT_EQ(choose(1359), (LayerPolicies{Recompute::kElementwise, Recompute::kOff, Recompute::kOff,
                                         Recompute::kOff}));
  EXPECT_EQ(train::describe(choose(1240)), "elementwise");
  EXPECT_EQ(train::describe(choose(1239)), "elementwise in 3 layers, selective in 1");
  EXPECT_EQ(train::describe(choose(1000)), "full");
  EXPECT_EQ(train::describe(choose(999)), "full");
}

TEST(RecomputeChoice, TakesNoMoreTimeThanItMust) {
  const std::vector<RecomputeCost> costs = {kMixer, kWide, kMixer, kWide};
  const StepMemory memory = memory_of({0, 1, 2, 3});
  double before = std::numeric_limits<double>::infinity();
  for (double limit = 1000; limit <= 1600; limit += 7) {
    const auto fits = [&](const LayerPolicies& p) { return memory.peak(costs, p) <= limit; };
    const LayerPolicies chosen = train::choose_recompute(costs, fits);
    ASSERT_TRUE(fits(chosen)) << limit;
    // The best of all 256 is at most one layer's step cheaper.
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 256; ++i) {
      LayerPolicies other;
      for (int layer = 0; layer < 4; ++layer)
        other.push_back(static_cast<Recompute>(i >> (2 * layer) & 3));
      if (fits(other)) best = std::min(best, seconds(costs, other));
    }
    EXPECT_LE(seconds(costs, chosen), best + 8) << limit;
    EXPECT_LE(seconds(costs, chosen), before + 8) << limit;
    before = seconds(costs, chosen);
    for (std::size_t layer = 0; layer < 4; ++layer) {
      for (int policy = 0; policy < static_cast<int>(chosen[layer]); ++policy) {
        LayerPolicies other = chosen;
        other[layer] = static_cast<Recompute>(policy);
        EXPECT_FALSE(fits(other)) << limit << ", layer " << layer;
      }
    }
  }
  EXPECT_EQ(before, 0);
}

TEST(RecomputeChoice, EveryRankMustHaveTheMemoryForItsLayers) {
  const std::vector<RecomputeCost> costs(4, kMixer);
  // The fuller of two that have all layers decides.
  const StepMemory all = memory_of({0, 1, 2, 3});
  EXPECT_EQ(train::describe(train::choose_recompute(costs,
                                                    [&](const LayerPolicies& p) {
                                                      return all.peak(costs, p) <= 5000 &&
                                                             all.peak(costs, p) <= 1240;
                                                    })),
            "elementwise");
  // Only the one without room of two stages recomputes.
  const StepMemory first = memory_of({0, 1}), second = memory_of({2, 3});
  const auto chosen = train::choose_recompute(costs, [&](const LayerPolicies& p) {
    return first.peak(costs, p) <= 1180 && second.peak(costs, p) <= 1120;
  });
  EXPECT_EQ(chosen, (LayerPolicies{Recompute::kOff, Recompute::kOff, Recompute::kElementwise,
                                   Recompute::kElementwise}));
}

TEST(RecomputeChoice, ALargerMicroBatchNeedsMoreButNotMoreGradients) {
  const std::vector<RecomputeCost> costs(2, kMixer);
  const LayerPolicies full(2, Recompute::kFull);
  EXPECT_EQ(memory_of({0, 1}).peak(costs, full), 600 + 400);
  EXPECT_EQ(memory_of({0, 1}, 2).peak(costs, full), 600 + 100 + 2 * 300);
}

/// Steps of a small model on the CPU, in which a micro-batch has up to 256 tokens.
class Steps {
 public:
  explicit Steps(bool moe, double limit_gib = 0)
      : placed_(testing::tiny_model_on_ranks(at::kFloat, moe, assembly::Purpose::kTrain,
                                             c10::Device(c10::kCPU))) {
    optimizer_.emplace(placed_.trainable, config::OptimSection{}, 5);
    config::TrainSection options;
    options.recompute = std::nullopt;
    options.memory_limit_gib = limit_gib;
    recompute_ = train::auto_recompute(options, placed_, pipeline(), *optimizer_, 256);
  }

  train::AutoRecompute& recompute() { return *recompute_; }
  parallel::Pipeline& pipeline() { return *placed_.pipeline; }
  double held() const {
    double bytes = static_cast<double>(optimizer_->state_bytes());
    for (const nn::Parameter* parameter : placed_.trainable)
      bytes += static_cast<double>(parameter->value().nbytes());
    return bytes;
  }

  /// `within`: called between the backward and the update. Returns the sum of the losses.
  double step(
      int i, const std::function<void()>& within = [] {}) {
    // The largest is not always the same.
    const int length = i % 3 == 1 ? 190 : 256;
    const std::vector<data::Batch> batches = {testing::batch_of({{i, 66}, {i + 10, length - 66}}),
                                              testing::batch_of({{i + 20, length / 2}})};
    double loss = 0;
    const auto run = [&] {
      const std::vector<objective::HeadFunction> heads(
          2, objective::language_model_head(*placed_.model, 1e-3));
      const auto sums = train::run_micro_batches(*placed_.model, nullptr, pipeline(),
                                                 placed_.trainable, batches, heads, {});
      within();
      loss = sums.loss_sum.item<double>();
      optimizer_->step(placed_.model->kernels(), 1e-3, 1);
    };
    recompute_->run(length, run);
    return loss;
  }
  double steps(int first, int end) {
    double loss = 0;
    for (int i = first; i < end; ++i) loss = step(i);
    return loss;
  }

 private:
  assembly::ModelOnRanks placed_;
  std::optional<train::Optimizer> optimizer_;
  std::unique_ptr<train::AutoRecompute> recompute_;
};

class AutoRecompute : public ::testing::TestWithParam<bool> {
 protected:
  static double gib(double bytes) { return bytes / (1 << 30); }
  /// Limit of which `bytes` are within the reserve.
  static double limit_for(double bytes) {
    return gib(bytes / (1 - train::AutoRecompute::kReserve)) * (1 + 1e-9);
  }
  /// Peaks of the tiny model: what a first run measured.
  static double peak(bool moe, Recompute policy) {
    Steps steps(moe);
    steps.steps(0, 3);
    return steps.recompute().peak(LayerPolicies(4, policy));
  }
};

TEST_P(AutoRecompute, PredictsThePeakOfEveryPolicy) {
  Steps steps(GetParam());
  EXPECT_EQ(train::describe(steps.recompute().policies()), "full");
  steps.steps(0, 4);
  EXPECT_EQ(train::describe(steps.recompute().policies()), "off");
  EXPECT_TRUE(steps.recompute().is_settled());
  const auto measured = [&](const LayerPolicies& policies) {
    steps.pipeline().set_recompute(policies);
    device::MemoryMeter meter(c10::Device(c10::kCPU));
    steps.step(6);
    return steps.held() + static_cast<double>(meter.take_peak());
  };
  double before = std::numeric_limits<double>::infinity();
  for (const LayerPolicies& policies :
       {LayerPolicies(4, Recompute::kOff), LayerPolicies(4, Recompute::kElementwise),
        LayerPolicies{Recompute::kSelective, Recompute::kSelective, Recompute::kElementwise,
                      Recompute::kElementwise},
        LayerPolicies(4, Recompute::kSelective), LayerPolicies(4, Recompute::kFull)}) {
    const double found = measured(policies), predicted = steps.recompute().peak(policies);
    std::printf("%s: %.0f bytes, predicted %.0f\n", train::describe(policies).c_str(), found,
                predicted);
    EXPECT_GE(predicted, 0.99 * found) << train::describe(policies);
    EXPECT_LE(predicted, 1.04 * found) << train::describe(policies);
    EXPECT_LT(predicted, before) << train::describe(policies);
    before = predicted;
  }
}

TEST_P(AutoRecompute, FillsTheMemoryThatIsThere) {
  const double off = peak(GetParam(), Recompute::kOff), full = peak(GetParam(), Recompute::kFull);
  for (const double share : {0.3, 0.6, 0.9}) {
    const double room = full + share * (off - full);
    Steps steps(GetParam(), limit_for(room));
    steps.steps(0, 4);
    EXPECT_TRUE(steps.recompute().is_settled());
    const LayerPolicies chosen = steps.recompute().policies();
    EXPECT_LE(steps.recompute().peak(chosen), room) << train::describe(chosen);
    EXPECT_GT(steps.recompute().recomputed_layers(), 0);
    EXPECT_NE(train::describe(chosen), "full");
  }
  // The reserve is not there, the memory is.
  Steps tight(GetParam(), gib(full * 1.001));
  tight.steps(0, 4);
  EXPECT_EQ(train::describe(tight.recompute().policies()), "full");
}

TEST_P(AutoRecompute, SaysWhatDoesNotFit) {
  const double full = peak(GetParam(), Recompute::kFull);
  Steps steps(GetParam(), gib(full * 0.99));
  steps.steps(0, 2);
  EXPECT_THAT(
      [&] { steps.step(2); },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("micro-batches of 256 tokens"), HasSubstr("KiB"),
                                       HasSubstr("train.micro_batch_tokens"))));
}

TEST_P(AutoRecompute, KeepsLessWhereAStepTookMoreThanWasMeasured) {
  const double off = peak(GetParam(), Recompute::kOff);
  Steps steps(GetParam(), limit_for(off));
  steps.steps(0, 3);
  EXPECT_EQ(train::describe(steps.recompute().policies()), "off");
  // As if the head had more rows: with the gradients more than the peak of the steps before.
  const auto more = static_cast<std::int64_t>(off - steps.held());
  const at::Tensor kept = [&] {
    at::Tensor tensor;
    steps.step(3, [&] { tensor = at::empty({more}, at::kByte); });
    return tensor;
  }();
  EXPECT_GT(steps.recompute().recomputed_layers(), 0);
  EXPECT_FALSE(steps.recompute().is_settled());
  steps.step(4);
  EXPECT_TRUE(steps.recompute().is_settled());
}

TEST_P(AutoRecompute, RunsAStepAgainThatRanOutOfMemory) {
  Steps undisturbed(GetParam()),
      steps(GetParam(), limit_for(1.01 * peak(GetParam(), Recompute::kOff)));
  const double expected = undisturbed.steps(0, 8);
  steps.steps(0, 5);
  int failures = 0;
  const auto fail_twice = [&] {
    if (failures++ < 2) TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory");
  };
  steps.step(5, fail_twice);
  EXPECT_EQ(failures, 3);
  EXPECT_GT(steps.recompute().recomputed_layers(), 0);
  EXPECT_EQ(steps.steps(6, 8), expected);
  // Until there is nothing left to try.
  EXPECT_THAT(
      [&] {
        steps.step(8, [] { TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory"); });
      },
      ThrowsMessage<ConfigError>(HasSubstr("CUDA out of memory")));
  EXPECT_EQ(train::describe(steps.recompute().policies()), "full");
}

INSTANTIATE_TEST_SUITE_P(DenseAndMoe, AutoRecompute, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "moe" : "dense"; });

using AutoRecomputeRun = TrainerTest;

TEST_F(AutoRecomputeRun, ChangesNoBit) {
  const auto losses_of = [&](const std::string& run, std::vector<std::string> more) {
    more.push_back("train.max_steps=6");
    std::vector<double> losses;
    train_until(config(run, more), 1000, &losses);
    return losses;
  };
  const std::vector<double> losses = losses_of("off", {});
  double off = 0, full = 0;
  {
    std::atomic<bool> stop = false;
    StopAfter observer(5, stop);
    train::Trainer trainer(config("measured", {"train.recompute=auto"}), observer, stop);
    trainer.run();
    EXPECT_EQ(train::describe(trainer.recompute()->policies()), "off");
    off = trainer.recompute()->peak(LayerPolicies(4, Recompute::kOff));
    full = trainer.recompute()->peak(LayerPolicies(4, Recompute::kFull));
  }
  const std::string expected = weights("off");
  for (const double share : {2.0, 0.5, 0.02}) {
    const std::string run = fmt::format("auto-{}", share);
    const double limit =
        (full + share * (off - full)) / (1 - train::AutoRecompute::kReserve) / (1 << 30);
    EXPECT_EQ(
        losses_of(run, {"train.recompute=auto", fmt::format("train.memory_limit_gib={}", limit)}),
        losses);
    EXPECT_EQ(weights(run), expected) << share;
  }
}

TEST_F(AutoRecomputeRun, ContinuesFromACheckpointAndMeasuresAnew) {
  const std::vector<std::string> more = {"train.recompute=auto", "train.max_steps=9"};
  train_until(config("whole", more), 1000);
  train_until(config("cut", more), 6);
  std::vector<double> losses;
  train_until(config("cut", more), 1000, &losses);
  EXPECT_EQ(losses.size(), 3u);
  EXPECT_EQ(weights("whole"), weights("cut"));
}

}  // namespace
}  // namespace heddle
