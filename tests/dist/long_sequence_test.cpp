// One sequence over many ranks along cp against one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;

class SlowLongSequenceTest : public ::testing::Test {
 protected:
  /// One row of so many tokens; a step or two over it.
  std::vector<LaunchedRuns::Step> run(const std::string& name, std::int64_t ranks,
                                      std::int64_t tokens, Words words) const {
    const auto file = runs_.directory() / (std::to_string(tokens) + ".jsonl");
    if (!std::filesystem::exists(file)) {
      std::vector<std::int64_t> ids;
      for (std::int64_t i = 0; i < tokens; ++i) ids.push_back((i * 7919 + i * i % 1013) % 4000);
      std::ofstream(file) << nlohmann::json{{"input_ids", ids}} << "\n";
    }
    words.insert(words.end(), {"data.train=" + file.string(), "data.format=tokens",
                               "data.max_length=" + std::to_string(tokens),
                               "train.global_batch_size=1", "train.epochs=2", "train.max_steps=2",
                               "train.recompute=full", "parallel.timeout_s=1800"});
    EXPECT_EQ(runs_.run(name, ranks, "dense", words), 0) << runs_.printed(name);
    return runs_.metrics(name);
  }

  void expect_equal(std::int64_t tokens, std::int64_t ranks, const std::string& dtype,
                    double bound) const {
    const std::string type = "model.dtype=" + dtype;
    const auto one = run("one", 0, tokens, {type});
    const auto many = run("many", ranks, tokens, {type, "parallel.cp=" + std::to_string(ranks)});
    ASSERT_EQ(one.size(), 2u);
    ASSERT_EQ(many.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(many[i].tokens, tokens);
      EXPECT_NEAR(many[i].loss, one[i].loss, bound * one[i].loss);
      EXPECT_NEAR(many[i].grad_norm, one[i].grad_norm, bound * one[i].grad_norm);
    }
  }

  LaunchedRuns runs_;
};

TEST_F(SlowLongSequenceTest, SixtyFourThousandTokensOverEightRanks) {
  expect_equal(65536, 8, "float32", 1e-5);
}

TEST_F(SlowLongSequenceTest, EightThousandTokensOverEightRanksInDouble) {
  expect_equal(8191, 8, "float64", 1e-9);
}

}  // namespace
}  // namespace heddle
