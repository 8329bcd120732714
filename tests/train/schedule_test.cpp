#include "train/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

namespace heddle::train {
namespace {

config::OptimSection options(config::Schedule schedule) {
  config::OptimSection options;
  options.lr = 1;
  options.schedule = schedule;
  options.warmup_steps = 10;
  options.min_lr_ratio = 0.1;
  options.decay_steps = 20;
  return options;
}

TEST(Schedule, WarmsUpFromTheFirstStep) {
  for (const auto schedule : {config::Schedule::kConstant, config::Schedule::kLinear,
                              config::Schedule::kCosine, config::Schedule::kWsd}) {
    EXPECT_DOUBLE_EQ(learning_rate(options(schedule), 0, 100), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(options(schedule), 9, 100), 1);
    EXPECT_DOUBLE_EQ(learning_rate(options(schedule), 10, 100), 1);
  }
}

TEST(Schedule, EndsWhereItSays) {
  EXPECT_DOUBLE_EQ(learning_rate(options(config::Schedule::kConstant), 99, 100), 1);
  EXPECT_NEAR(learning_rate(options(config::Schedule::kLinear), 100, 100), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(options(config::Schedule::kCosine), 100, 100), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(options(config::Schedule::kCosine), 55, 100), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(learning_rate(options(config::Schedule::kWsd), 79, 100), 1);
  EXPECT_NEAR(learning_rate(options(config::Schedule::kWsd), 90, 100), 0.55, 1e-12);
}

// Values of transformers.get_wsd_schedule at a quarter, half and the end of the decay.
TEST(Schedule, DecaysInTheFormAskedFor) {
  const auto rates = [](config::DecayType type) {
    config::OptimSection wsd = options(config::Schedule::kWsd);
    wsd.decay_type = type;
    EXPECT_DOUBLE_EQ(learning_rate(wsd, 80, 100), 1);
    return std::array{learning_rate(wsd, 85, 100), learning_rate(wsd, 90, 100),
                      learning_rate(wsd, 100, 100)};
  };
  const auto expect = [&](config::DecayType type, double quarter, double half) {
    const auto found = rates(type);
    EXPECT_NEAR(found[0], quarter, 1e-12);
    EXPECT_NEAR(found[1], half, 1e-12);
    EXPECT_NEAR(found[2], 0.1, 1e-12);
  };
  expect(config::DecayType::kLinear, 0.775, 0.55);
  expect(config::DecayType::kCosine, 0.1 + 0.9 * 0.85355339059327376, 0.55);
  expect(config::DecayType::kOneMinusSqrt, 0.55, 0.1 + 0.9 * 0.29289321881345254);
}

TEST(Schedule, PausesWhereTheWeightsOfAStepAreWanted) {
  config::RunConfig config;
  config.train.eval_every = 4;
  config.ckpt.every = 6;
  config.log.profile_step = 9;
  std::string found;
  for (std::int64_t done = 1; done <= 13; ++done) {
    const Pause pause = pause_behind(config, /*has_eval=*/true, done, 13);
    found += fmt::format("{}{}{}{}{} ", done, pause.evaluates ? "e" : "", pause.saves ? "s" : "",
                         pause.profiles ? "p" : "", pause.is_last ? "l" : "");
    EXPECT_EQ(pause.any(), pause.evaluates || pause.saves || pause.profiles || pause.is_last);
  }
  EXPECT_EQ(found, "1 2 3 4e 5 6s 7 8ep 9p 10 11 12es 13esl ");
}

TEST(Schedule, WithoutEvaluationAndCheckpointsOnlyTheEndPauses) {
  config::RunConfig config;
  config.train.eval_every = 1;
  config.ckpt.every = 0;
  for (std::int64_t done = 1; done <= 4; ++done) {
    EXPECT_EQ(pause_behind(config, /*has_eval=*/false, done, 5).any(), false) << done;
  }
  const Pause last = pause_behind(config, /*has_eval=*/false, 5, 5);
  EXPECT_TRUE(last.is_last && last.saves);
  EXPECT_FALSE(last.evaluates);
}

}  // namespace
}  // namespace heddle::train
