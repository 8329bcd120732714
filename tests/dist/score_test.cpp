// `heddle score` on several ranks tells what one rank tells.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;

class ScoreTest : public ::testing::Test {
 protected:
  ScoreTest() {
    std::ofstream rows(runs_.directory() / "rows.jsonl");
    for (const int length : {1, 29, 2, 64, 7, 33, 5})
      rows << nlohmann::json{{"text",
                              std::string(static_cast<std::size_t>(length), 'a' + length % 26)}}
           << "\n";
  }

  /// The lines that are written, and in `printed` what the program says.
  std::vector<nlohmann::json> score(const std::string& head, const Words& layout) {
    const std::string output = (runs_.directory() / "scored.jsonl").string();
    std::filesystem::remove(output);
    Words words;
    if (!layout.empty())
      words = {"launch", "--nproc", layout[0], "--log-dir", runs_.log_of("score").string() + "s",
               "--"};
    for (const std::string& word :
         {std::string("score"), (runs_.directory() / "dense").string(), std::string("--input"),
          (runs_.directory() / "rows.jsonl").string(), std::string("--output"), output,
          std::string("--dtype"), std::string("float64"), std::string("--head"), head,
          std::string("--batch-tokens"), std::string("64"), std::string("--threads"),
          std::string("1")})
      words.push_back(word);
    if (!layout.empty()) words.insert(words.end(), layout.begin() + 1, layout.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("score"))), 0)
        << runs_.printed("score");
    std::vector<nlohmann::json> lines;
    std::ifstream file(output);
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  void expect_same(const std::string& head, const std::string& field, const Words& layout) {
    const auto one = score(head, {}), several = score(head, layout);
    ASSERT_EQ(one.size(), 7u);
    ASSERT_EQ(several.size(), 7u);
    for (std::size_t r = 0; r < one.size(); ++r) {
      EXPECT_EQ(several[r].at("text"), one[r].at("text"));
      const auto &expected = one[r].at(field), &found = several[r].at(field);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i].is_null(), expected[i].is_null());
        if (expected[i].is_null()) continue;
        EXPECT_NEAR(found[i].get<double>(), expected[i].get<double>(), 1e-9)
            << field << " " << i << " of row " << r;
      }
    }
  }

  LaunchedRuns runs_;
};

TEST_F(ScoreTest, SeveralRanksTellTheLogprobsOfOne) {
  expect_same("lm", "logprobs", {"2", "parallel.tp=2"});
  expect_same("lm", "logprobs", {"4", "parallel.cp=2", "parallel.fsdp=2"});
}

TEST_F(ScoreTest, SeveralRanksTellTheEmbeddingsOfOne) {
  expect_same("embed", "embedding", {"4", "parallel.tp=2", "parallel.cp=2"});
  expect_same("embed", "embedding", {"2", "parallel.dp=2"});
}

TEST_F(ScoreTest, WhatCannotBeDividedIsNamed) {
  const auto message_of = [&](const Words& more) {
    Words words = {"launch",
                   "--nproc",
                   "2",
                   "--log-dir",
                   runs_.log_of("bad").string() + "s",
                   "--",
                   "score",
                   (runs_.directory() / "dense").string(),
                   "--input",
                   (runs_.directory() / "rows.jsonl").string(),
                   "--output",
                   (runs_.directory() / "bad.jsonl").string()};
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("bad"))), 2);
    return runs_.printed("bad");
  };
  EXPECT_THAT(message_of({"parallel.pp=2"}), ::testing::HasSubstr("parallel.pp must be 1"));
  EXPECT_THAT(message_of({"optim.lr=1"}),
              ::testing::HasSubstr("of a configuration, parallel.* alone can be set here"));
  EXPECT_FALSE(std::filesystem::exists(runs_.directory() / "bad.jsonl"));
}

}  // namespace
}  // namespace heddle
