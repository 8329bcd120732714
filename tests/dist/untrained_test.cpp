// Trained tensors that no gradient reaches are named once, whichever ranks own them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using testing::LaunchedRuns;

constexpr const char* kWarning = "trained tensors had no gradient but zero in ";

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++found;
  return found;
}

class UntrainedTest : public ::testing::Test {
 protected:
  // In a text of one token before its label no gated DeltaNet has a state that could decay, so
  // nothing reaches what makes the decay.
  UntrainedTest() {
    std::ofstream rows(short_rows());
    for (int i = 0; i < 64; ++i) {
      rows << nlohmann::json{{"input_ids", {100 + i, 900 - i}}, {"labels", {-100, 900 - i}}}
           << "\n";
    }
  }
  std::string short_rows() const { return (runs_.directory() / "short.jsonl").string(); }

  /// All lines that a launch of two ranks printed or wrote to its logs.
  std::string log_of(const std::string& run, const std::vector<std::string>& words) {
    std::vector<std::string> command = {
        "launch", "--nproc", "2", "--log-dir", (runs_.directory() / (run + ".logs")).string(),
        "--"};
    command.insert(command.end(), words.begin(), words.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(command, runs_.log_of(run))), 0);
    return runs_.printed(run);
  }
  std::string plain(const std::string& run, const std::string& model,
                    const std::vector<std::string>& more) {
    std::vector<std::string> words = {"pt"};
    for (std::string& word : runs_.overrides(run, model, more)) words.push_back(std::move(word));
    return log_of(run, words);
  }

  LaunchedRuns runs_;
};

TEST_F(UntrainedTest, TensorsOfAllStagesAndPartsAreNamedOnce) {
  const std::vector<std::vector<std::string>> layouts = {
      {"parallel.pp=2"}, {"parallel.fsdp=2", "parallel.ep=2"}, {"parallel.tp=2"}};
  for (const std::vector<std::string>& layout : layouts) {
    std::vector<std::string> more = layout;
    // One tensor is left in each of the three layers with linear attention.
    more.insert(more.end(),
                {"data.train=" + short_rows(), "train.max_steps=4",
                 "train.freeze=['*.A_log', '*.dt_bias']", "train.router_aux_loss_coef=0"});
    const std::string log = plain(layout[0].substr(9), "moe", more);
    EXPECT_EQ(count(log, kWarning), 1u) << log;
    EXPECT_THAT(log, HasSubstr(" 3 of "));
    for (int layer = 0; layer < 3; ++layer) {
      const std::string name = fmt::format("model.layers.{}.linear_attn.in_proj_a.weight", layer);
      EXPECT_THAT(log, HasSubstr(name));
    }
  }
}

TEST_F(UntrainedTest, SoAreFactorsOfOneOfSeveralAdapters) {
  const std::string file = (runs_.directory() / "run.yaml").string(),
                    rows = (runs_.directory() / "train.jsonl").string();
  std::ofstream(file) << "adapters:\n"
                      << "  - {name: a, data: " << rows << ", rank: 4}\n"
                      << "  - {name: b, data: " << short_rows()
                      << ", rank: 3, targets: [in_proj_a, o_proj]}\n"
                      << "  - {name: c, data: " << rows << ", rank: 3, targets: [], "
                      << "target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}\n";
  std::vector<std::string> words = {"sft", file};
  for (const std::string& word :
       runs_.overrides("several", "moe",
                       {"train.router_aux_loss_coef=0", "train.max_steps=4", "parallel.dp=2"})) {
    if (!word.starts_with("data.train=")) words.push_back(word);
  }
  const std::string log = log_of("several", words);
  EXPECT_EQ(count(log, kWarning), 1u) << log;
  EXPECT_THAT(log, HasSubstr("adapter b: 6 of 8 "));
  EXPECT_THAT(log, HasSubstr("model.layers.0.linear_attn.in_proj_a.lora_A.weight"));
}

}  // namespace
}  // namespace heddle
