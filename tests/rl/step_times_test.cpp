// Where the time of a step of `heddle rl` goes.
#include <gtest/gtest.h>

#include "base/metrics.h"
#include "rl/rl_fixture.h"

namespace heddle {
namespace {

class StepTimes : public RlTest {
 protected:
  /// Parts of a step of one process.
  static constexpr const char* kParts[] = {"gen_s",           "score_s",         "reference_s",
                                           "critic_values_s", "critic_update_s", "prepare_s",
                                           "update_s",        "record_s"};

  static double sum_of_parts(const train::StepInfo& step) {
    double sum = 0;
    for (const char* part : kParts) {
      const double* seconds = step.metrics.find(part);
      if (seconds != nullptr) sum += *seconds;
    }
    return sum;
  }
  /// The parts are no more than the steps, and leave hardly anything of them unexplained.
  static void expect_whole(const Reports& reports) {
    double parts = 0, whole = 0;
    for (const train::StepInfo& step : reports.steps) {
      const double sum = sum_of_parts(step);
      EXPECT_LE(sum, step.seconds);
      EXPECT_DOUBLE_EQ(step.tokens_per_s, static_cast<double>(step.tokens) / step.seconds);
      parts += sum;
      whole += step.seconds;
    }
    // Less than 0.1 % where a step takes a second; here it takes hundredths.
    EXPECT_GT(parts, 0.8 * whole);
  }
};

TEST_F(StepTimes, AddUpToTheStep) {
  const Reports reports =
      train(run("critic", {"rl.algorithm.advantage=gae", "rl.reference.kl_coef=0.05"}));
  expect_whole(reports);
  for (const train::StepInfo& step : reports.steps) {
    for (const char* part : kParts) EXPECT_GT(step.metrics.at(part), 0) << part;
    for (const char* other : {"wait_s", "sync_s", "idle_trainer", "idle_rollout"})
      EXPECT_EQ(step.metrics.find(other), nullptr) << other;
  }
}

TEST_F(StepTimes, HaveNoPartsThatTheRunLacks) {
  const Reports reports = train(run("plain", {"rl.mode=async", "rl.max_staleness=2"}));
  expect_whole(reports);
  for (const char* part : {"reference_s", "critic_values_s", "critic_update_s"})
    EXPECT_EQ(reports.steps.front().metrics.find(part), nullptr) << part;
}

TEST_F(StepTimes, OfTheCriticGrowWithItsUpdates) {
  // On the same tokens, so that the load of the machine is all that may differ besides.
  const auto share = [&](const std::string& updates) {
    const Reports reports = train(
        run("updates-" + updates, {"rl.algorithm.advantage=gae", "rl.critic.updates=" + updates}));
    return reports.mean("critic_update_s", 0, 5) / reports.mean("critic_values_s", 0, 5);
  };
  EXPECT_GT(share("8"), 2 * share("1"));
}

}  // namespace
}  // namespace heddle
