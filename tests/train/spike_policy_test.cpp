#include "train/spike_policy.h"

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "train/trainer_fixture.h"

namespace heddle::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

config::TrainSection section(config::Spike policy, double factor, std::int64_t window) {
  config::TrainSection train;
  train.spike = policy, train.spike_factor = factor, train.spike_window = window;
  return train;
}

TEST(SpikePolicy, JudgesByTheMedianOfTheLastNorms) {
  SpikePolicy spikes(section(config::Spike::kSkip, 3, 4));
  for (const double norm : {1., 2., 4.}) spikes.remember(norm);
  EXPECT_EQ(spikes.threshold(), kNone);  // three of four
  spikes.remember(9);
  EXPECT_EQ(spikes.threshold(), 6);  // the lower one in the middle of 1 2 4 9
  spikes.remember(0.5);
  EXPECT_EQ(spikes.threshold(), 6);  // of 0.5 2 4 9
  spikes.remember(0.5);
  EXPECT_EQ(spikes.threshold(), 1.5);  // of 0.5 0.5 4 9
  EXPECT_EQ(SpikePolicy(section(config::Spike::kOff, 3, 2)).threshold(), kNone);
}

TEST(SpikePolicy, DecidesOnTheDeviceAsOnTheHost) {
  for (const std::int64_t window : {2, 3, 8}) {
    SpikePolicy host(section(config::Spike::kSkip, 1.5, window)), device = host;
    // A run continued from a checkpoint knows this.
    host.restore({0.7});
    device.restore({0.7});
    device.prepare(at::kCPU);
    for (int step = 0; step < 40; ++step) {
      const double norm = 1 + 0.9 * std::sin(step * step), threshold = host.threshold();
      const double refusal = device.object(at::scalar_tensor(norm, at::kDouble)).item<double>();
      EXPECT_EQ(device.threshold_on_device().item<double>(), threshold) << window << " " << step;
      EXPECT_EQ(std::isnan(refusal), norm > threshold) << window << " " << step;
      host.remember(norm);
    }
  }
}

TEST(SpikePolicy, NothingIsUpdatedAfterASpikeThatStops) {
  SpikePolicy spikes(section(config::Spike::kStop, 2, 2));
  spikes.prepare(at::kCPU);
  std::vector<bool> refused;
  for (const double norm : {1., 1., 1., 5., 1., 1.})
    refused.push_back(
        std::isnan(spikes.object(at::scalar_tensor(norm, at::kDouble)).item<double>()));
  EXPECT_EQ(refused, (std::vector<bool>{false, false, false, true, true, true}));
}

/// Norms and counts of a run.
class Norms : public Observer {
 public:
  void on_step(const StepInfo& info) override {
    norms.push_back(info.grad_norm);
    const double* count = info.metrics.find(metric::kSkippedSteps);
    skipped.push_back(count != nullptr ? *count : -1);
  }
  std::vector<double> norms, skipped;
};

class SpikeRuns : public TrainerTest {
 protected:
  Norms run(const std::string& name, std::vector<std::string> more) const {
    more.insert(more.begin(), {"optim.schedule=constant", "optim.warmup_steps=0",
                               "train.spike_factor=1.02", "train.spike_window=3"});
    Norms norms;
    std::atomic<bool> stop = false;
    Trainer(config(name, more), norms, stop).run();
    return norms;
  }
  /// The first step, from 1, that a run skips.
  std::int64_t first_skipped() const {
    const Norms norms = run("first", {"train.spike=skip"});
    for (std::size_t i = 0; i < norms.skipped.size(); ++i) {
      if (norms.skipped[i] > 0) return static_cast<std::int64_t>(i) + 1;
    }
    return 0;
  }
};

TEST_F(SpikeRuns, CountWhatThePolicySkips) {
  const Norms norms = run("run", {"train.spike=skip"});
  SpikePolicy policy(section(config::Spike::kSkip, 1.02, 3));
  double skipped = 0;
  ASSERT_EQ(norms.norms.size(), 12u);
  for (std::size_t i = 0; i < norms.norms.size(); ++i) {
    if (norms.norms[i] > policy.threshold()) ++skipped;
    EXPECT_EQ(norms.skipped[i], skipped) << i;
    policy.remember(norms.norms[i]);
  }
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 9);
}

TEST_F(SpikeRuns, ASkippedStepChangesNothing) {
  const std::int64_t step = first_skipped();
  ASSERT_GT(step, 3);
  const auto steps = [](std::int64_t n) { return "train.max_steps=" + std::to_string(n); };
  run("with", {"train.spike=skip", steps(step)});
  run("before", {"train.spike=skip", steps(step - 1)});
  run("off", {steps(step)});
  EXPECT_EQ(weights("with"), weights("before"));
  EXPECT_NE(weights("off"), weights("before"));
}

TEST_F(SpikeRuns, AStoppedRunHasACheckpointAndGoesOnWithSkip) {
  const std::int64_t step = first_skipped();
  const std::string message = testing::message_of([&] {
    run("stopped", {"train.spike=stop", "ckpt.every=100"});
  });
  EXPECT_THAT(message, ::testing::AllOf(
                           ::testing::HasSubstr(fmt::format("step {}: the gradient norm", step)),
                           ::testing::HasSubstr("train.spike_factor 1.02 times the median"),
                           ::testing::HasSubstr(fmt::format("step-{:08}", step - 1)),
                           ::testing::HasSubstr("train.spike=skip")));
  EXPECT_TRUE(fs::exists(dir_ / fmt::format("stopped/checkpoints/step-{:08}", step - 1)));
  // Once more from the checkpoint it stops at the same step.
  EXPECT_THAT(testing::message_of([&] {
                run("stopped", {"train.spike=stop", "ckpt.every=100"});
              }),
              ::testing::HasSubstr(fmt::format("step {}: the gradient norm", step)));
  run("stopped", {"train.spike=skip", "ckpt.every=100"});
  EXPECT_EQ(weights("stopped"), weights("first"));
}

TEST_F(SpikeRuns, ContinueBitIdentically) {
  const std::vector<std::string> more = {"train.spike=skip", "train.spike_factor=1.02",
                                         "train.spike_window=3"};
  train_until(config("whole", more), 1000);
  train_until(config("parts", more), 7);
  train_until(config("parts", more), 1000);
  EXPECT_EQ(weights("whole"), weights("parts"));
}

}  // namespace
}  // namespace heddle::train
