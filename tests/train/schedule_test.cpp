#include "train/schedule.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace heddle::train
