#include "train/loop_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing/message_of.h"

namespace heddle::train {
namespace {

using ::testing::HasSubstr;

TEST(LoopState, ReadsWhatItWrote) {
  LoopState state;
  state.step = 12, state.optimizer_steps = 11, state.cursor = {{"row", 7}};
  state.first_loss = 2.5, state.last_loss = 1.25, state.evaluations_without_gain = 2;
  state.best_metric = "numeric";
  state.recent_norms = {0.1, 3.5}, state.skipped_steps = 3;
  for (const std::optional<double> best : {std::optional<double>(), std::optional<double>(0.75)}) {
    state.best_eval = best;
    nlohmann::ordered_json written;
    state.write(written);
    const LoopState read = LoopState::read(written, "step-00000012");
    EXPECT_EQ(read.step, 12);
    EXPECT_EQ(read.optimizer_steps, 11);
    EXPECT_EQ(read.cursor, state.cursor);
    EXPECT_EQ(read.first_loss, 2.5);
    EXPECT_EQ(read.last_loss, 1.25);
    EXPECT_EQ(read.best_eval, best);
    EXPECT_EQ(read.evaluations_without_gain, 2);
    EXPECT_EQ(read.best_metric, "numeric");
    EXPECT_EQ(read.recent_norms, state.recent_norms);
    EXPECT_EQ(read.skipped_steps, 3);
  }
}

TEST(LoopState, RefusesWhatItDoesNotKnow) {
  nlohmann::ordered_json written;
  LoopState().write(written);
  const auto refusal = [&] {
    return testing::message_of([&] { LoopState::read(written, "step-00000003"); });
  };
  written.erase("cursor");
  EXPECT_THAT(refusal(), HasSubstr("step-00000003: its state cannot be read"));
  written["heddle"] = 2;
  EXPECT_THAT(refusal(), HasSubstr("step-00000003: its state has version 2"));
}

}  // namespace
}  // namespace heddle::train
