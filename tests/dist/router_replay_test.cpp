// train.router_record and train.router_replay: the experts of one run in another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;

class RouterReplayTest : public ::testing::Test {
 protected:
  std::string folder(const std::string& name) const { return (runs_.directory() / name).string(); }

  /// The largest relative differences of two runs.
  struct Difference {
    double loss = 0, norm = 0;
  };
  std::vector<LaunchedRuns::Step> steps(const std::string& run, std::int64_t ranks, Words settings,
                                        const std::string& model = "moe") {
    settings.emplace_back("train.micro_batch_tokens=96");
    EXPECT_EQ(runs_.run(run, ranks, model, settings), 0) << runs_.printed(run);
    return runs_.metrics(run);
  }
  static Difference difference(const std::vector<LaunchedRuns::Step>& a,
                               const std::vector<LaunchedRuns::Step>& b) {
    Difference largest;
    EXPECT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      largest.loss = std::max(largest.loss, std::abs(a[i].loss / b[i].loss - 1));
      largest.norm = std::max(largest.norm, std::abs(a[i].grad_norm / b[i].grad_norm - 1));
    }
    return largest;
  }
  std::string message_of(const Words& settings) {
    EXPECT_NE(runs_.run("bad", 0, "moe", settings), 0);
    return runs_.printed("bad");
  }

  LaunchedRuns runs_;
};

// The choices of a model of other weights, so that they are nobody's own here.
TEST_F(RouterReplayTest, WhatOneLayoutRecordsAnyOtherTakes) {
  runs_.make_model("other", true, {{"initializer_range", 0.2}});
  ASSERT_EQ(runs_.run("source", 4, "other",
                      {"parallel.tp=2", "parallel.pp=2", "model.dtype=float64",
                       "train.micro_batch_tokens=96", "train.router_record=" + folder("choices")}),
            0)
      << runs_.printed("source");
  const std::string replay = "train.router_replay=" + folder("choices");
  const auto own = steps("own", 0, {"model.dtype=float64"});
  const auto one = steps("one", 0, {"model.dtype=float64", replay});
  EXPECT_GT(difference(one, own).norm, 1e-4);
  int number = 0;
  for (const Words& layout : {Words{"parallel.dp=2", "parallel.fsdp=2", "parallel.ep=4"},
                              {"parallel.cp=2", "parallel.tp=2", "train.recompute=full"},
                              {"parallel.pp=2", "parallel.tp=2", "parallel.ep=2"}}) {
    Words settings = {"model.dtype=float64", replay};
    settings.insert(settings.end(), layout.begin(), layout.end());
    const Difference found =
        difference(steps("layout-" + std::to_string(number++), 4, settings), one);
    EXPECT_LT(found.loss, 1e-9) << layout[0];
    EXPECT_LT(found.norm, 1e-9) << layout[0];
  }
}

// A model wide enough for bf16: the gradient of a narrow one is rounding to a good part.
TEST_F(RouterReplayTest, InBf16LayoutsAgreeWithTheSameExperts) {
  runs_.make_model("wide", true,
                   {{"hidden_size", 128},
                    {"head_dim", 32},
                    {"linear_key_head_dim", 32},
                    {"linear_value_head_dim", 32},
                    {"moe_intermediate_size", 64},
                    {"shared_expert_intermediate_size", 64},
                    {"initializer_range", 0.02}});
  const auto one =
      steps("one", 0, {"model.dtype=bfloat16", "train.router_record=" + folder("choices")}, "wide");
  int number = 0;
  for (const Words& layout : {Words{"parallel.tp=2"}, {"parallel.fsdp=2", "parallel.ep=2"}}) {
    Words settings = {"model.dtype=bfloat16", "train.router_replay=" + folder("choices")};
    settings.insert(settings.end(), layout.begin(), layout.end());
    const Difference found =
        difference(steps("layout-" + std::to_string(number++), 2, settings, "wide"), one);
    EXPECT_LT(found.loss, 1e-4) << layout[0];
    EXPECT_LT(found.norm, 1e-3) << layout[0];
  }
}

// On fewer ranks than before the stop, whose files of later steps must not be read with the new.
TEST_F(RouterReplayTest, ARunThatContinuesRecordsTheLaterStepsAnew) {
  const Words record = {"model.dtype=float64", "optim.schedule=constant", "ckpt.every=2",
                        "train.router_record=" + folder("choices")};
  const auto run = [&](std::int64_t ranks, Words more) {
    more.insert(more.end(), record.begin(), record.end());
    return steps("stopped", ranks, more);
  };
  run(2, {"parallel.dp=2", "train.max_steps=5"});
  std::filesystem::remove_all(runs_.directory() / "stopped" / "checkpoints" / "step-00000005");
  const auto whole = run(0, {});
  ASSERT_TRUE(std::filesystem::exists(folder("choices/step-4-rank-1.safetensors")));
  EXPECT_FALSE(std::filesystem::exists(folder("choices/step-5-rank-1.safetensors")));
  const auto replayed = steps("replayed", 0,
                              {"model.dtype=float64", "optim.schedule=constant",
                               "train.router_replay=" + folder("choices")});
  const Difference found = difference(replayed, whole);
  EXPECT_LT(found.loss, 1e-9);
  EXPECT_LT(found.norm, 1e-9);
}

TEST_F(RouterReplayTest, WhatDoesNotFitIsNamed) {
  const std::string record = "train.router_record=" + folder("choices");
  steps("three", 0, {record, "train.max_steps=3"});
  EXPECT_THAT(message_of({record}), ::testing::HasSubstr("choices is not empty"));
  const std::string replay = "train.router_replay=" + folder("choices");
  EXPECT_THAT(message_of({replay, "train.micro_batch_tokens=96"}),
              ::testing::HasSubstr("choices has nothing of step 4"));
  EXPECT_THAT(message_of({replay, "train.seed=7"}),
              ::testing::HasSubstr("recorded with other data or in another order"));
  EXPECT_THAT(message_of({"train.router_replay=" + folder("nothing")}),
              ::testing::HasSubstr("nothing is no folder"));
  EXPECT_NE(runs_.run("bad", 0, "dense", {replay}), 0);
  EXPECT_THAT(runs_.printed("bad"), ::testing::HasSubstr("this model has no experts"));
}

}  // namespace
}  // namespace heddle
