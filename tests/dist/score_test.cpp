// `heddle score` on several ranks tells what one rank tells.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>

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
  std::vector<nlohmann::json> score(const std::string& model, const std::string& head,
                                    const Words& layout, const Words& more) {
    const std::string output = (runs_.directory() / "scored.jsonl").string();
    std::filesystem::remove(output);
    Words words;
    if (!layout.empty())
      words = {"launch", "--nproc", layout[0], "--log-dir", runs_.log_of("score").string() + "s",
               "--"};
    for (const std::string& word :
         {std::string("score"), runs_.model(model).string(), std::string("--input"),
          (runs_.directory() / "rows.jsonl").string(), std::string("--output"), output,
          std::string("--dtype"), std::string("float64"), std::string("--head"), head,
          std::string("--batch-tokens"), std::to_string(batch_tokens_), std::string("--threads"),
          std::string("1")})
      words.push_back(word);
    words.insert(words.end(), more.begin(), more.end());
    if (!layout.empty()) words.insert(words.end(), layout.begin() + 1, layout.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("score"))), 0)
        << runs_.printed("score");
    std::vector<nlohmann::json> lines;
    std::ifstream file(output);
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  void expect_same(const std::string& head, const Words& fields, const Words& layout,
                   const std::string& model = "dense", const Words& more = {}) {
    const auto one = score(model, head, {}, more), several = score(model, head, layout, more);
    ASSERT_EQ(one.size(), 7u);
    ASSERT_EQ(several.size(), 7u);
    for (std::size_t r = 0; r < one.size(); ++r) {
      EXPECT_EQ(several[r].at("text"), one[r].at("text"));
      for (const std::string& field : fields) {
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
  }

  LaunchedRuns runs_;
  std::int64_t batch_tokens_ = 64;
};

TEST_F(ScoreTest, SeveralRanksTellTheLogprobsAndEntropiesOfOne) {
  for (const Words& layout : {Words{"2", "parallel.tp=2"},
                              {"4", "parallel.cp=2", "parallel.fsdp=2"},
                              {"4", "parallel.pp=2", "parallel.tp=2"}})
    expect_same("lm", {"logprobs", "entropies"}, layout, "dense", {"--entropy"});
}

TEST_F(ScoreTest, SeveralRanksTellTheEmbeddingsOfOne) {
  expect_same("embed", {"embedding"}, {"4", "parallel.tp=2", "parallel.cp=2"});
  expect_same("embed", {"embedding"}, {"2", "parallel.dp=2"});
  expect_same("embed", {"embedding"}, {"2", "parallel.pp=2"});
}

// A head that was trained: a new one is another in every program.
TEST_F(ScoreTest, SeveralRanksTellTheClassLogitsOfOne) {
  ASSERT_EQ(runs_.run("classes", 0, "dense",
                      {"model.head=classify", "model.num_labels=3", "train.max_steps=1",
                       "data.train=" + (runs_.directory() / "labelled.jsonl").string()}),
            0)
      << runs_.printed("classes");
  for (const Words& layout :
       {Words{"2", "parallel.tp=2"}, {"4", "parallel.pp=2", "parallel.fsdp=2"}})
    expect_same("classify", {"logits"}, layout, "classes/final");
}

TEST_F(ScoreTest, SeveralRanksPutOnAnAdapterAsOneDoes) {
  const auto adapter_of = [&](const std::string& run, const std::string& model,
                              const Words& settings) {
    Words all = {"train.method=lora", "adapter.rank=4", "optim.lr=1e-2"};
    all.insert(all.end(), settings.begin(), settings.end());
    EXPECT_EQ(runs_.run(run, 0, model, all), 0) << runs_.printed(run);
    return Words{"--adapter", (runs_.directory() / run / "final").string()};
  };
  const Words dense = adapter_of("lora", "dense", {"adapter.modules_to_save=[embed_tokens]"});
  EXPECT_NE(score("dense", "lm", {}, dense), score("dense", "lm", {}, {}));
  expect_same("lm", {"logprobs"}, {"4", "parallel.tp=2", "parallel.fsdp=2"}, "dense", dense);
  expect_same("lm", {"logprobs"}, {"2", "parallel.pp=2"}, "dense", dense);
  const Words experts =
      adapter_of("expert-lora", "moe",
                 {"adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]"});
  expect_same("lm", {"logprobs"}, {"2", "parallel.fsdp=2", "parallel.ep=2"}, "moe", experts);
  const Words sharing =
      adapter_of("shared-lora", "moe",
                 {"adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]",
                  "adapter.shared_expert_factors=true"});
  expect_same("lm", {"logprobs"}, {"2", "parallel.fsdp=2", "parallel.ep=2"}, "moe", sharing);
  expect_same("lm", {"logprobs"}, {"4", "parallel.tp=2", "parallel.pp=2"}, "moe", sharing);
}

/// P4: what stands beside a sequence in its pack has no effect on it, be it NaN.
class PoisonedPackTest : public ScoreTest {
 protected:
  static constexpr std::int32_t kTail = 0;  ///< Fills a batch up (data::with_dummy_tail).
  static constexpr std::int32_t kNeighbour = 7;

  PoisonedPackTest() {
    batch_tokens_ = 4096;  // all in one pack
    // The neighbours stand before, between and after the others; over four ranks no number of
    // tokens is whole without a tail.
    std::ofstream rows(runs_.directory() / "rows.jsonl");
    std::int32_t id = 100;
    for (const int length : {-3, 29, 5, -33, 64, 1, -1, 31, -4}) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(std::abs(length)), kNeighbour);
      if (length > 0) std::generate(ids.begin(), ids.end(), [&] { return id++; });
      rows << nlohmann::json{{"input_ids", ids}} << "\n";
    }
    // A head of its own, or every probability would be NaN.
    runs_.make_model("untied", false, {{"tie_word_embeddings", false}});
    for (const std::string model : {"untied", "moe"}) {
      std::filesystem::copy(runs_.model(model), runs_.directory() / (model + "-poisoned"));
      poison(runs_.directory() / (model + "-poisoned") / "model.safetensors");
    }
  }

  /// Overwrites the embeddings of both tokens.
  static void poison(const std::filesystem::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    std::uint64_t bytes = 0;
    file.read(reinterpret_cast<char*>(&bytes), sizeof bytes);
    std::string header(bytes, ' ');
    file.read(header.data(), static_cast<std::streamsize>(bytes));
    const auto table = nlohmann::json::parse(header).at("model.embed_tokens.weight");
    ASSERT_EQ(table.at("dtype"), "F32");
    const std::uint64_t first = table.at("data_offsets").at(0), columns = table.at("shape").at(1);
    const std::vector<float> nan(columns, std::numeric_limits<float>::quiet_NaN());
    const std::uint64_t row_bytes = columns * sizeof(float);
    for (const std::int32_t id : {kTail, kNeighbour}) {
      file.seekp(static_cast<std::streamoff>(sizeof bytes + bytes + first + id * row_bytes));
      file.write(reinterpret_cast<const char*>(nan.data()),
                 static_cast<std::streamsize>(row_bytes));
    }
    ASSERT_TRUE(file.good());
  }

  /// `rounding`, relative: experts are sent other numbers of rows, and a row's product may round by
  /// its place among them.
  void expect_no_effect(const std::string& model, const Words& layout, double rounding) {
    SCOPED_TRACE(layout.back());
    const auto clean = score(model, "lm", layout, {}),
               poisoned = score(model + "-poisoned", "lm", layout, {"--keep-not-finite"});
    ASSERT_EQ(clean.size(), 9u);
    ASSERT_EQ(poisoned.size(), 9u);
    for (std::size_t r = 0; r < clean.size(); ++r) {
      const auto &expected = clean[r].at("logprobs"), &found = poisoned[r].at("logprobs");
      const bool is_neighbour = clean[r].at("input_ids")[0] == kNeighbour;
      if (!is_neighbour) {
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 1; i < found.size(); ++i) {
          const double wanted = expected[i];
          ASSERT_TRUE(found[i].is_number()) << "row " << r << ", token " << i;
          EXPECT_LE(std::abs(found[i].get<double>() - wanted), rounding * std::abs(wanted))
              << "row " << r << ", token " << i;
        }
      } else if (found.size() > 1) {
        EXPECT_TRUE(found[1].is_null());
      }
    }
  }
};

TEST_F(PoisonedPackTest, ReachesNoSequence) {
  expect_no_effect("untied", {"4", "parallel.tp=2", "parallel.cp=2"}, 0);
  expect_no_effect("untied", {"2", "parallel.cp=2", "parallel.cp_method=ulysses"}, 0);
  expect_no_effect("moe", {"2", "parallel.tp=2", "parallel.ep=2"}, 1e-14);
  expect_no_effect("moe", {"2", "parallel.cp=2", "parallel.ep=2"}, 1e-14);
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
                   runs_.model("dense").string(),
                   "--input",
                   (runs_.directory() / "rows.jsonl").string(),
                   "--output",
                   (runs_.directory() / "bad.jsonl").string()};
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("bad"))), 2);
    return runs_.printed("bad");
  };
  EXPECT_THAT(message_of({"parallel.pp=3"}), ::testing::HasSubstr("does not match the 2 ranks"));
  EXPECT_THAT(message_of({"parallel.dp=2", "optim.lr=1"}),
              ::testing::HasSubstr("of a configuration, parallel.* and kernels.* alone can be"));
  EXPECT_THAT(message_of({"parallel.dp=2", "kernels.gated_delta_rule=none_such"}),
              ::testing::HasSubstr("no kernel 'none_such'"));
  EXPECT_FALSE(std::filesystem::exists(runs_.directory() / "bad.jsonl"));
}

}  // namespace
}  // namespace heddle
