// Every file of recipes/ runs, with the tiny models of the tests instead of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "dist/launched_run.h"
#include "testing/paths.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;
using testing::LaunchedRuns;

class RecipeTest : public ::testing::Test {
 protected:
  static fs::path path_of(const std::string& name) {
    return testing::source_path("recipes/" + name + ".yaml");
  }
  static std::int64_t ranks_of(const std::string& name) {
    const config::ParallelSection p = config::load(path_of(name)).parallel;
    return p.dp.value * p.fsdp.value * p.tp * p.cp * p.pp;
  }

  /// Steps of a recipe, "dense_cp_state" or "ascend/dense_cp_state8".
  void expect_runs(const std::string& recipe, std::size_t steps = 3,
                   const std::map<std::string, std::string>& environment = {}) const {
    const std::string name = fs::path(recipe).filename().string();
    expect_runs_with(name.starts_with("moe") ? "moe" : "dense", recipe, name, steps, environment);
  }
  /// Steps of a recipe with this model, in a run of this name.
  void expect_runs_with(const std::string& model, const std::string& recipe,
                        const std::string& name, std::size_t steps,
                        const std::map<std::string, std::string>& environment) const {
    std::vector<std::string> words = {"launch",
                                      "--nproc",
                                      std::to_string(ranks_of(recipe)),
                                      "--log-dir",
                                      (runs_.directory() / (name + ".logs")).string(),
                                      "--",
                                      "sft",
                                      path_of(recipe).string()};
    for (const std::string& word :
         runs_.overrides(name, model, {"train.max_steps=" + std::to_string(steps)})) {
      // A recipe's own subject stays.
      if (!word.starts_with("train.global_batch_size") &&
          !word.starts_with("train.micro_batch_tokens") && !word.starts_with("data."))
        words.push_back(word);
    }
    words.push_back("data.train=" +
                    testing::source_path(config::load(path_of(recipe)).data.train.at(0).path));
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of(name), environment)), 0)
        << recipe << ":\n"
        << runs_.printed(name);
    EXPECT_EQ(runs_.metrics(name).size(), steps) << recipe;
    EXPECT_TRUE(fs::exists(runs_.directory() / name / "final")) << recipe;
  }

  LaunchedRuns runs_;
};

TEST_F(RecipeTest, EachRunsThreeSteps) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(path_of("single").parent_path())) {
    if (entry.path().extension() != ".yaml") continue;
    const std::string name = entry.path().stem().string();
    // Recipes of `heddle rl` start from what they make themselves.
    if (ranks_of(name) > 8 || name.starts_with("rl_")) continue;
    expect_runs(name);
    ++count;
  }
  EXPECT_EQ(count, 7);
}

const std::map<std::string, std::string> kSimulated = {{"HEDDLE_SIM_NPU", "1"}};

TEST_F(RecipeTest, RunWithQwen3OnCpusAndSimulatedNpus) {
  for (const std::string recipe :
       {"dense_dp2_tp2_pp2", "moe_dp2_tp2_pp2_ep2", "moe_tp2_pp2_cp2_ep2"}) {
    const std::string model = recipe.starts_with("moe") ? "qwen3_moe" : "qwen3";
    expect_runs_with(model, recipe, recipe + "-cpu", 3, {});
    expect_runs_with(model, "ascend/" + recipe, recipe + "-npu", 3, kSimulated);
  }
}

TEST_F(RecipeTest, OneOfAscendRunsOnSimulatedNpus) {
  expect_runs("ascend/dense_dp2_tp2_pp2", 3, kSimulated);
  // The vendor's operator has no backward: training takes the chunked one, and its table says so.
  EXPECT_THAT(runs_.printed("dense_dp2_tp2_pp2"),
              ::testing::ContainsRegex("gated_delta_rule +npu\\.chunk64"));
}

class SlowRecipeTest : public RecipeTest {};

TEST_F(SlowRecipeTest, EachOfAscendRunsTenStepsOnSimulatedNpus) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(path_of("single").parent_path() / "ascend")) {
    const std::string recipe = "ascend/" + entry.path().stem().string();
    EXPECT_EQ(ranks_of(recipe), 8) << recipe;
    expect_runs(recipe, 10, kSimulated);
    ++count;
  }
  EXPECT_EQ(count, 6);
}

TEST_F(SlowRecipeTest, SixteenRanks) {
  EXPECT_EQ(ranks_of("dense_dp4_ulysses4"), 16);
  expect_runs("dense_dp4_ulysses4");
}

}  // namespace
}  // namespace heddle
