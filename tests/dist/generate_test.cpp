// `heddle generate` of a file: its rows' random streams, and several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;

class GenerateTest : public ::testing::Test {
 protected:
  /// The exit status; what was written is in `lines`.
  int generate(const std::vector<nlohmann::json>& rows, const Words& more,
               const Words& layout = {}) {
    const std::string input = (runs_.directory() / "prompts.jsonl").string(),
                      output = (runs_.directory() / "answers-out.jsonl").string();
    std::filesystem::remove(output);
    {
      std::ofstream file(input);
      for (const nlohmann::json& row : rows) file << row << "\n";
    }
    Words words;
    if (!layout.empty())
      words = {"launch", "--nproc", layout[0], "--log-dir", runs_.log_of("generate").string() + "s",
               "--"};
    for (const std::string& word :
         {std::string("generate"), runs_.model("dense").string(), std::string("--input"), input,
          std::string("--output"), output, std::string("--max-new-tokens"), std::string("6"),
          std::string("--ignore-eos"), std::string("--threads"), std::string("1")})
      words.push_back(word);
    if (std::ranges::find(more, "--dtype") == more.end())
      words.insert(words.end(), {"--dtype", "float64"});
    words.insert(words.end(), more.begin(), more.end());
    if (!layout.empty()) words.insert(words.end(), layout.begin() + 1, layout.end());
    const int status = testing::wait_for(testing::start_heddle(words, runs_.log_of("generate")));
    lines_.clear();
    std::ifstream file(output);
    for (std::string line; std::getline(file, line);) lines_.push_back(nlohmann::json::parse(line));
    return status;
  }
  std::vector<nlohmann::json> answers() const {
    std::vector<nlohmann::json> all;
    for (const nlohmann::json& line : lines_) all.push_back(line.at("output_ids"));
    return all;
  }

  LaunchedRuns runs_;
  std::vector<nlohmann::json> lines_;
};

TEST_F(GenerateTest, SamplesOfARunAreTheSameInEveryLayout) {
  struct Layout {
    std::int64_t ranks = 0;
    const char* model = "dense";
    Words words = {};
  };
  const Words sampled = {"log.sample_prompts=[row 7, 'text 12, longer']", "log.sample_tokens=8",
                         "train.max_steps=3", "model.dtype=float64", "log.report=true"};
  const auto samples = [&](const Layout& layout) {
    Words words = sampled;
    words.insert(words.end(), layout.words.begin(), layout.words.end());
    std::filesystem::remove_all(runs_.directory() / "sampled");
    EXPECT_EQ(runs_.run("sampled", layout.ranks, layout.model, words), 0)
        << runs_.printed("sampled");
    return nlohmann::json::parse(files::read(runs_.directory() / "sampled/report.json"))
        .at("samples");
  };
  for (const char* model : {"dense", "moe"}) {
    const nlohmann::json alone = samples({0, model});
    ASSERT_EQ(alone.size(), 2u);
    for (const Words& layout :
         {Words{"parallel.dp=2"}, {"parallel.fsdp=2"}, {"parallel.tp=2"}, {"parallel.pp=2"}}) {
      EXPECT_EQ(samples({2, model, layout}), alone) << model << " " << layout[0];
    }
  }
  EXPECT_EQ(samples({2, "moe", {"parallel.fsdp=2", "parallel.ep=2"}}), samples({0, "moe"}));
}

TEST_F(GenerateTest, RunsOnASimulatedNpu) {
  const std::vector<nlohmann::json> rows = {{{"input_ids", {5, 6, 7}}}, {{"input_ids", {9}}}};
  setenv("HEDDLE_SIM_NPU", "1", /*overwrite=*/1);
  const int status = generate(rows, {"--device", "npu", "--dtype", "float32"});
  unsetenv("HEDDLE_SIM_NPU");
  ASSERT_EQ(status, 0) << runs_.printed("generate");
  const auto on_npu = answers();
  ASSERT_EQ(generate(rows, {"--device", "cpu", "--dtype", "float32"}), 0);
  EXPECT_EQ(on_npu, answers());
}

TEST_F(GenerateTest, ARowHasAStreamOfItsOwn) {
  const std::vector<nlohmann::json> rows = {{{"input_ids", {5, 6, 7}}, {"seed", 3}},
                                            {{"input_ids", {9, 8}}, {"seed", 4}},
                                            {{"input_ids", {5, 6, 7}}},
                                            {{"input_ids", {5, 6, 7}}},
                                            {{"input_ids", {5, 6, 7}}, {"seed", 3}}};
  ASSERT_EQ(generate(rows, {"--seed", "1"}), 0) << runs_.printed("generate");
  const auto first = answers();
  ASSERT_EQ(first.size(), 5u);
  EXPECT_EQ(first[0], first[4]);
  EXPECT_NE(first[2], first[3]);  // their positions differ
  // Rows with a seed go with it; the others have that of their place.
  std::vector<nlohmann::json> turned(rows.rbegin(), rows.rend());
  ASSERT_EQ(generate(turned, {"--seed", "1", "--max-sequences", "2"}), 0);
  EXPECT_EQ(answers(), (std::vector{first[4], answers()[1], first[2], first[1], first[0]}));
  EXPECT_NE(answers()[1], first[3]);
  ASSERT_EQ(generate(rows, {"--seed", "2"}), 0);
  EXPECT_EQ(answers()[0], first[0]);
  EXPECT_NE(answers()[2], first[2]);
  EXPECT_EQ(generate({{{"input_ids", {5}}}, {{"input_ids", {5}}, {"seed", -1}}}, {}), 2);
  EXPECT_THAT(runs_.printed("generate"),
              ::testing::HasSubstr("prompts.jsonl:2: field 'seed' is -1: expected a whole number"));
}

TEST_F(GenerateTest, SeveralRanksWriteWhatOneWrites) {
  std::vector<nlohmann::json> rows;
  for (const int length : {1, 29, 2, 64, 7}) {
    std::vector<int> ids(static_cast<std::size_t>(length));
    std::generate(ids.begin(), ids.end(), [id = length]() mutable { return id++ % 4000; });
    rows.push_back({{"input_ids", ids}});
  }
  ASSERT_EQ(generate(rows, {}), 0) << runs_.printed("generate");
  const auto one = answers();
  for (const Words& layout :
       {Words{"4", "parallel.tp=2", "parallel.pp=2"}, {"2", "parallel.fsdp=2"}}) {
    ASSERT_EQ(generate(rows, {}, layout), 0) << runs_.printed("generate");
    EXPECT_EQ(answers(), one) << layout.back();
  }
  EXPECT_EQ(generate(rows, {}, {"2", "parallel.cp=2"}), 2);
  EXPECT_THAT(runs_.printed("generate"),
              ::testing::HasSubstr("parallel.cp is 2: expected 1 for generation"));
}

}  // namespace
}  // namespace heddle
