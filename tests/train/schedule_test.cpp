#include "train/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

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
